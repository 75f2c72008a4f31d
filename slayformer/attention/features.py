"""Feature maps as values: what a linear mechanism hands to the walk.

Within a chunk only the scores φ(q)·φ(k) are needed, and for products and squares of maps they
cost far less than the features themselves; the features are expanded only where they meet the
state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


class Features(ABC):
    """The features of a stretch of queries or keys, φ of shape [B, H, T, M]."""

    @abstractmethod
    def scores(self, keys: Any) -> Tensor:
        """Return φ(q)·φ(k) for these queries and `keys` of the same kind, [B, H, T, S]."""

    @abstractmethod
    def expand(self) -> Tensor:
        """Return φ, [B, H, T, M]."""

    @abstractmethod
    def first(self, count: int) -> Features:
        """Return the features of the first `count` positions."""

    @abstractmethod
    def scaled(self, factor: float) -> Features:
        """Return `factor` φ."""


@dataclass(frozen=True)
class Dense(Features):
    """Features written out: φ of shape [B, H, T, M]."""

    phi_BHTM: Tensor

    def scores(self, keys: Dense) -> Tensor:
        return self.phi_BHTM @ keys.phi_BHTM.mT

    def expand(self) -> Tensor:
        return self.phi_BHTM

    def first(self, count: int) -> Dense:
        return Dense(self.phi_BHTM[:, :, :count])

    def scaled(self, factor: float) -> Dense:
        return Dense(self.phi_BHTM * factor)


@dataclass(frozen=True)
class Kronecker(Features):
    """φ = left ⊗ right, whose scores are the product of the two maps' scores."""

    left: Features
    right: Features

    def scores(self, keys: Kronecker) -> Tensor:
        return self.left.scores(keys.left) * self.right.scores(keys.right)

    def expand(self) -> Tensor:
        left, right = self.left.expand(), self.right.expand()
        return (left[..., :, None] * right[..., None, :]).flatten(-2)

    def first(self, count: int) -> Kronecker:
        return Kronecker(self.left.first(count), self.right.first(count))

    def scaled(self, factor: float) -> Kronecker:
        return Kronecker(self.left.scaled(factor), self.right)


@lru_cache
@torch.inference_mode(False)
def _pair_selectors(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return A and B [width, pairs] with (y A)(y B) = [y_i², √2 y_i y_j (i < j)].

    A product with a constant matrix, unlike an index, has a fast gradient.
    """
    i, j = torch.triu_indices(width, width)
    eye = torch.eye(width, dtype=torch.float64)
    factor = torch.where(i == j, 1.0, torch.tensor(2.0, dtype=torch.float64).sqrt())
    return (eye[i].mT * factor).to(device, dtype), eye[j].mT.contiguous().to(device, dtype)


@dataclass(frozen=True)
class SumOfSquares(Features):
    """φ = [vec_sym(y_1), …, vec_sym(y_G), rest]: scores Σ_g (y_g(q)·y_g(k))² + rest(q)·rest(k).

    vec_sym(y) = [y_i², √2 y_i y_j (i < j)], n(n+1)/2 features of a block of width n. Blocks of
    one width stand together, [B, H, T, G, n].
    """

    blocks: tuple[Tensor, ...]
    rest_BHTL: Tensor

    def scores(self, keys: SumOfSquares) -> Tensor:
        total = self.rest_BHTL @ keys.rest_BHTL.mT
        for query, key in zip(self.blocks, keys.blocks, strict=True):
            for y_query, y_key in zip(query.unbind(-2), key.unbind(-2), strict=True):
                total = total + (y_query @ y_key.mT).square()
        return total

    def expand(self) -> Tensor:
        parts = []
        for y in self.blocks:
            left, right = _pair_selectors(y.shape[-1], y.dtype, y.device)
            parts.append(((y @ left) * (y @ right)).flatten(-2))
        return torch.cat([*parts, self.rest_BHTL], dim=-1)

    def first(self, count: int) -> SumOfSquares:
        return self._each(lambda x: x[:, :, :count])

    def scaled(self, factor: float) -> SumOfSquares:
        blocks = tuple(y * factor**0.5 for y in self.blocks)
        return SumOfSquares(blocks, self.rest_BHTL * factor)

    def _each(self, change: Callable[[Tensor], Tensor]) -> SumOfSquares:
        return SumOfSquares(tuple(change(y) for y in self.blocks), change(self.rest_BHTL))
