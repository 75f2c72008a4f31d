"""A control, not a contender: softmax with a learned factor on the keys of earlier chunks.

It gives softmax the locality prior that mechanisms with `local=chunk` have, so that a comparison
can tell the prior from the mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slayformer.attention.base import SCALAR_LEARNING_RATE, mechanism_parameter
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.config import AttentionConfig, positive
from slayformer.registry import register_attention


@dataclass(kw_only=True)
class SoftmaxChunkFactorConfig(AttentionConfig):
    """Chunks are stretches of `chunk_size` positions, counted from the document's start."""

    chunk_size: int = positive()


@register_attention("softmax_chunk_factor", SoftmaxChunkFactorConfig)
class SoftmaxChunkFactorAttention(QuadraticAttention):
    """softmax(q·k/√D + f_h [key in an earlier chunk]), the log factor f_h starting at 0."""

    normalization = "softmax"
    control = True

    def __init__(self, config: SoftmaxChunkFactorConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        start = torch.zeros(self.num_heads, 1, 1)
        self.log_far_factor = mechanism_parameter(start, SCALAR_LEARNING_RATE)

    def scores(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return q·k/√D."""
        return q_BHTD @ k_BHSD.mT * self.head_dim**-0.5

    def position_scores(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the log factor where the key's chunk is not the query's, else 0."""
        size = self.config.chunk_size
        far = (query_positions // size != key_positions // size)[:, None]
        return far * self.log_far_factor

    def score_flops(self) -> int:
        """Return the product, the scale, the factor and the exponential."""
        return 2 * self.head_dim + 3
