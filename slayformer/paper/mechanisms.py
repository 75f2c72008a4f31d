"""Mechanisms for the paper's figures: one head, and what it weighs directions by.

Shape suffixes: T queries, S keys, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slayformer.attention.base import Attention
from slayformer.config import AttentionConfig
from slayformer.evaluation.attention_sample import pair_scores
from slayformer.presets import load_preset
from slayformer.registry import build_attention

# what figures and properties of one head need
MOST_TOKENS = 2048


def options(name: str, **changes: Any) -> AttentionConfig:
    """Return the options of mechanism `name`, computed by torch so that no compiler is needed."""
    return load_preset(name, **{"backend": "torch", **changes})


def one_head(name: str, width: int, seed: int, **changes: Any) -> Attention:
    """Return one head of mechanism `name` in evaluation mode."""
    attention = build_attention(
        options(name, **changes),
        num_heads=1,
        head_dim=width,
        max_sequence_length=MOST_TOKENS,
        seed=seed,
    )
    return attention.eval()


@torch.no_grad()
def direction_scores(attention: Attention, query_TD: Tensor, key_SD: Tensor) -> Tensor:
    """Return what `attention` weighs keys by, [T, S] fp64, all vectors of the typical length √D.

    A mechanism with exact near pairs is shown as it scores far ones.
    """
    length = query_TD.shape[-1] ** 0.5
    q, k = (length * x.double()[None, None] for x in (query_TD, key_SD))
    far = getattr(attention, "local_size", 0)
    query_positions = torch.full((1, len(query_TD)), far)
    key_positions = torch.zeros(1, len(key_SD), dtype=torch.long)
    return pair_scores(attention, q, k, query_positions, key_positions)[0, 0]
