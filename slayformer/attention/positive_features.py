"""Positive random features of e^{2sx} on the unit sphere (paper, section 2.4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from slayformer.attention.base import generator


def draw_projections(nodes: int, heads: int, features: int, head_dim: int, seed: int) -> Tensor:
    """Return ω ~ N(0, I) of shape [R, H, N, D]: independent per node, head and feature, fp32."""
    return torch.randn(nodes, heads, features, head_dim, generator=generator(seed))
