"""Linear attention with φ(x) = elu(x) + 1 (Katharopoulos et al., 2020, eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import elu

from slayformer.attention.features import Dense, Features
from slayformer.attention.linear import LinearAttention
from slayformer.config import AttentionConfig, positive
from slayformer.registry import register_attention


@dataclass(kw_only=True)
class LinearEluConfig(AttentionConfig):
    """`delta` is added to the normaliser."""

    delta: float = positive()


@register_attention("linear_elu", LinearEluConfig)
class LinearEluAttention(LinearAttention):
    """M = D strictly positive features without parameters."""

    def __init__(self, config: LinearEluConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.delta = config.delta
        self.feature_count = self.score_width = self.head_dim

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return elu(x) + 1."""
        return Dense(elu(x_BHTD) + 1)

    def feature_flops(self) -> int:
        """Return an exponential and a sum per feature."""
        return 2 * self.head_dim
