"""Exact Yat attention, (q·k)²/(‖q − k‖² + ε) of unnormalised heads (paper, eq. 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slayformer.attention.base import SCALAR_LEARNING_RATE, mechanism_parameter
from slayformer.attention.kernels import yat
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.config import AttentionConfig, one_of, positive
from slayformer.registry import register_attention


@dataclass(kw_only=True)
class YatConfig(AttentionConfig):
    """`normalization`: the kernel's own sum, or a softmax over the scores as published."""

    normalization: str = one_of("softmax", "kernel")
    epsilon: float = positive()
    # ε becomes a parameter of every head, starting at `epsilon`
    learnable_epsilon: bool = False


@register_attention("yat", YatConfig)
class YatAttention(QuadraticAttention):
    """The Yat kernel of q and k."""

    def __init__(self, config: YatConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.normalization = config.normalization
        if config.learnable_epsilon:
            start = torch.full((self.num_heads, 1, 1), math.log(config.epsilon))
            self.log_epsilon = mechanism_parameter(start, SCALAR_LEARNING_RATE)

    @property
    def epsilon(self) -> float | Tensor:
        """ε, or [H, 1, 1] where it is learned."""
        if self.config.learnable_epsilon:
            return self.log_epsilon.exp()
        return self.config.epsilon

    def scores(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return the Yat kernel."""
        return yat(q_BHTD, k_BHSD, self.epsilon)

    def score_flops(self) -> int:
        """Return the product and six operations."""
        return 2 * self.head_dim + 6
