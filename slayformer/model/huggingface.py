"""Weights of transformers' GPT-2 in and out (softmax attention)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slayformer.model.gpt2 import GPT2

# their name within a block → ours; their Conv1D keeps weights transposed
BLOCK_NAMES = {
    "ln_1": "attention_norm",
    "attn.c_attn": "query_key_value",
    "attn.c_proj": "attention_output",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp_input",
    "mlp.c_proj": "mlp_output",
}


def load_gpt2_weights(model: GPT2, weights: Mapping[str, Tensor]) -> None:
    """Copy the state_dict of a transformers GPT2LMHeadModel into `model`, rows cut or padded.

    Raises ValueError if a weight is missing or has another shape.
    """
    names = {
        "token_embedding.weight": "transformer.wte.weight",
        "position_embedding.weight": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }
    for layer in range(model.model.layers):
        for theirs, ours in BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{kind}"] = f"transformer.h.{layer}.{theirs}.{kind}"
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for ours, theirs in names.items():
            if theirs not in weights:
                raise ValueError(f"the weights lack {theirs}")
            source: Tensor = weights[theirs]
            target: Tensor = parameters[ours]
            if source.ndim == 2 and "norm" not in ours and "embedding" not in ours:
                source = source.T
            if ours == "token_embedding.weight":
                target = target[: model.vocabulary_size]
            if source.shape != target.shape:
                raise ValueError(f"{theirs} is {tuple(source.shape)}, not {tuple(target.shape)}")
            target.copy_(source)
