"""The Yat kernels as functions of vectors and of the cosine x, and their quadrature.

Yat: (q·k)² / (‖q−k‖² + ε) (paper, eq. 1). On the unit sphere, with x = q̂·k̂ and C = 2 + ε:
x² / (C − 2x) (eq. 5), which is ∫₀^∞ e^{−sC} x² e^{2sx} ds (eq. 8).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# added to ‖u‖², so a zero vector has a direction (zero) and a Jacobian of at most 100
NORM_FLOOR = 1e-4


def unit(u: Tensor) -> Tensor:
    """Return u/‖u‖ over the last axis; vectors much shorter than 0.01 shrink towards zero."""
    return u * inverse_norm(u)


def inverse_norm(u: Tensor) -> Tensor:
    """Return (‖u‖² + 1e-4)^(−1/2) with the last axis kept at size 1."""
    return torch.rsqrt(u.square().sum(-1, keepdim=True) + NORM_FLOOR)


def spherical_yat(x: Tensor, epsilon: float | Tensor) -> Tensor:
    """Return x²/(C − 2x), between 0 and 1/ε, for cosines x; rounding above 1 counts as 1."""
    x = x.clamp(max=1.0)
    return x.square() / (2.0 + epsilon - 2.0 * x)


def spherical_yat_derivative(x: Tensor, epsilon: float) -> Tensor:
    """Return d/dx of `spherical_yat`: 2x(C − x)/(C − 2x)² (paper, proof of proposition 3)."""
    c = 2.0 + epsilon
    return 2.0 * x * (c - x) / (c - 2.0 * x).square()


def gauss_laguerre(nodes: int, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes s_r = t_r/C and weights w_r = α_r/C, fp64 (paper, appendix I).

    Σ_r w_r h(s_r) approximates ∫₀^∞ e^{−sC} h(s) ds.
    """
    t, alpha = np.polynomial.laguerre.laggauss(nodes)
    c = 2.0 + epsilon
    return t / c, alpha / c
