"""Features whose factors are activations of one product û W + b, as values.

An engine that makes the factors itself needs nothing else; one that does not takes the features
from `feature_map`. Both mean the same.

Shape suffixes: H heads, D head width, F columns of the product.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Projection:
    """û W + b and what becomes of its columns; every column but a `factor`'s can be scaled.

    The scales [H] multiply these columns of the queries' and of the keys' products.
    """

    weight_HDF: Tensor
    bias_HF: Tensor
    columns: tuple[Columns, ...]
    query_scale_H: Tensor | None = None
    key_scale_H: Tensor | None = None
    # of the spherical Yat kernel of near pairs, if there is one
    near_epsilon: Tensor | float | None = None
    near_scale: Tensor | float = 1.0
