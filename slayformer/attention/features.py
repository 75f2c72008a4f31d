"""Feature maps as values: what a linear mechanism hands to the engine.

Within a chunk only the scores φ(q)·φ(k) are needed, and for products of maps they cost far less
than the features themselves; the features are expanded only where they meet the running state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """Features written out: φ of shape [B, H, T, M]."""

    phi_BHTM: Tensor

    def scores(self, keys: Dense) -> Tensor:
        """Return φ(q)·φ(k) for all pairs, [B, H, T, S]."""
        return self.phi_BHTM @ keys.phi_BHTM.mT

    def expand(self) -> Tensor:
        """Return φ, [B, H, T, M]."""
        return self.phi_BHTM


@dataclass(frozen=True)
class Kronecker:
    """φ = left ⊗ right, whose scores are the product of the two maps' scores."""

    left_BHTP: Tensor
    right_BHTN: Tensor

    def scores(self, keys: Kronecker) -> Tensor:
        """Return φ(q)·φ(k) for all pairs, [B, H, T, S], without forming φ."""
        left = self.left_BHTP @ keys.left_BHTP.mT
        return left * (self.right_BHTN @ keys.right_BHTN.mT)

    def expand(self) -> Tensor:
        """Return φ, [B, H, T, P·N]."""
        return (self.left_BHTP[..., :, None] * self.right_BHTN[..., None, :]).flatten(-2)


Features = Dense | Kronecker
