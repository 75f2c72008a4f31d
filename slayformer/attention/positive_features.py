"""Positive random features of e^{2sx} on the unit sphere, one set a node (paper, section 2.4.2).

φ_PRF(û; s) = N^(−1/2) [exp(√(2s) ω_i·û − s)], ω_i ~ N(0, I): E⟨φ(q̂), φ(k̂)⟩ = e^{2sx}.

Shape suffixes: R nodes, H heads, N features of a node, D head width, F = R·N.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from slayformer.attention.base import MAP_LEARNING_RATE, generator, mechanism_parameter
from slayformer.attention.features import Dense
from slayformer.attention.fixed import Fixed

# e^{2 · 40} is far from fp32's largest number, and ordinary exponents are far from 40
LARGEST_EXPONENT = 40.0


def orthogonal_rows(rows: int, width: int, draws: torch.Generator) -> Tensor:
    """Return unit rows [rows, width] in orthogonal blocks of `width`, uniform on the sphere."""
    blocks = []
    for _ in range(math.ceil(rows / width)):
        q, r = torch.linalg.qr(torch.randn(width, width, generator=draws, dtype=torch.float64))
        # the signs make the matrix uniform over rotations
        blocks.append(q * r.diagonal().sign())
    return torch.cat(blocks)[:rows].float()


def gaussian_rows(kind: str, rows: int, width: int, draws: torch.Generator) -> Tensor:
    """Return ω rows [rows, width]: `iid`, or `orthogonal` directions with Gaussian lengths."""
    gaussian = torch.randn(rows, width, generator=draws)
    if kind == "iid":
        return gaussian
    return orthogonal_rows(rows, width, draws) * gaussian.norm(dim=-1, keepdim=True)


class ExponentialFeatures(nn.Module):
    """Σ_r w_r e^{2 s_r x} as one map: [√w_r φ_PRF(û; s_r)] for every node r.

    Every node and head has its own ω. A shift, a constant a head from the parameters alone, keeps
    each exponent of a unit vector at most LARGEST_EXPONENT; it is 0 for ordinary sizes.
    """

    nodes_R: Tensor
    omega_RHND: Tensor
    log_weights_RH: Tensor

    def __init__(
        self,
        nodes_R: Tensor,
        weights_R: Tensor,
        *,
        heads: int,
        features: int,
        width: int,
        kind: str,
        trainable: bool,
        seed: int,
    ) -> None:
        super().__init__()
        draws = generator(seed)
        omega_RHND = torch.stack(
            [
                torch.stack([gaussian_rows(kind, features, width, draws) for _ in range(heads)])
                for _ in nodes_R
            ]
        )
        log_weights_RH = weights_R.log().float()[:, None].repeat(1, heads)
        self.register_buffer("nodes_R", nodes_R.float())
        for name, value in (("omega_RHND", omega_RHND), ("log_weights_RH", log_weights_RH)):
            if trainable:
                self.register_parameter(name, mechanism_parameter(value, MAP_LEARNING_RATE))
            else:
                self.register_buffer(name, value)
        self.nodes, self.per_node, self.width = len(nodes_R), features, width
        self._fixed = Fixed()

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return √(2 s_r) ω as [H, D, F] and −s_r + ½ log(w_r/N) − shift as [H, 1, F]."""
        return self._folded(dtype)[:2]

    def shift(self, dtype: torch.dtype) -> Tensor:
        """Return what is taken off every exponent, [H, 1, 1]; scores shrink by e^{−2 shift}."""
        return self._folded(dtype)[2]

    def _folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `tensors` and `shift` do; for fixed features kept from call to call."""
        return self._fixed(self, dtype, lambda: self._fold(dtype))

    def _fold(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        nodes_R = self.nodes_R.to(dtype)
        scaled_RHND = self.omega_RHND.to(dtype) * (2 * nodes_R).sqrt()[:, None, None, None]
        log_share_RH = self.log_weights_RH.to(dtype) - math.log(self.per_node)
        bias_RH = 0.5 * log_share_RH - nodes_R[:, None]
        largest_RHN = scaled_RHND.norm(dim=-1) + bias_RH[..., None]
        largest_H = largest_RHN.detach().amax(dim=(0, 2))
        shift_H = (largest_H - LARGEST_EXPONENT).clamp_min(0)
        bias_HF = bias_RH.repeat_interleave(self.per_node, dim=0).T - shift_H[:, None]
        projection_HDF = scaled_RHND.transpose(0, 1).flatten(1, 2).mT
        return projection_HDF, bias_HF[:, None], shift_H[:, None, None]

    def features(self, u_BHTD: Tensor, *tensors: Tensor) -> Dense:
        """Return the features of unit vectors, [B, H, T, F]."""
        projection_HDF, bias_H1F = tensors
        return Dense(torch.exp(u_BHTD @ projection_HDF + bias_H1F))

    def flops(self) -> int:
        """Return the FLOPs of one vector's features in one head."""
        return 2 * self.nodes * self.per_node * (self.width + 1)
