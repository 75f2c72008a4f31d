"""A control, not a contender: softmax with a learned factor on far keys.

It gives softmax the locality prior that mechanisms with `local=chunk` or `local=window` have, so
that a comparison can tell the prior from the mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slayformer.attention.base import SCALAR_LEARNING_RATE, log_spread, mechanism_parameter
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.config import AttentionConfig, one_of, positive
from slayformer.registry import register_attention


@dataclass(kw_only=True)
class SoftmaxChunkFactorConfig(AttentionConfig):
    """Far are keys of earlier chunks, or those `chunk_size` positions back and more (`window`).

    Chunks are stretches of `chunk_size` positions, counted from the document's start. The learned
    factor starts at `far_factor` in the first head and (None: the same) at `last_far_factor` in the
    last, in equal ratios between.
    """

    chunk_size: int = positive()
    local: str = one_of("chunk", "window", default="chunk")
    far_factor: float = positive(default=1.0)
    last_far_factor: float | None = positive(None)


@register_attention("softmax_chunk_factor", SoftmaxChunkFactorConfig)
class SoftmaxChunkFactorAttention(QuadraticAttention):
    """softmax(q·k/√D + f_h [key is far]), with a learned log factor f_h."""

    normalization = "softmax"
    control = True

    def __init__(self, config: SoftmaxChunkFactorConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        start = log_spread(config.far_factor, config.last_far_factor, self.num_heads)
        self.log_far_factor = mechanism_parameter(start, SCALAR_LEARNING_RATE)

    def scores(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return q·k/√D."""
        return q_BHTD @ k_BHSD.mT * self.head_dim**-0.5

    def position_scores(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the log factor where the key is far from the query, else 0."""
        size = self.config.chunk_size
        if self.config.local == "chunk":
            far = query_positions // size != key_positions // size
        else:
            far = (query_positions - key_positions).abs() >= size
        return far[:, None] * self.log_far_factor

    def score_flops(self) -> int:
        """Return the product, the scale, the factor and the exponential."""
        return 2 * self.head_dim + 3
