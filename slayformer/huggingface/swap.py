"""Our mechanisms inside other models of transformers.

`swap_attention` puts a mechanism beside the projections of every attention layer, and transformers'
attention interface sends q, k and v there. What transformers keeps between tokens is then still its
own cache of keys and values: it grows with the length, and every new token walks over all of it.
States of constant size are what `SlayformerForCausalLM` has.

Shape suffixes: B batch, H heads, G heads of k and v, T queries, S keys, D head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from slayformer.errors import ConfigError
from slayformer.presets import make_attention

INTERFACE = "slayformer"


def swap_attention(model: PreTrainedModel, name: str, *, seed: int = 0, **options: Any) -> None:
    """Let every attention layer of `model` use mechanism `name`; weights stay as they are.

    Each layer gets a module `mechanism` that is trained and saved with the model, drawn from `seed`
    and the layer's number. To load what was saved, swap first, then `load_state_dict`. Attention
    dropout acts on the mechanism's output. Parameters of a mechanism are those of `model` from
    here on, so make the optimizer afterwards.

    Raises ConfigError if the name or an option does not exist, or the model's attention does not
    go through transformers' interface.
    """
    config = model.config
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "head_dim")
    ]
    if not layers or not model._supports_attention_backend:
        hint = "its attention does not go through transformers' AttentionInterface"
        raise ConfigError("model", type(model).__name__, hint)
    for layer in layers:
        if not getattr(layer, "is_causal", False) or getattr(layer, "sliding_window", None):
            hint = "needs layers of plain causal attention"
            raise ConfigError("model", type(model).__name__, hint)
    for layer in layers:
        like: Tensor = next(layer.parameters())
        mechanism = make_attention(
            name,
            num_heads=config.num_attention_heads,
            head_dim=layer.head_dim,
            max_sequence_length=config.max_position_embeddings,
            seed=seed * len(layers) + layer.layer_idx,
            **options,
        )
        # its features are computed in fp32 whatever the model's precision
        layer.mechanism = mechanism.to(like.device)
    model.set_attn_implementation(INTERFACE)


def _attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    mask_BS: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return (output [B, T, H, D], no weights) of the mechanism that `swap_attention` has put."""
    mechanism: Any = module.mechanism
    length, total = query_BHTD.shape[2], key_BGSD.shape[2]
    groups = query_BHTD.shape[1] // key_BGSD.shape[1]
    key_BHSD, value_BHSD = (x.repeat_interleave(groups, dim=1) for x in (key_BGSD, value_BGSD))
    if scaling is not None:
        # mechanisms that scale scores do so by 1/√D
        query_BHTD = query_BHTD * (scaling * mechanism.head_dim**0.5)
    # keys of a cache have no queries any more: rows for them are computed and dropped
    query_BHSD = F.pad(query_BHTD, (0, 0, total - length, 0))
    y_BHSD, _state = mechanism(query_BHSD, key_BHSD, value_BHSD, mask=mask_BS)
    y_BHTD = y_BHSD[:, :, total - length :]
    return F.dropout(y_BHTD, dropout).transpose(1, 2).contiguous(), None


def _padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Return which keys are real, [B, S], or None if all are.

    Raises ConfigError for what is not causal attention over everything so far.
    """
    if mask_function is not causal_mask_function or kv_offset:
        hint = "packed, windowed or bidirectional attention cannot be swapped"
        raise ConfigError("attention_mask", mask_function.__name__, hint)
    if q_offset + q_length != kv_length:
        raise ConfigError("cache", f"{kv_length} keys", "only caches that grow can be used here")
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask[:, -kv_length:].bool()


AttentionInterface.register(INTERFACE, _attention)
AttentionMaskInterface.register(INTERFACE, _padding_mask)
