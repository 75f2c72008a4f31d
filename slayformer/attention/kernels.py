"""The Yat kernels as functions of vectors and of the cosine x, and their quadrature.

Yat: (q·k)² / (‖q−k‖² + ε) (paper, eq. 1). On the unit sphere, with x = q̂·k̂ and C = 2 + ε:
x² / (C − 2x) (eq. 5), which is ∫₀^∞ e^{−sC} x² e^{2sx} ds (eq. 8).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# added to ‖u‖², so a zero vector has a direction (zero) and a Jacobian of at most 100
NORM_FLOOR = 1e-4
# the cosines `fitted_quadrature` is fitted on; 1/(C − 2x) itself is matched, relative to its size
FITTED_COSINES = np.linspace(-1.0, 0.95, 400)


def unit(u: Tensor) -> Tensor:
    """Return u/‖u‖ over the last axis; vectors much shorter than 0.01 shrink towards zero."""
    return u * torch.rsqrt(u.square().sum(-1, keepdim=True) + NORM_FLOOR)


def yat(q_BHTD: Tensor, k_BHSD: Tensor, epsilon: float | Tensor) -> Tensor:
    """Return (q·k)²/(‖q − k‖² + ε) for all pairs, [B, H, T, S]."""
    product = q_BHTD @ k_BHSD.mT
    norms = q_BHTD.square().sum(-1)[..., :, None] + k_BHSD.square().sum(-1)[..., None, :]
    # the difference of large numbers can fall below zero by rounding
    distance = (norms - 2 * product).clamp_min(0)
    return product.square() / (distance + epsilon)


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


@lru_cache
def fitted_quadrature(nodes: int, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights > 0, fp64, with Σ w_r e^{2 s_r x} close to 1/(C − 2x).

    Starting at Gauss–Laguerre, Levenberg–Marquardt on the logarithms of both lowers the mean
    squared relative error over cosines from −1 to 0.95.
    """
    target = 1.0 / (2.0 + epsilon - 2.0 * FITTED_COSINES)
    logs = np.log(np.concatenate(gauss_laguerre(nodes, epsilon)))

    def residual(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        s, w = np.exp(logs).reshape(2, nodes, 1)
        terms = w * np.exp(2 * s * FITTED_COSINES) / target
        jacobian = np.concatenate([terms * 2 * s * FITTED_COSINES, terms])
        return terms.sum(0) - 1.0, jacobian.T

    damping = 1e-3
    error, jacobian = residual(logs)
    for _ in range(500):
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(
            normal + damping * np.diag(np.diag(normal) + 1e-12), -jacobian.T @ error
        )
        next_error, next_jacobian = residual(logs + step)
        if next_error @ next_error < error @ error:
            logs, error, jacobian, damping = logs + step, next_error, next_jacobian, damping / 3
        else:
            damping *= 4
        if damping > 1e12:
            break
    s, w = np.exp(logs).reshape(2, nodes)
    return s, w
