"""Shape and weights of transformers' GPT-2 in, for any mechanism, and out, for softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slayformer.baselines.softmax import SoftmaxConfig
from slayformer.config import ModelConfig
from slayformer.errors import ConfigError
from slayformer.model.gpt2 import GPT2

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

# fields of ModelConfig as their config.json names them
SHAPE = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "context_length": "n_positions"}
# their settings that would make it another function than ours
SETTINGS = {
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "layer_norm_epsilon": 1e-5,
}
# their name → ours
NAMES = {
    "transformer.wte.weight": "token_embedding.weight",
    "transformer.wpe.weight": "position_embedding.weight",
    "transformer.ln_f.weight": "final_norm.weight",
    "transformer.ln_f.bias": "final_norm.bias",
}
# the same within a block
BLOCK_NAMES = {
    "ln_1": "attention_norm",
    "attn.c_attn": "query_key_value",
    "attn.c_proj": "attention_output",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp_input",
    "mlp.c_proj": "mlp_output",
}


def shape_of_gpt2(settings: Mapping[str, Any]) -> ModelConfig:
    """Return the shape of the GPT-2 that has `settings` in its config.json.

    Raises ValueError if it is another function than ours, or a part of its shape is missing.
    """
    for name, needed in SETTINGS.items():
        if settings.get(name, needed) != needed:
            raise ValueError(f"its {name} is {settings[name]}, ours is {needed}")
    for name in SHAPE.values():
        if not isinstance(settings.get(name), int):
            raise ValueError(f"its {name} is {settings.get(name)}, not a number")
    shape = {ours: settings[theirs] for ours, theirs in SHAPE.items()}
    inner = settings.get("n_inner")
    inner = 4 * shape["width"] if inner is None else inner
    if inner % shape["width"]:
        hint = f"ours is a multiple of its n_embd, {shape['width']}"
        raise ValueError(f"its n_inner is {inner}, {hint}")
    return ModelConfig(**shape, mlp_ratio=inner // shape["width"], vocabulary_multiple=1)


def load_gpt2_weights(model: GPT2, weights: Mapping[str, Tensor]) -> None:
    """Copy the state_dict of a transformers GPT2LMHeadModel into `model`, rows cut or padded.

    The mechanism's own weights stay. Raises ValueError if a weight is missing or has another shape.
    """
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for theirs, ours in gpt2_names(model.model.layers).items():
            if theirs not in weights:
                raise ValueError(f"the weights lack {theirs}")
            source: Tensor = turned(ours, weights[theirs])
            target: Tensor = parameters[ours]
            if ours == "token_embedding.weight":
                target = target[: model.vocabulary_size]
            if source.shape != target.shape:
                raise ValueError(f"{theirs} is {tuple(source.shape)}, not {tuple(target.shape)}")
            target.copy_(source)


def to_gpt2(model: GPT2) -> GPT2LMHeadModel:
    """Return a transformers GPT2LMHeadModel with copies of the weights of `model`.

    Raises ConfigError unless the mechanism is `softmax` and there is no short convolution, which
    is what GPT-2 is.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    shape, attention = model.model, model.blocks[0].attention.config  # type: ignore[union-attr]
    if not isinstance(attention, SoftmaxConfig):
        raise ConfigError("attention", attention.name, "GPT-2 has attention=softmax")  # type: ignore[union-attr]
    if shape.short_convolution:
        raise ConfigError("model.short_convolution", shape.short_convolution, "GPT-2 has none")
    config = GPT2Config(
        vocab_size=model.vocabulary_size,
        n_positions=shape.context_length,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.mlp_ratio * shape.width,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        # what we drop is the attention's output, which is their resid_pdrop
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = GPT2LMHeadModel(config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, ours in gpt2_names(shape.layers).items():
            source = turned(ours, parameters[ours])
            if ours == "token_embedding.weight":
                source = source[: model.vocabulary_size]
            theirs.get_parameter(name).copy_(source)
    return theirs.eval()


def gpt2_names(layers: int) -> dict[str, str]:
    """Return our name of each of their weights."""
    names = dict(NAMES)
    for layer in range(layers):
        for theirs, ours in BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"transformer.h.{layer}.{theirs}.{kind}"] = f"blocks.{layer}.{ours}.{kind}"
    return names


def turned(ours: str, weight: Tensor) -> Tensor:
    """Return `weight` as the other side keeps it: their Conv1D has matrices transposed."""
    is_matrix = weight.ndim == 2 and "embedding" not in ours
    return weight.T if is_matrix else weight
