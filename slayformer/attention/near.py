"""Exact kernels of near pairs as values: what they need of both sides, and their scores.

Shape suffixes: B batch, H heads, T queries, S keys, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from slayformer.attention.kernels import spherical_yat, unit

# e^s is followed up to here; scores beyond would leave fp32 when they are summed up
LARGEST_SCORE = 40.0


@dataclass(frozen=True)
class NearKernel(ABC):
    """`scale` times a kernel of two sets of vectors through their inner products.

    `scale` is a number, or one a head, [H, 1, 1].
    """

    query_BHTD: Tensor
    key_BHSD: Tensor
    scale: Tensor | float

    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return the vectors of both sides whose inner products count."""
        return self.query_BHTD, self.key_BHSD

    def scores(self) -> Tensor:
        """Return the kernel of every pair, [B, H, T, S]."""
        query_BHTD, key_BHSD = self.vectors()
        return self.of(query_BHTD @ key_BHSD.mT)

    @abstractmethod
    def of(self, products_BHTS: Tensor) -> Tensor:
        """Return the kernel for inner products."""


@dataclass(frozen=True)
class NearYat(NearKernel):
    """The spherical Yat kernel of q and k; `epsilon` may be one a head."""

    epsilon: Tensor | float

    def vectors(self) -> tuple[Tensor, Tensor]:
        return unit(self.query_BHTD), unit(self.key_BHSD)

    def of(self, products_BHTS: Tensor) -> Tensor:
        return spherical_yat(products_BHTS, self.epsilon) * self.scale


@dataclass(frozen=True)
class NearExponential(NearKernel):
    """e^s of the inner products s."""

    def of(self, products_BHTS: Tensor) -> Tensor:
        return products_BHTS.clamp(max=LARGEST_SCORE).exp() * self.scale
