"""The kernel of one decoded token: its output and the state after it, in one trip through memory.

A token alone has no products for tensor cores; what it costs is reading and writing the state. A
program takes some columns of one head's state, so nothing is added across programs.

Shape suffixes: B batch, H heads, S = lag + 1 keys, E width of v, F columns of factors, M features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slayformer.attention.backends import triton_start
from slayformer.attention.backends.triton_math import (
    FACTOR,
    LINEAR,
    NO_KERNEL,
    inverse_norms,
    is_near,
    near_scores_of,
    rows_of,
)
from slayformer.attention.backends.triton_pass import Pass
from slayformer.attention.backends.triton_start import strides_of

# keys, features, and columns of the state that a program takes at a time
BLOCK_KEYS, BLOCK_FEATURES, BLOCK_COLUMNS = 16, 32, 32


@triton.jit
def feature_row(x, table, scale, m, M: tl.constexpr, TERMS: tl.constexpr):
    """Return φ[m] of the vector whose factors are at `x`, zero from M on."""
    phi = tl.load(scale + m, mask=m < M, other=0.0)
    for term in tl.static_range(TERMS):
        column = tl.load(table + term * M + m, mask=m < M, other=-1)
        phi *= tl.load(x + column, mask=column >= 0, other=1.0).to(tl.float32)
    return phi


@triton.jit(do_not_specialize=["keys", "near_size", "squares"])
def step_forward(
    x_query,
    x_key,
    value,
    near_query,
    near_key,
    epsilon,
    near_scale,
    offset,
    before,
    after,
    output,
    groups,
    table,
    scale,
    key_mask,
    first_document,
    query_documents,
    key_documents,
    query_positions,
    key_positions,
    value_batch,
    value_head,
    value_token,
    near_query_batch,
    near_query_head,
    near_query_token,
    near_key_batch,
    near_key_head,
    near_key_token,
    keys,
    near_size,
    squares,
    H: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    NEAR: tl.constexpr,
    RULE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    IS_QUOTIENT: tl.constexpr,
):
    """Write a token's columns of the output and of the state; grid (slices of columns, B·H).

    x_query [B·H, 1, F]; x_key [B·H, S, F], value [B, H, S, E], the new key last, the one that
    enters the state first; before and after [B·H, M, E + 1] in fp32; output [B·H, E], or
    [B·H, E + 1] with the normaliser in place of the quotient.
    """
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    h = head % H
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    x_query += head * F
    x_key += head * keys * F
    value += b * value_batch + h * value_head
    reads = 1.0
    stays = 1.0
    enters = 1.0
    document = tl.zeros((1,), tl.int64)
    if HAS_DOCUMENTS:
        # the state holds one document: that of the last key which has entered it
        held = tl.load(first_document + b)
        next_held = tl.load(key_documents + b * keys)
        document = tl.load(query_documents + b + tl.arange(0, 1))
        reads = tl.where(tl.load(query_documents + b) == held, 1.0, 0.0)
        stays = tl.where(next_held == held, 1.0, 0.0)
    if HAS_MASK:
        enters = tl.where(tl.load(key_mask + b * keys) != 0, 1.0, 0.0)
    entering = tl.load(value + e, mask=e < E, other=0.0).to(tl.float32) * enters
    sums = tl.zeros((BM, BE), tl.float32)
    norms = tl.zeros((BM,), tl.float32)
    for block in range(0, M, BM):
        m = block + tl.arange(0, BM)
        of_query = feature_row(x_query, table, scale, m, M, TERMS)
        of_key = feature_row(x_key, table, scale, m, M, TERMS)
        row = (head * M + m) * (E + 1)
        at = row[:, None] + e[None, :]
        inside = (m < M)[:, None] & (e < E)[None, :]
        state = tl.load(before + at, mask=inside, other=0.0)
        total = tl.load(before + row + E, mask=m < M, other=0.0)
        sums += of_query[:, None] * state
        norms += of_query * total
        tl.store(after + at, state * stays + of_key[:, None] * entering[None, :], mask=inside)
        # every slice needs the column of sums, the first one keeps it
        keeps = (m < M) & (tl.program_id(0) == 0)
        tl.store(after + row + E, total * stays + of_key * enters, mask=keeps)
    sum_E = tl.sum(sums, 0) * reads
    norm = tl.sum(norms, 0) * reads
    none = tl.zeros((1,), tl.int32)
    query_position = tl.load(query_positions + b + none)
    for tile in range(0, keys, BS):
        s = tile + tl.arange(0, BS)
        met = s < keys
        if HAS_MASK:
            met = met & (tl.load(key_mask + b * keys + s, mask=met, other=0) != 0)
        if HAS_DOCUMENTS:
            met = met & (tl.load(key_documents + b * keys + s, mask=met, other=-1) == document)
        p = tl.zeros((BS,), tl.float32)
        r = tl.full((BS,), 1.0, tl.float32)
        for block in range(0, F, BF):
            f = block + tl.arange(0, BF)
            group = tl.load(groups + f, mask=f < F, other=-1)[None, :]
            own = tl.load(x_query + f, mask=f < F, other=0.0).to(tl.float32)
            products = rows_of(x_key, s, met, F, f, F).to(tl.float32) * own[None, :]
            if HAS_SQUARES:
                for square in range(squares):
                    x = tl.sum(tl.where(group == square, products, 0.0), 1)
                    p += x * x
            if HAS_LINEAR:
                p += tl.sum(tl.where(group == LINEAR, products, 0.0), 1)
            if HAS_FACTOR:
                r = tl.sum(tl.where(group == FACTOR, products, 0.0), 1)
        score = p * r
        if NEAR != NO_KERNEL:
            d = tl.arange(0, BD)
            own_near = rows_of(
                near_query + b * near_query_batch + h * near_query_head,
                none,
                none == 0,
                near_query_token,
                d,
                D,
            ).to(tl.float32)
            other_near = rows_of(
                near_key + b * near_key_batch + h * near_key_head, s, met, near_key_token, d, D
            ).to(tl.float32)
            x = tl.sum(own_near * other_near, 1)
            if NORMALISE:
                x *= inverse_norms(own_near, 1) * inverse_norms(other_near, 1)
            exact, _, _ = near_scores_of(x, tl.load(epsilon + h), tl.load(near_scale + h), NEAR)
            position = tl.load(key_positions + b * keys + s, mask=met, other=0)
            score = tl.where(is_near(query_position, position, near_size, RULE), exact, score)
        score = tl.where(met, score, 0.0)
        v = rows_of(value, s, met, value_token, e, E).to(tl.float32)
        sum_E += tl.sum(score[:, None] * v, 0)
        norm += tl.sum(score, 0)
    if IS_QUOTIENT:
        y = sum_E / (norm + tl.load(offset + h))
        tl.store(output + head * E + e, y.to(output.dtype.element_ty), mask=e < E)
    else:
        tl.store(output + head * (E + 1) + e, sum_E, mask=e < E)
        tl.store(output + head * (E + 1) + E, norm, mask=tl.program_id(0) == 0)


def step(one: Pass, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the quotient in `dtype`, or both sums, of the only token, and the state after it."""
    walk, sides, v, tables = one.walk, one.sides, one.v, one.tables
    batch, heads, keys, width = v.shape
    offset = one.call.offset_H
    if offset is None:
        output = torch.empty(batch, heads, 1, width + 1, dtype=torch.float32, device=v.device)
    else:
        output = torch.empty(batch, heads, 1, width, dtype=dtype, device=v.device)
    before = one.memory.contiguous()
    after = torch.empty_like(before)
    places = one.places(block_t=1)
    arguments: dict[str, Any] = {
        "x_query": sides.query,
        "x_key": sides.key,
        "value": v,
        **one.near("near_query", "near_key"),
        "offset": v if offset is None else offset,
        "before": before,
        "after": after,
        "output": output,
        "groups": tables.groups,
        "table": tables.columns,
        "scale": tables.scale,
        "first_document": walk.first_document_B.contiguous(),
        **{name: places[name] for name in PLACES},
        **strides_of(v, "value"),
        "keys": keys,
    }
    given = one.pairs(block_t=1)
    constants = {
        **{name: given[name] for name in CONSTANTS},
        "M": one.features,
        "TERMS": tables.terms,
        "BS": BLOCK_KEYS,
        "BM": BLOCK_FEATURES,
        "BE": min(BLOCK_COLUMNS, triton_start.block_of(width)),
        "IS_QUOTIENT": offset is not None,
    }
    grid = (triton.cdiv(width, constants["BE"]), batch * heads)
    triton_start.launch(step_forward, grid, arguments, constants, 4)
    return output, after


PLACES = (
    "key_mask",
    "query_documents",
    "key_documents",
    "query_positions",
    "key_positions",
    "near_size",
    "squares",
)
CONSTANTS = (
    "H",
    "E",
    "F",
    "D",
    "HAS_SQUARES",
    "HAS_LINEAR",
    "HAS_FACTOR",
    "NEAR",
    "RULE",
    "NORMALISE",
    "BF",
    "BD",
    "HAS_MASK",
    "HAS_DOCUMENTS",
)
