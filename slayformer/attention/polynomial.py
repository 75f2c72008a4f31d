"""Degree-2 maps: features whose inner product stands for x² = (q̂·k̂)² (paper, section 2.4.2).

Each map is a small module with its draws, its sizes, and whether inner products are never
negative. `POLYNOMIALS` lists them by the name the configuration uses.

Shape suffixes: H heads, D head width, P features.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from slayformer.attention.base import (
    MAP_LEARNING_RATE,
    SCALAR_LEARNING_RATE,
    generator,
    mechanism_parameter,
)
from slayformer.attention.features import Dense, Features, SumOfSquares
from slayformer.attention.positive_features import orthogonal_rows
from slayformer.attention.projection import Columns, Projection
from slayformer.errors import ConfigError

# added to the block-quadratic kernel, so that no normaliser is zero
BLOCK_FLOOR = 1e-4
# where the centres of learned_quadratic start unless told otherwise: nearly x² itself
CENTER = 0.02
# regulariser λ of the Nyström map
NYSTROM_RIDGE = 1e-6


class PolynomialMap(nn.Module):
    """Base: `budget` features asked for, `feature_count` given."""

    positive = True
    feature_count: int
    # multiply-adds of one score
    score_width: int
    # multiply-adds of one vector's features, without the expansion
    projection_width: int

    def __init__(self, *, budget: int, heads: int, width: int, seed: int) -> None:
        super().__init__()
        self.budget, self.heads, self.width = budget, heads, width
        self.feature_count = self.score_width = self.projection_width = budget
        self.tensor_count = 0
        # of what is kept
        self.names: list[str] = []
        self.draws = generator(seed)

    def keep(
        self, name: str, value: Tensor, trainable: bool, scale: float = MAP_LEARNING_RATE
    ) -> None:
        """Register `value` as a parameter or as a persistent buffer."""
        self.tensor_count += 1
        self.names = sorted([*self.names, name])
        if trainable:
            self.register_parameter(name, mechanism_parameter(value, scale))
        else:
            self.register_buffer(name, value)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the `tensor_count` tensors that `features` reads, by name, in `dtype`."""
        return tuple(getattr(self, name).to(dtype) for name in self.names)

    def flops(self) -> int:
        """Return the FLOPs of one vector's projections."""
        return 2 * self.projection_width * self.width

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        """Return the features of unit vectors."""
        raise NotImplementedError

    def projection(self, *tensors: Tensor) -> Projection | None:
        """Return the features as activations of one product, if that is what they are."""
        return None


class Exact(PolynomialMap):
    """vec_sym(û): d(d+1)/2 features, x² exactly."""

    def __init__(self, *, trainable: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        self.feature_count = self.width * (self.width + 1) // 2
        self.score_width, self.projection_width = self.width, 0

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        return SumOfSquares((u_BHTD[..., None, :],), u_BHTD[..., :0])

    def projection(self, *tensors: Tensor) -> Projection:
        weight_HDD = torch.eye(self.width).expand(self.heads, -1, -1)
        columns = Columns("squares", "identity", self.width, self.width)
        return Projection(weight_HDD, weight_HDD[:, 0] * 0, (columns,))


class Anchor(PolynomialMap):
    """P^(−1/2) [(û·a_i)²], anchors uniform on the sphere and shared by the heads.

    The mean over anchors is (1 + 2x²)/(d(d+2)), a constant and 2x²; `anchor_scale: unbiased`
    multiplies by d(d+2)/2, so that x² has the factor 1.
    """

    def __init__(self, *, trainable: bool, anchor_scale: str, **sizes: int) -> None:
        super().__init__(**sizes)
        rows = torch.randn(self.budget, self.width, generator=self.draws, dtype=torch.float64)
        self.keep("anchors_PD", (rows / rows.norm(dim=-1, keepdim=True)).float(), trainable)
        paper = self.budget**-0.5
        unbiased = paper * (self.width * (self.width + 2) / 2) ** 0.5
        self.scale = unbiased if anchor_scale == "unbiased" else paper

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        return Dense((u_BHTD @ tensors[0].mT).square() * self.scale)

    def projection(self, *tensors: Tensor) -> Projection:
        weight_HDP = (tensors[0].mT * self.scale**0.5).expand(self.heads, -1, -1)
        columns = Columns("linear", "square", self.budget)
        return Projection(weight_HDP, weight_HDP.new_zeros(self.heads, self.budget), (columns,))


class Nystrom(PolynomialMap):
    """K_uA (K_AA + λI)^(−1/2) with K = (·)² and P anchors; entries can be negative."""

    positive = False

    def __init__(self, *, trainable: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        rows = torch.randn(self.budget, self.width, generator=self.draws, dtype=torch.float64)
        self.keep("anchors_PD", (rows / rows.norm(dim=-1, keepdim=True)).float(), trainable)
        self.tensor_count += 1

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the anchors and (K_AA + λI)^(−1/2), computed in fp64."""
        (anchors,) = super().tensors(torch.float64)
        gram = (anchors @ anchors.mT).square()
        gram = gram + NYSTROM_RIDGE * torch.eye(self.budget, dtype=gram.dtype, device=gram.device)
        values, vectors = torch.linalg.eigh(gram)
        root = vectors * values.clamp_min(NYSTROM_RIDGE).rsqrt() @ vectors.mT
        return anchors.to(dtype), root.to(dtype)

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        anchors_PD, root_PP = tensors
        return Dense((u_BHTD @ anchors_PD.mT).square() @ root_PP)


class RandomMaclaurin(PolynomialMap):
    """P^(−1/2) [(r_i·û)(t_i·û)], r and t Rademacher: unbiased, signed."""

    positive = False

    def __init__(self, *, trainable: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        shape = (2, self.budget, self.width)
        signs = torch.randint(0, 2, shape, generator=self.draws).float() * 2 - 1
        self.keep("signs_2PD", signs, trainable)
        self.projection_width = 2 * self.budget

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        first, second = (u_BHTD @ signs.mT for signs in tensors[0])
        return Dense(first * second * self.budget**-0.5)


class TensorSketch(PolynomialMap):
    """Two count sketches of û, multiplied in the Fourier domain (Pham & Pagh, 2013): signed."""

    positive = False

    def __init__(self, *, trainable: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        self.keep("sketch_2DP", count_sketches(self.width, self.budget, self.draws), trainable)
        self.projection_width = 2 * self.budget

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        first, second = tensors[0]
        return Dense(sketch_product(u_BHTD @ first, u_BHTD @ second))


class BlockQuadratic(PolynomialMap):
    """Σ_g x_g² + 1e-4 over the blocks of one rotation a head: strictly positive, data-free.

    The rotated vector is cut into the fewest near-equal blocks whose vec_sym features fit the
    budget; for widths up to 32 into one block as large as fits and single components.
    """

    def __init__(self, *, trainable: bool, **sizes: int) -> None:
        super().__init__(**sizes)
        rotation = [orthogonal_rows(self.width, self.width, self.draws) for _ in range(self.heads)]
        self.keep("rotation_HDD", torch.stack(rotation), trainable)
        self.block_widths, self.singles = self._plan(self.width, self.budget)
        pairs = sum(n * (n + 1) // 2 for n in self.block_widths)
        self.feature_count = pairs + self.singles + 1
        self.score_width = sum(self.block_widths) + self.singles + 1
        self.projection_width = self.width

    @staticmethod
    def _plan(width: int, budget: int) -> tuple[list[int], int]:
        """Return the widths of the blocks and the number of single components after them."""
        if width <= 32:
            for largest in range(width, 0, -1):
                if largest * (largest + 1) // 2 + (width - largest) + 1 <= budget:
                    return [largest], width - largest
        else:
            for count in range(1, width + 1):
                small, larger = divmod(width, count)
                widths = [small + 1] * larger + [small] * (count - larger)
                if sum(n * (n + 1) // 2 for n in widths) + 1 <= budget:
                    return widths, 0
        hint = f"the block_quadratic map of a head of width {width} needs at least {width + 1}"
        raise ConfigError("attention.polynomial_features", budget, hint)

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        y = u_BHTD @ tensors[0]
        groups = Counter(self.block_widths)
        sizes = [width * count for width, count in groups.items()]
        *parts, singles = y.split([*sizes, self.singles], dim=-1)
        blocks = (x.unflatten(-1, (-1, width)) for x, width in zip(parts, groups, strict=True))
        floor = torch.full_like(y[..., :1], BLOCK_FLOOR**0.5)
        return SumOfSquares(tuple(blocks), torch.cat([singles.square(), floor], dim=-1))

    def projection(self, *tensors: Tensor) -> Projection:
        # a column of its own becomes the floor
        weight_HDF = torch.nn.functional.pad(tensors[0], (0, 1))
        bias_HF = weight_HDF.new_zeros(self.heads, self.width + 1)
        bias_HF[:, -1] = BLOCK_FLOOR**0.25
        groups = Counter(self.block_widths).items()
        columns = [Columns("squares", "identity", n * count, n) for n, count in groups]
        columns.append(Columns("linear", "square", self.singles + 1))
        return Projection(weight_HDF, bias_HF, tuple(columns))


class LearnedQuadratic(PolynomialMap):
    """m Σ_g (e^{a_g(q) + a_g(k)} y_g(q)·y_g(k))², y_g = P_g û + c_g, a_g = ½(w_g·û + b_g).

    Never negative, whatever the parameters. Starts at orthonormal rows P_g, w = b = 0 and c =
    `center`: the further off, the more alike are all scores at the start, whose mean over random
    directions m leaves as it is at CENTER.
    """

    def __init__(self, *, trainable: bool, block_width: int, center: float, **sizes: int) -> None:
        super().__init__(**sizes)
        self.block_width = n = block_width
        self.blocks = self.budget // (n * (n + 1) // 2)
        if self.blocks < 1:
            hint = f"blocks of width {n} need at least {n * (n + 1) // 2}"
            raise ConfigError("attention.polynomial_features", self.budget, hint)
        rows = [orthogonal_rows(self.blocks * n, self.width, self.draws) for _ in range(self.heads)]
        heads, groups = self.heads, self.blocks
        # named so that sorting keeps the order `features` reads
        scalar = SCALAR_LEARNING_RATE
        self.keep("bias_HG", torch.zeros(heads, 1, groups), True, scalar)
        self.keep("center_HGN", torch.full((heads, 1, groups * n), center), True, scalar)
        self.keep("projection_HGND", torch.stack(rows), trainable=True)
        self.keep("weight_HGD", torch.zeros(heads, groups, self.width), trainable=True)
        self.multiplier = self._mean_score(CENTER) / self._mean_score(center)
        self.feature_count = groups * n * (n + 1) // 2
        self.score_width = groups * n
        self.projection_width = groups * (n + 1)

    def _mean_score(self, center: float) -> float:
        """Return E (y(q)·y(k))² of a block of orthogonal rows over random directions at first."""
        n, d = self.block_width, self.width
        # the mean squared, and the variances of c·(P(q̂ + k̂)) and of Pq̂·Pk̂
        return (n * center**2) ** 2 + 2 * n * center**2 / d + n / d**2

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Features:
        bias, center, projection, weight = tensors
        gate = torch.exp(0.5 * (u_BHTD @ weight.mT + bias))
        y = (u_BHTD @ projection.mT + center).unflatten(-1, (self.blocks, self.block_width))
        squares = SumOfSquares((y * gate[..., None],), u_BHTD[..., :0])
        return squares if self.multiplier == 1.0 else squares.scaled(self.multiplier**0.5)

    def projection(self, *tensors: Tensor) -> Projection:
        bias, center, projection, weight = tensors
        weight_HDF = torch.cat([projection, 0.5 * weight], dim=1).mT
        bias_HF = torch.cat([center, 0.5 * bias], dim=2)[:, 0]
        columns = Columns("squares", "gated", self.blocks * self.block_width, self.block_width)
        projected = Projection(weight_HDF, bias_HF, (columns,))
        return projected if self.multiplier == 1.0 else projected.scaled(self.multiplier**0.5)


def count_sketches(width: int, size: int, draws: torch.Generator) -> Tensor:
    """Return two count sketches as matrices [2, width, size]: one random sign in every row."""
    buckets = torch.randint(0, size, (2, width, 1), generator=draws)
    signs = torch.randint(0, 2, (2, width, 1), generator=draws).float() * 2 - 1
    return torch.zeros(2, width, size).scatter_(2, buckets, signs)


def sketch_product(first: Tensor, second: Tensor) -> Tensor:
    """Return the sketch of a ⊗ b from the sketches of a and b: their circular convolution."""
    size = first.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(first) * torch.fft.rfft(second), n=size)


# classes of PolynomialMap; some take options of their own
POLYNOMIALS: dict[str, Any] = {
    "exact": Exact,
    "anchor": Anchor,
    "block_quadratic": BlockQuadratic,
    "learned_quadratic": LearnedQuadratic,
    "nystrom": Nystrom,
    "random_maclaurin": RandomMaclaurin,
    "tensor_sketch": TensorSketch,
}
