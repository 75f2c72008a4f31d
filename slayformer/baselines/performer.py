"""Performer (Choromanski et al., 2021): ReLU features as in SLAY's table, or true FAVOR+.

Shape suffixes: H heads, D head width, M features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

from slayformer.attention.base import generator
from slayformer.attention.features import Dense, Features
from slayformer.attention.linear import LinearAttention
from slayformer.attention.positive_features import gaussian_rows
from slayformer.config import AttentionConfig, not_negative, one_of, positive
from slayformer.registry import register_attention

# added to ReLU features, as in the Performer's generalised kernel
RELU_FLOOR = 1e-3
# FAVOR+ exponents of keys reach from here down; e^{40} leaves room above and below in fp32
LARGEST_EXPONENT = 40.0


@dataclass(kw_only=True)
class PerformerConfig(AttentionConfig):
    """`relu`: relu(ωx) + 1e-3. `favor`: exp(ωx − ‖x‖²/2), whose mean is the softmax kernel."""

    features: str = one_of("relu", "favor")
    feature_count: int = positive()
    # new directions every that many training passes; 0 keeps the first
    redraw_every: int = not_negative()
    delta: float = positive()

    def redraws(self) -> bool:
        """See `AttentionConfig.redraws`."""
        return self.redraw_every > 0


@register_attention("performer", PerformerConfig)
class PerformerAttention(LinearAttention):
    """M positive random features of x/D^¼ with orthogonal directions, drawn per head."""

    config: PerformerConfig
    omega_HMD: Tensor
    passes: Tensor

    def __init__(self, config: PerformerConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.delta = config.delta
        self.feature_count = self.score_width = config.feature_count
        self.register_buffer("omega_HMD", self._draw(0))
        # training passes so far: a resumed run redraws at the same places
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def _draw(self, number: int) -> Tensor:
        """Return the directions of draw `number`, [H, M, D]; they follow from the seed."""
        draws = generator(self.seed + 1_000_000_007 * number)
        rows = self.config.feature_count
        return torch.stack(
            [gaussian_rows("orthogonal", rows, self.head_dim, draws) for _ in range(self.num_heads)]
        )

    def forward(self, *heads: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """See `Attention.forward`; redraws first when it is time."""
        every = self.config.redraw_every
        if self.training and every:
            passes = int(self.passes)
            if passes and passes % every == 0:
                self.omega_HMD.copy_(self._draw(passes // every))
            self.passes += 1
        return super().forward(*heads, **options)

    def feature_tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return ω/D^¼ as [H, D, M] and, for FAVOR+, the largest exponent a key can have."""
        omega_HMD = self.omega_HMD.to(dtype)
        projection_HDM = omega_HMD.mT * self.head_dim**-0.25
        # ω·x − ‖x‖²/2 ≤ ‖ω‖²/2: a constant of the draw, so the stabiliser is causal
        largest_H = omega_HMD.square().sum(-1).amax(-1) / 2
        return projection_HDM, largest_H[:, None, None] - LARGEST_EXPONENT

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return φ(x); a query's exponents are lowered by their own maximum, which cancels."""
        projection_HDM, shift_H11 = tensors
        projected = x_BHTD @ projection_HDM
        root = self.feature_count**-0.5
        if self.config.features == "relu":
            return Dense((relu(projected) + RELU_FLOOR) * root)
        exponent = projected - x_BHTD.square().sum(-1, keepdim=True) * self.head_dim**-0.5 / 2
        if is_query:
            exponent = exponent - exponent.amax(-1, keepdim=True).detach()
        else:
            exponent = exponent - shift_H11
        return Dense(torch.exp(exponent) * root)

    def feature_flops(self) -> int:
        """Return the projection and two operations a feature."""
        return 2 * self.feature_count * (self.head_dim + 1)
