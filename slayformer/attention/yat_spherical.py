"""Exact spherical Yat attention, the kernel SLAY approximates (paper, eq. 5)."""

from __future__ import annotations

from torch import Tensor

from slayformer.attention.kernels import spherical_yat, unit
from slayformer.attention.yat import YatAttention, YatConfig
from slayformer.registry import register_attention


class SphericalYatConfig(YatConfig):
    """`epsilon` bounds the kernel by 1/ε; its slope at x = 1 is about 2/ε²."""


@register_attention("yat_spherical", SphericalYatConfig)
class SphericalYatAttention(YatAttention):
    """x²/(2 + ε − 2x) of the cosine x between q and k."""

    def scores(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return the spherical Yat kernel, between 0 and 1/ε."""
        return spherical_yat(unit(q_BHTD) @ unit(k_BHSD).mT, self.epsilon)
