"""The Triton backend: from a walk's maps to the factors that its kernels walk over.

As in the CPU backend, features are products and squares of narrow factors, and only those exist
for a whole sequence, beside the states around chunks. torch makes them, under ordinary autograd,
and again in the backward pass. triton itself is imported with the first call.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slayformer.attention.backends import engine
from slayformer.attention.backends.build import BuildError
from slayformer.attention.backends.cpu import DTYPES, NotCovered, constant, factors, per_head
from slayformer.attention.backends.triton_sides import (
    INTERPRETED,
    MOST_COLUMNS,
    Layout,
    Sides,
    compute_dtype,
    padded_width,
    rounded_to,
    with_last_stride_1,
)
from slayformer.attention.features import Features
from slayformer.attention.near import NearExponential, NearYat
from slayformer.attention.walk import Walk

# widest heads of q, k and v
MOST_WIDTH = 128
# what CUDA takes beside the first axis of a grid
MOST_HEADS = 65_535
KINDS = {engine.SQUARES: "squares", engine.LINEAR: "linear", engine.FACTOR: "factor"}


def obstacle(q: Tensor, v: Tensor) -> str | None:
    """Return what keeps the kernels from taking such tensors, or None."""
    if not INTERPRETED:
        if q.device.type != "cuda" or torch.version.hip:
            return f"it computes on NVIDIA GPUs, not on {q.device.type}"
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        if not any(map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))):
            return "triton needs a C compiler; install gcc or set CC"
        if not (Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h").exists():
            return "triton needs Python's C headers; install them, as python3-dev or python3-devel"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not {q.dtype, v.dtype} <= set(DTYPES):
        return f"it computes with fp32, bf16 and fp16, not with {v.dtype}"
    if q.shape[0] * q.shape[1] > MOST_HEADS:
        return (
            f"it takes up to {MOST_HEADS:,} heads of a batch together, not {q.shape[:2].numel():,}"
        )
    width = max(q.shape[-1], v.shape[-1])
    if width > MOST_WIDTH:
        return f"it takes heads up to {MOST_WIDTH} wide, not {width}"
    return None


def apply(
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    tensors: tuple[Tensor, ...],
    offset: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """See `walk.apply_walk`; raises NotCovered, and BuildError where kernels cannot be compiled."""
    from slayformer.attention.backends import triton_pass, triton_start, triton_walk

    k, v = walk.filled(k, v)
    call = triton_pass.Call(
        walk=walk,
        sides=_sides(walk),
        offset_H=None if offset is None else constant(offset, q.shape[1], q.device),
    )
    try:
        output, after = triton_walk.walked(call, v, memory, q, k, *tensors)
    except triton_start.FAILURES as error:
        raise BuildError(f"triton could not compile it: {error}") from error
    return output, after if walk.has_future else memory


def _sides(walk: Walk) -> Callable[..., Sides]:
    """Return what gives the sides by torch's own operations."""

    def sides(q: Tensor, k: Tensor, *tensors: Tensor) -> Sides:
        dtype, heads, given = q.dtype, q.shape[1], (q, k)
        q, k = q.float(), k.float()
        query = walk.feature_map(q, *tensors, is_query=True, positions=walk.positions_BT)
        key = walk.feature_map(k, *tensors, is_query=False, positions=walk.keys.positions_BS)
        layout, x_query = _joined(query, dtype)
        both = Sides(layout, x_query, _joined(key, dtype)[1])
        if walk.near is None:
            return both
        near = walk.near(q, k, *tensors)
        if isinstance(near, NearExponential):
            return replace(
                both,
                near="exponential",
                near_query=with_last_stride_1(near.query_BHTD),
                near_key=with_last_stride_1(near.key_BHSD),
                near_scale=per_head(near.scale, heads, q.device),
            )
        if not isinstance(near, NearYat):
            raise NotCovered(type(near).__name__)
        # the inner products of vectors as they are given lose nothing
        own, other = (with_last_stride_1(x.to(compute_dtype(dtype))) for x in given)
        return replace(
            both,
            near="yat",
            near_query=own,
            near_key=other,
            epsilon=per_head(near.epsilon, heads, q.device),
            near_scale=per_head(near.scale, heads, q.device),
        )

    return sides


def _joined(features: Features, dtype: torch.dtype) -> tuple[Layout, Tensor]:
    """Return the factors of `features` side by side, [B, H, T, F]; raises NotCovered."""
    parts, tensors = factors(features)
    layout = tuple(
        (KINDS[kind], x.shape[-1], block) for (kind, block), x in zip(parts, tensors, strict=True)
    )
    width = padded_width(layout)
    if width > MOST_COLUMNS and any(kind != "linear" for kind, _, _ in layout):
        raise NotCovered(f"a map with factors of {width} columns")
    padding = width - sum(columns for _, columns, _ in layout)
    if padding:
        tensors = [*tensors, tensors[0].new_zeros(*tensors[0].shape[:-1], padding)]
    return layout, rounded_to(torch.cat(tensors, dim=-1), dtype)
