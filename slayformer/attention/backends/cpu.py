"""The compiled CPU backend: from a walk's maps to the factors that the compiled code walks over.

Features are products and squares of narrow factors (features.py). Where a map is activations of
one product (projection.py), compiled code makes the factors; else torch makes those of the whole
sequence, under ordinary autograd. So every map and its parameters work through one engine, and
nothing of size T × M or T × T exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slayformer.attention.backends import engine
from slayformer.attention.backends.cpu_walk import Call, Layout, compiled_walk
from slayformer.attention.features import Dense, Features, Kronecker, SumOfSquares
from slayformer.attention.near import NearExponential, NearYat
from slayformer.attention.projection import Projection
from slayformer.attention.walk import Walk

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {"squares": engine.SQUARES, "linear": engine.LINEAR, "factor": engine.FACTOR}
NEAR = {None: engine.NO_KERNEL, "yat": engine.YAT, "exponential": engine.EXPONENTIAL}


class NotCovered(Exception):
    """The compiled walk does not know this map or near kernel."""


def obstacle(q: Tensor, v: Tensor) -> str | None:
    """Return what keeps the compiled walk from taking such tensors, or None; raises BuildError."""
    for x in (q, v):
        if x.device.type != "cpu":
            return f"it computes on the CPU, not on {x.device.type}"
        if x.dtype not in DTYPES:
            return f"it computes with fp32, bf16 and fp16, not with {x.dtype}"
    engine.library()
    return None


def factors(features: Features) -> tuple[Layout, list[Tensor]]:
    """Return the factors of `features`, each [B, H, T, width]; raises NotCovered."""
    if isinstance(features, Dense):
        return ((engine.LINEAR, 0),), [features.phi_BHTM]
    if isinstance(features, SumOfSquares):
        parts = [block.flatten(-2) for block in features.blocks]
        layout = tuple((engine.SQUARES, block.shape[-1]) for block in features.blocks)
        if features.rest_BHTL.shape[-1]:
            parts.append(features.rest_BHTL)
            layout = (*layout, (engine.LINEAR, 0))
        return layout, parts
    if isinstance(features, Kronecker) and isinstance(features.right, Dense):
        if isinstance(features.left, Kronecker):
            raise NotCovered("a product of more than two maps")
        layout, parts = factors(features.left)
        return (*layout, (engine.FACTOR, 0)), [*parts, features.right.phi_BHTM]
    raise NotCovered(type(features).__name__)


def apply(
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    tensors: tuple[Tensor, ...],
    offset: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """See `walk.apply_walk`; raises NotCovered."""
    projection = walk.projection(*tensors)
    if projection is not None:
        output, after = _projected(walk, projection, q, k, v, memory, offset)
    else:
        output, after = _mapped(walk, q, k, v, memory, tensors, offset)
    if offset is not None:
        output = output.to(v.dtype)
    return output, after if walk.has_future else memory


def _projected(
    walk: Walk,
    projection: Projection,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    offset: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """Walk with factors that compiled code makes."""
    layout = tuple((KINDS[part.kind], part.block) for part in projection.columns)
    epsilon, near_scale, near_kind = None, None, NEAR[projection.near]
    heads = q.shape[1]
    if projection.near is not None:
        near_scale = per_head(projection.near_scale, heads)
    if projection.near == "yat":
        epsilon = per_head(projection.near_epsilon, heads)
    call = Call(
        walk=walk,
        layout=_checked(layout),
        near_kind=near_kind,
        near_factor=projection.near_factor,
        offset_H=None if offset is None else constant(offset, heads),
        columns=projection.columns,
    )
    sides = [x if x.dtype == torch.bfloat16 else x.float() for x in (q, k)]
    return compiled_walk(
        call,
        _value(v),
        memory,
        epsilon,
        near_scale,
        projection.weight_HDF,
        projection.bias_HF,
        *sides,
    )


def _mapped(
    walk: Walk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    tensors: tuple[Tensor, ...],
    offset: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """Walk with factors that torch makes."""
    k, v = walk.filled(k, v)
    q, k = q.float(), k.float()
    query = walk.feature_map(q, *tensors, is_query=True, positions=walk.positions_BT)
    key = walk.feature_map(k, *tensors, is_query=False, positions=walk.keys.positions_BS)
    layout, queries = factors(query)
    _, keys = factors(key)
    near = walk.near(q, k, *tensors) if walk.near else None
    epsilon, near_scale, near_kind = None, None, engine.NO_KERNEL
    heads = q.shape[1]
    if isinstance(near, NearYat):
        epsilon, near_kind = per_head(near.epsilon, heads), engine.YAT
    elif isinstance(near, NearExponential):
        near_kind = engine.EXPONENTIAL
    elif near is not None:
        raise NotCovered(type(near).__name__)
    if near is not None:
        near_scale = per_head(near.scale, heads)
        query_BHTD, key_BHSD = near.vectors()
        queries, keys = [*queries, query_BHTD], [*keys, key_BHSD]
    call = Call(
        walk=walk,
        layout=_checked(layout),
        near_kind=near_kind,
        near_factor=1.0,
        offset_H=None if offset is None else constant(offset, heads),
        columns=None,
    )
    return compiled_walk(call, _value(v), memory, epsilon, near_scale, None, None, *queries, *keys)


def _value(v: Tensor) -> Tensor:
    return v if v.dtype == torch.bfloat16 else v.float()


def _checked(layout: Layout) -> Layout:
    if len(layout) > engine.MOST_PARTS:
        raise NotCovered(f"a map of {len(layout)} parts")
    return layout


def per_head(x: Tensor | float, heads: int, device: torch.device | None = None) -> Tensor:
    """Return a number or a [H, 1, 1] or [1] tensor as [H], a number's on `device` (None: CPU)."""
    if isinstance(x, Tensor):
        return x.float().reshape(-1).expand(heads).contiguous()
    return torch.full((heads,), x, device=device)


def constant(x: Tensor | float, heads: int, device: torch.device | None = None) -> Tensor:
    """The same for what the compiled walk gives no gradient of."""
    if isinstance(x, Tensor) and x.requires_grad:
        raise NotCovered("a learned offset")
    return per_head(x, heads, device)
