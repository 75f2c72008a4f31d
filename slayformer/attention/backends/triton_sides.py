"""What the Triton kernels compute with: the factors of queries and keys, and near vectors.

Shape suffixes: B batch, H heads, T queries, S = lag + T keys, D width of near vectors, F columns
of factors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

# kernels run in Python on the CPU, to be tested
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# (kind, columns, width of a block) of every part of the factors, as projection.Columns has them
Layout = tuple[tuple[str, int, int], ...]
# columns in a program at a time; only linear columns may be more
MOST_COLUMNS = 128


@dataclass(frozen=True)
class Sides:
    """Factors, and the near kernel `none`, `yat` or `exponential` of vectors."""

    layout: Layout
    # [B, H, T or S, F], columns beyond the layout's are zero
    query: Tensor
    key: Tensor
    near: str = "none"
    # [B, H, T or S, D]
    near_query: Tensor | None = None
    near_key: Tensor | None = None
    # of the Yat kernel, [H]
    epsilon: Tensor | None = None
    near_scale: Tensor | None = None

    @property
    def normalises(self) -> bool:
        """Whether the near kernel takes the vectors' directions alone."""
        return self.near == "yat"

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Return what gradients flow to."""
        near = (self.near_query, self.near_key, self.epsilon, self.near_scale)
        return self.query, self.key, *near


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels read factors and values in, in a call on `dtype`."""
    # the interpreter's bf16 is wrong
    return torch.bfloat16 if dtype == torch.bfloat16 and not INTERPRETED else torch.float32


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` with the precision of factors in a call on `dtype`, as kernels read it."""
    if dtype == torch.bfloat16:
        x = x.to(dtype)
    return x.to(compute_dtype(dtype))


def padded_width(layout: Layout) -> int:
    """Return how many columns factors take in memory: rows of whole 32 bytes."""
    used = sum(columns for _, columns, _ in layout)
    return -(-used // 16) * 16


def with_last_stride_1(x: Tensor) -> Tensor:
    """Return `x`, copied if neighbours of its last axis lie apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
