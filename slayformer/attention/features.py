"""Feature maps as values: what a linear mechanism hands to the engine.

Within a chunk only the scores φ(q)·φ(k) are needed, and for products of maps they cost far less
than the features themselves; the features are expanded only where they meet the running state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Kronecker(Features):
    """φ = left ⊗ right, whose scores are the product of the two maps' scores."""

    left_BHTP: Tensor
    right_BHTN: Tensor

    def scores(self, keys: Kronecker) -> Tensor:
        left = self.left_BHTP @ keys.left_BHTP.mT
        return left * (self.right_BHTN @ keys.right_BHTN.mT)

    def expand(self) -> Tensor:
        return (self.left_BHTP[..., :, None] * self.right_BHTN[..., None, :]).flatten(-2)

    def first(self, count: int) -> Kronecker:
        return Kronecker(self.left_BHTP[:, :, :count], self.right_BHTN[:, :, :count])
