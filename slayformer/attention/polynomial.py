"""Degree-2 maps: features whose inner product stands for (q̂·k̂)² (paper, section 2.4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from slayformer.attention.base import generator


def draw_anchors(count: int, head_dim: int, seed: int) -> Tensor:
    """Return `count` anchors [P, D], uniform on the unit sphere, fp32."""
    directions = torch.randn(count, head_dim, generator=generator(seed), dtype=torch.float64)
    return (directions / directions.norm(dim=-1, keepdim=True)).float()
