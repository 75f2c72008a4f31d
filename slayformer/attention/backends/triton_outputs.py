"""The kernel of a chunk's outputs, from the state in front of it and from its keys."""

from __future__ import annotations

import triton
import triton.language as tl

from slayformer.attention.backends.triton_math import (
    NO_KERNEL,
    features_of,
    is_near,
    near_products,
    near_scores_of,
    product,
    query_places,
    rounded,
    rows_of,
    scores_of,
    sees,
)

UNSPECIALISED = ["length", "chunk", "chunks", "tiles", "lag", "strict", "near_size", "squares"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def chunk_outputs(
    x_query,
    x_key,
    value,
    near_query,
    near_key,
    epsilon,
    near_scale,
    offset,
    around,
    sums_around,
    output,
    rest,
    normaliser,
    groups,
    table,
    scale,
    key_mask,
    reads,
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
    output_batch,
    output_head,
    output_token,
    normaliser_head,
    normaliser_token,
    length,
    chunk,
    chunks,
    tiles,
    lag,
    strict,
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
    BT: tl.constexpr,
    BO: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    IS_QUOTIENT: tl.constexpr,
    HAS_REST: tl.constexpr,
    FORM: tl.constexpr,
    NEAR_FORM: tl.constexpr,
):
    """Write what a tile of queries gets from the state and from keys; grid (tiles, B·H).

    Keys come in tiles of BO.

    `rest`, laid out as `output`, gets what the output's dtype cannot hold.
    """
    c = tl.program_id(0) // tiles
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    h = head % H
    total_length = length + lag
    start = c * chunk
    first = start + (tl.program_id(0) % tiles) * BT
    t = first + tl.arange(0, BT)
    stop = tl.minimum(start + chunk, length)
    t_mask = t < stop
    e = tl.arange(0, BE)
    x_query += head * length * F
    x_key += head * total_length * F
    value += b * value_batch + h * value_head
    sums = tl.zeros((BT, BE), tl.float32)
    norm = tl.zeros((BT,), tl.float32)
    if HAS_STATE:
        around += (head * chunks + c) * M * E
        sums_around += (head * chunks + c) * M
        for block in range(0, M, BM):
            m = block + tl.arange(0, BM)
            phi = features_of(x_query, t, t_mask, table, scale, m, F, M, TERMS)
            inside = (m < M)[:, None] & (e < E)[None, :]
            state = tl.load(around + m[:, None] * E + e[None, :], mask=inside, other=0.0)
            total = tl.load(sums_around + m, mask=m < M, other=0.0)
            sums = product(phi, state, sums, FORM)
            norm += tl.sum(rounded(phi, FORM) * total[None, :], 1)
        if HAS_DOCUMENTS:
            read = tl.load(reads + b * length + t, mask=t_mask, other=0).to(tl.float32)
            sums *= read[:, None]
            norm *= read
    t_document, t_position = query_places(
        query_documents, query_positions, b, length, t, t_mask, HAS_DOCUMENTS
    )
    # a tile past the chunk's end has no queries
    end = tl.where(first < stop, tl.minimum(first + BT, stop) + lag, start)
    for tile in range(start, end, BO):
        s = tile + tl.arange(0, BO)
        s_mask = s < total_length
        s_document, s_position = query_places(
            key_documents, key_positions, b, total_length, s, s_mask, HAS_DOCUMENTS
        )
        met_mask = s_mask
        if HAS_MASK:
            met_mask = met_mask & (
                tl.load(key_mask + b * total_length + s, mask=s_mask, other=0) != 0
            )
        met = sees(
            t[:, None],
            t_mask[:, None],
            t_document[:, None],
            s[None, :],
            met_mask[None, :],
            s_document[None, :],
            chunk,
            lag,
            strict,
            HAS_DOCUMENTS,
        )
        p, r = scores_of(
            x_query,
            t,
            t_mask,
            x_key,
            s,
            s_mask,
            groups,
            squares,
            BT,
            BO,
            F,
            BF,
            HAS_SQUARES,
            HAS_LINEAR,
            HAS_FACTOR,
            FORM,
        )
        score = p * r
        if NEAR != NO_KERNEL:
            products = near_products(
                near_query + b * near_query_batch + h * near_query_head,
                t,
                t_mask,
                near_query_token,
                near_key + b * near_key_batch + h * near_key_head,
                s,
                s_mask,
                near_key_token,
                tl.zeros((BT, BO), tl.float32),
                D,
                BD,
                NORMALISE,
                NEAR_FORM,
            )
            exact, _, _ = near_scores_of(
                products, tl.load(epsilon + h), tl.load(near_scale + h), NEAR
            )
            near = is_near(t_position[:, None], s_position[None, :], near_size, RULE)
            score = tl.where(near, exact, score)
        score = tl.where(met, score, 0.0)
        v = rows_of(value, s, s_mask, value_token, e, E)
        sums = product(score, v, sums, FORM)
        norm += tl.sum(rounded(score, FORM), 1)
    if IS_QUOTIENT:
        norm += tl.load(offset + h)
        sums = sums / tl.where(t_mask, norm, 1.0)[:, None]
    place = b * output_batch + h * output_head + t[:, None] * output_token + e[None, :]
    present = t_mask[:, None] & (e < E)[None, :]
    if HAS_REST:
        tl.store(rest + place, (sums - rounded(sums, FORM)).to(rest.dtype.element_ty), mask=present)
        sums = rounded(sums, FORM)
    tl.store(output + place, sums.to(output.dtype.element_ty), mask=present)
    tl.store(normaliser + head * normaliser_head + t * normaliser_token, norm, mask=t_mask)
