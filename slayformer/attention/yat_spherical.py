"""Exact spherical Yat attention, the kernel SLAY approximates (paper, eq. 5), kernel-normalised."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slayformer.attention.kernels import spherical_yat, unit
from slayformer.attention.quadratic import QuadraticAttention
from slayformer.errors import ConfigError
from slayformer.registry import register_attention


@dataclass
class SphericalYatConfig:
    """`epsilon` bounds the kernel by 1/ε; its slope at x = 1 is about 2/ε²."""

    epsilon: float

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError("attention.epsilon", self.epsilon, "must be above 0")


@register_attention("yat_spherical", SphericalYatConfig)
class SphericalYatAttention(QuadraticAttention):
    """x²/(2 + ε − 2x) of the cosine x between q and k, normalised by its sum."""

    config: SphericalYatConfig

    def kernel(self, q_BHTD: Tensor, k_BHSD: Tensor) -> Tensor:
        """Return the spherical Yat kernel, between 0 and 1/ε."""
        return spherical_yat(unit(q_BHTD) @ unit(k_BHSD).mT, self.config.epsilon)

    def kernel_flops(self) -> int:
        """Return the cosine and five operations."""
        return 2 * self.head_dim + 5
