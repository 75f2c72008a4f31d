"""The causal mean of v: no attention at all, the floor every mechanism must beat."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slayformer.attention.features import Dense, Features
from slayformer.attention.linear import LinearAttention
from slayformer.config import AttentionConfig
from slayformer.registry import register_attention


class UniformConfig(AttentionConfig):
    """The mean has no options."""


@register_attention("uniform", UniformConfig)
class UniformAttention(LinearAttention):
    """One constant feature."""

    control = True
    # only keeps rows without a key finite
    delta = 1e-20
    feature_count = score_width = 1

    def __init__(self, config: UniformConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return 1; the zero product keeps q and k in the graph, with zero gradients."""
        return Dense(1 + 0 * x_BHTD[..., :1])

    def feature_flops(self) -> int:
        """Return nothing to compute."""
        return 0
