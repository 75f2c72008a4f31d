"""Hedgehog (Zhang et al., 2024): learned features that imitate softmax.

φ(x) = [softmax(Wx), softmax(−Wx)] over the features, one W a head, which starts at the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slayformer.attention.features import Dense, Features
from slayformer.attention.linear import LinearAttention
from slayformer.config import AttentionConfig, positive
from slayformer.registry import register_attention


@dataclass(kw_only=True)
class HedgehogConfig(AttentionConfig):
    """`delta` is added to the normaliser."""

    delta: float = positive()


@register_attention("hedgehog", HedgehogConfig)
class HedgehogAttention(LinearAttention):
    """2·D positive features, trained with the model; q and k have maps of their own."""

    def __init__(self, config: HedgehogConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.delta = config.delta
        self.feature_count = self.score_width = 2 * self.head_dim
        identity_HDD = torch.eye(self.head_dim).repeat(self.num_heads, 1, 1)
        self.query_map_HDD = nn.Parameter(identity_HDD.clone())
        self.key_map_HDD = nn.Parameter(identity_HDD.clone())

    def feature_tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the maps of queries and keys."""
        return self.query_map_HDD.to(dtype), self.key_map_HDD.to(dtype)

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return [softmax(Wx), softmax(−Wx)]."""
        projected = x_BHTD @ tensors[0 if is_query else 1]
        return Dense(torch.cat([projected.softmax(-1), (-projected).softmax(-1)], dim=-1))

    def feature_flops(self) -> int:
        """Return the map and two softmaxes."""
        return 2 * self.head_dim**2 + 6 * self.head_dim
