"""Where features come from among the columns of their factors, as tables for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slayformer.attention.backends.triton_math import FACTOR, LINEAR
from slayformer.attention.backends.triton_sides import MOST_COLUMNS, Layout, padded_width

# linear columns in a program at a time, where there are more than MOST_COLUMNS
WIDE_BLOCK = 64


@dataclass(frozen=True)
class Tables:
    """Feature m is scale[m] times the product of the factors in columns[:, m] (−1 is one)."""

    # columns of the factors, with padding
    width: int
    # of which a program takes so many at a time
    block: int
    squares: int
    has_linear: bool
    has_factor: bool
    # factors of a feature
    terms: int
    groups: Tensor
    columns: Tensor
    scale: Tensor


@lru_cache
@torch.inference_mode(False)
def tables_of(layout: Layout, device: torch.device) -> Tables:
    """Return the tables of a layout; features in the order of `Features.expand`."""
    width = padded_width(layout)
    groups = torch.full((width,), -1, dtype=torch.int32)
    squares, start = 0, 0
    left: list[Tensor] = []
    scales: list[Tensor] = []
    factor = None
    for kind, count, block in layout:
        columns = torch.arange(start, start + count)
        if kind == "squares":
            i, j = torch.triu_indices(block, block)
            for y in columns.split(block):
                groups[y] = squares
                squares += 1
                left.append(torch.stack([y[i], y[j]]))
                scales.append(torch.where(i == j, 1.0, 2.0**0.5))
        elif kind == "linear":
            groups[columns] = LINEAR.value
            left.append(torch.stack([columns, torch.full_like(columns, -1)]))
            scales.append(torch.ones(count))
        else:
            groups[columns] = FACTOR.value
            factor = columns
        start += count
    table, scale = torch.cat(left, dim=1), torch.cat(scales)
    if not squares:
        table = table[:1]
    if factor is not None:
        table = table.repeat_interleave(len(factor), dim=1)
        right = factor.repeat(len(scale))
        table, scale = torch.cat([table, right[None]]), scale.repeat_interleave(len(factor))
    block = max(16, 1 << (width - 1).bit_length())
    return Tables(
        width=width,
        block=block if block <= MOST_COLUMNS else WIDE_BLOCK,
        squares=squares,
        has_linear=any(kind == "linear" for kind, _, _ in layout),
        has_factor=factor is not None,
        terms=len(table),
        groups=groups.to(device),
        columns=table.int().contiguous().to(device),
        scale=scale.float().to(device),
    )
