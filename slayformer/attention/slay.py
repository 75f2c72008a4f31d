"""SLAY: spherical linearised attention with the Yat kernel, as published (paper, section 2).

The kernel x²/(C − 2x) = ∫ e^{−sC} x² e^{2sx} ds becomes R Gauss–Laguerre nodes; at each, anchor
features of x² are multiplied with positive random features of e^{2sx}. Anchors are shared by the
nodes, so the whole map is one Kronecker product of P anchor features with R·N exponentials, and
its m = P·R·N features are strictly positive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slayformer.attention.features import Features, Kronecker
from slayformer.attention.kernels import gauss_laguerre, inverse_norm
from slayformer.attention.linear import LinearAttention
from slayformer.attention.polynomial import draw_anchors
from slayformer.attention.positive_features import draw_projections
from slayformer.errors import ConfigError
from slayformer.registry import register_attention


@dataclass
class SlayConfig:
    """Options of SLAY; the defaults in configs/attention/slay.yaml are the paper's Table 9."""

    nodes: int
    polynomial_features: int
    exponential_features: int
    epsilon: float
    # added to the normaliser
    delta: float

    def __post_init__(self) -> None:
        for name in ("nodes", "polynomial_features", "exponential_features"):
            if getattr(self, name) < 1:
                raise ConfigError(f"attention.{name}", getattr(self, name), "must be at least 1")
        for name in ("epsilon", "delta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"attention.{name}", getattr(self, name), "must be above 0")


@register_attention("slay", SlayConfig)
class SlayAttention(LinearAttention):
    """SLAY with explicit tensor-product fusion."""

    config: SlayConfig
    nodes_R: Tensor
    weights_R: Tensor
    omega_RHND: Tensor
    anchors_PD: Tensor

    def __init__(self, config: SlayConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.delta = config.delta
        self.feature_count = config.nodes * config.polynomial_features * config.exponential_features
        self.score_width = config.polynomial_features + config.nodes * config.exponential_features
        nodes, weights = gauss_laguerre(config.nodes, config.epsilon)
        self.register_buffer("nodes_R", torch.tensor(nodes, dtype=torch.float32))
        self.register_buffer("weights_R", torch.tensor(weights, dtype=torch.float32))
        omega = draw_projections(
            config.nodes, self.num_heads, config.exponential_features, self.head_dim, 2 * self.seed
        )
        self.register_buffer("omega_RHND", omega)
        anchors = draw_anchors(config.polynomial_features, self.head_dim, 2 * self.seed + 1)
        self.register_buffer("anchors_PD", anchors)

    def feature_tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the projection [H, D, P + R·N] and the exponents' bias [R·N].

        One matrix product gives every feature's argument: the columns hold P^(−1/4) a_i and
        √(2 s_r) ω_i; the bias is −s_r + ½ log(w_r / N).
        """
        nodes_R = self.nodes_R.to(dtype)
        weights_R = self.weights_R.to(dtype)
        count = self.config.exponential_features
        scaled_RHND = self.omega_RHND.to(dtype) * (2 * nodes_R).sqrt()[:, None, None, None]
        exponent_HFD = scaled_RHND.transpose(0, 1).flatten(1, 2)
        anchor_PD = self.anchors_PD.to(dtype) * self.config.polynomial_features**-0.25
        anchor_HPD = anchor_PD.expand(self.num_heads, -1, -1)
        projection_HDF = torch.cat([anchor_HPD, exponent_HFD], dim=1).mT
        bias_R = 0.5 * (weights_R.log() - math.log(count)) - nodes_R
        return projection_HDF, bias_R.repeat_interleave(count)

    def feature_map(
        self, x_BHTD: Tensor, *tensors: Tensor, is_query: bool, positions: Tensor
    ) -> Features:
        """Return anchor features ⊗ √w_r-weighted positive random features of x/‖x‖."""
        projection_HDF, bias_F = tensors
        projected = (x_BHTD @ projection_HDF) * inverse_norm(x_BHTD)
        anchor, exponent = projected.split(
            [self.config.polynomial_features, bias_F.shape[0]], dim=-1
        )
        return Kronecker(anchor.square(), torch.exp(exponent + bias_F))

    def feature_flops(self) -> int:
        """Return the FLOPs of one vector's features in one head."""
        return 2 * self.head_dim * self.score_width + self.feature_count
