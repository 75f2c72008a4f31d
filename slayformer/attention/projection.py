"""Features whose factors are activations of one product û W + b, as values.

An engine that makes the factors itself needs nothing else; one that does not takes the features
from `feature_map`. Both mean the same.

Shape suffixes: H heads, D head width, F columns of the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """`width` columns that one activation takes.

    kind: how they score, `squares` in blocks of width `block`, `linear`, or as the right side of a
    Kronecker product (`factor`). activation: `identity`, `square`, `exponent`, or `gated`, blocks
    times e to a column of their own; these columns stand behind the blocks.
    """

    kind: str
    activation: str
    width: int
    block: int = 0

    def scales(self, factor: float) -> list[tuple[int, float]]:
        """Return counts of the product's columns and what multiplies them to scale the features."""
        # features of squares are products of two columns
        is_squared = self.kind == "squares" or self.activation == "square"
        gates = self.width // self.block if self.activation == "gated" else 0
        return [(self.width, factor**0.5 if is_squared else factor), (gates, 1.0)]


@dataclass(frozen=True)
class Projection:
    """û W + b and what becomes of its columns."""

    weight_HDF: Tensor
    bias_HF: Tensor
    columns: tuple[Columns, ...]
    # near pairs' kernel, if they have one: the spherical Yat kernel with near_epsilon, or e to
    # near_factor times q·k
    near: Literal["yat", "exponential"] | None = None
    near_scale: Tensor | float = 1.0
    near_epsilon: Tensor | float = 0.0
    near_factor: float = 1.0

    def scaled(self, factor: float) -> Projection:
        """Return the projection whose features are `factor` times these."""
        scales = [scale for part in self.columns for scale in part.scales(factor)]
        scale_F = torch.cat([self.bias_HF.new_full((count,), x) for count, x in scales])
        return replace(self, weight_HDF=self.weight_HDF * scale_F, bias_HF=self.bias_HF * scale_F)
