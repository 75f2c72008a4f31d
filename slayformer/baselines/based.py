"""Based (Arora et al., 2024): a second-order Taylor map of the exponential, and an exact window.

q and k are projected to a few dimensions F. Far pairs score 1 + s + s²/2 with s = q·k/√F, pairs
less than `window` apart the exponential e^s itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slayformer.attention.base import generator
from slayformer.attention.features import Features, SumOfSquares
from slayformer.attention.linear import LinearAttention
from slayformer.attention.near import NearExponential, NearKernel
from slayformer.config import AttentionConfig, positive
from slayformer.registry import register_attention


@dataclass(kw_only=True)
class BasedConfig(AttentionConfig):
    """`projected_width` F of q and k, and the `window` of exact scores."""

    projected_width: int = positive()
    window: int = positive()
    delta: float = positive()


@register_attention("based", BasedConfig)
class BasedAttention(LinearAttention):
    """F(F+1)/2 + F + 1 features; 1 + s + s²/2 = ((s + 1)² + 1)/2 is always positive."""

    def __init__(self, config: BasedConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        width = config.projected_width
        self.delta = config.delta
        self.feature_count = width * (width + 1) // 2 + width + 1
        self.score_width = 2 * width + 1
        self.local, self.local_size = "window", config.window
        shape = (2, self.num_heads, self.head_dim, width)
        drawn = torch.randn(shape, generator=generator(self.seed)) * self.head_dim**-0.5
        self.query_map_HDF = nn.Parameter(drawn[0])
        self.key_map_HDF = nn.Parameter(drawn[1])

    def feature_tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the projections of queries and keys, each with half of s = q·k/√F."""
        half = self.config.projected_width**-0.25
        return self.query_map_HDF.to(dtype) * half, self.key_map_HDF.to(dtype) * half

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return [vec_sym(y)/√2, y, 1] of the projected y."""
        y = x_BHTD @ tensors[0 if is_query else 1]
        rest = torch.cat([y, torch.ones_like(y[..., :1])], dim=-1)
        return SumOfSquares((y[..., None, :] * 0.5**0.25,), rest)

    def near_kernel(self, q_BHTD: Tensor, k_BHSD: Tensor, *tensors: Tensor) -> NearKernel:
        """Return e^s."""
        return NearExponential(q_BHTD @ tensors[0], k_BHSD @ tensors[1], 1.0)

    def feature_flops(self) -> int:
        """Return the projection and the products."""
        return 2 * self.config.projected_width * self.head_dim + 2 * self.feature_count
