"""Kernels of the state: carried from chunk to chunk, and its way back to the factors.

The state S [M, E] and its column z [M] for the normaliser, Σ φ(k) [v, 1]ᵀ, run through a sequence
in fp32, a slice of features in a program. What they are around every chunk is kept for the kernels
that compute chunks side by side. The gradient's state Σ φ(q) [dN, dZ]ᵀ takes the same kernel, back
in time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slayformer.attention.backends.triton_math import (
    columns_of,
    features_of,
    gathered,
    product,
    rounded,
    rows_of,
)

UNSPECIALISED = ["length", "chunk", "chunks", "segment_chunks"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def carry_states(
    x,
    value,
    weight,
    enters,
    keeps,
    before,
    around,
    sums_around,
    after,
    table,
    scale,
    value_batch,
    value_head,
    value_token,
    x_length,
    length,
    chunk,
    chunks,
    segment_chunks,
    H: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    TERMS: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    FORM: tl.constexpr,
):
    """Run through one segment of chunks; grid (slices of features, segments, B·H).

    x [B·H, x_length, F], value [B, H, ≥ length, E], weight [B·H, length] or ones, `enters`
    [B, length] what belongs in a state, `keeps` [B, chunks] whether a state goes on across a chunk.
    `before` and `after` [B·H, segments, M, E + 1]; with KEEP_ALL, `around` [B·H, chunks, M, E] and
    `sums_around` [B·H, chunks, M] get the state in front of every chunk, behind it with REVERSE.
    """
    segment = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    b = head // H
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.arange(0, BE)
    inside = (e < E)[:, None] & (m < M)[None, :]
    # S is held transposed, so that neither product needs a transpose of what a kernel computed
    state = tl.zeros((BE, BM), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    place = (head * tl.num_programs(1) + segment) * M + m
    if HAS_BEFORE:
        origin = before + place[None, :] * (E + 1) + e[:, None]
        state = tl.load(origin, mask=inside, other=0.0)
        total = tl.load(before + place * (E + 1) + E, mask=m < M, other=0.0)
    x += head * x_length * F
    value += b * value_batch + (head % H) * value_head
    first = segment * segment_chunks
    last = tl.minimum(first + segment_chunks, chunks)
    for number in range(first, last):
        c = number
        if REVERSE:
            c = chunks - 1 - number
        if KEEP_ALL:
            kept = (head * chunks + c) * M + m
            at = around + kept[None, :] * E + e[:, None]
            tl.store(at, rounded(state, FORM).to(around.dtype.element_ty), mask=inside)
            tl.store(sums_around + kept, total, mask=m < M)
        if HAS_MASKS:
            stays = tl.load(keeps + b * chunks + c).to(tl.float32)
            state *= stays
            total *= stays
        start = c * chunk
        stop = tl.minimum(start + chunk, length)
        for tile in range(start, stop, BT):
            t = tile + tl.arange(0, BT)
            mask = t < stop
            if HAS_MASKS:
                mask = mask & (tl.load(enters + b * length + t, mask=mask, other=0) != 0)
            phi = features_of(x, t, mask, table, scale, m, F, M, TERMS)
            v = columns_of(value, t, mask, value_token, e, E)
            state = product(v, phi, state, FORM)
            phi = rounded(phi, FORM)
            if HAS_WEIGHT:
                w = tl.load(weight + head * length + t, mask=mask, other=0.0)
                phi *= w[:, None]
            total += tl.sum(phi, 0)
    goal = after + place[None, :] * (E + 1) + e[:, None]
    tl.store(goal, state, mask=inside)
    tl.store(after + place * (E + 1) + E, total, mask=m < M)


@triton.jit(do_not_specialize=UNSPECIALISED)
def states_backward(
    x,
    a,
    weight,
    meets,
    around,
    sums_around,
    d_x,
    d_value,
    table,
    scale,
    a_batch,
    a_head,
    a_token,
    x_length,
    length,
    chunk,
    chunks,
    tiles,
    H: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    TERMS: tl.constexpr,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    IS_KEY: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add what the states give the gradients of x and, for keys, of v; grid (tiles, B·H).

    dφ = a Sᵀ + weight zᵀ: for queries a is dN, weight is dZ, S stands in front of the chunk; for
    keys a is v, weight is one, S is the gradient's state behind the chunk. d_x [B·H, x_length, F]
    and d_value [B·H, x_length, E] hold the near pairs' share already.
    """
    c = tl.program_id(0) // tiles
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    t = c * chunk + (tl.program_id(0) % tiles) * BT + tl.arange(0, BT)
    real = t < tl.minimum(c * chunk + chunk, length)
    mask = real
    if HAS_MASKS:
        mask = mask & (tl.load(meets + b * length + t, mask=mask, other=0) != 0)
    e = tl.arange(0, BE)
    f = tl.arange(0, BF)
    x += head * x_length * F
    a += b * a_batch + (head % H) * a_head
    own = rows_of(a, t, mask, a_token, e, E)
    w = tl.full((BT,), 1.0, tl.float32)
    if not IS_KEY:
        w = tl.load(weight + head * length + t, mask=mask, other=0.0)
    d_rows = tl.zeros((BT, BF), tl.float32)
    d_v = tl.zeros((BT, BE), tl.float32)
    zero = tl.zeros((BT, BM), tl.float32)
    rows = (head * x_length + t)[:, None]
    around += (head * chunks + c) * M * E
    sums_around += (head * chunks + c) * M
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        inside = (e < E)[:, None] & (m < M)[None, :]
        state = tl.load(around + m[None, :] * E + e[:, None], mask=inside, other=0.0)
        total = tl.load(sums_around + m, mask=m < M, other=0.0)
        d_phi = product(own, state, zero, FORM) + w[:, None] * total[None, :]
        c_m = tl.load(scale + m, mask=m < M, other=0.0)
        d_phi = tl.where(mask[:, None], d_phi * c_m[None, :], 0.0)
        if TERMS == 1:
            at = d_x + rows * F + m[None, :]
            present = real[:, None] & (m < M)[None, :]
            tl.store(at, tl.load(at, mask=present, other=0.0) + d_phi, mask=present)
        else:
            first, columns = gathered(x, t, mask, F, table, m, M)
            second, others = gathered(x, t, mask, F, table + M, m, M)
            to_first = (columns[:, None] == f[None, :]).to(tl.float32)
            to_second = (others[:, None] == f[None, :]).to(tl.float32)
            if TERMS == 3:
                third, last = gathered(x, t, mask, F, table + 2 * M, m, M)
                to_third = (last[:, None] == f[None, :]).to(tl.float32)
                d_rows = product(d_phi * first * second, to_third, d_rows, FORM)
                d_phi *= third
            d_rows = product(d_phi * second, to_first, d_rows, FORM)
            d_rows = product(d_phi * first, to_second, d_rows, FORM)
        if IS_KEY:
            phi = features_of(x, t, mask, table, scale, m, F, M, TERMS)
            turned = tl.load(
                around + m[:, None] * E + e[None, :],
                mask=(m < M)[:, None] & (e < E)[None, :],
                other=0.0,
            )
            d_v = product(phi, turned, d_v, FORM)
    if TERMS > 1:
        at = d_x + rows * F + f[None, :]
        present = real[:, None] & (f < F)[None, :]
        tl.store(at, tl.load(at, mask=present, other=0.0) + d_rows, mask=present)
    if IS_KEY:
        at = d_value + (head * x_length + t)[:, None] * E + e[None, :]
        present = real[:, None] & (e < E)[None, :]
        tl.store(at, tl.load(at, mask=present, other=0.0) + d_v, mask=present)


@triton.jit(do_not_specialize=["size", "segments"])
def join_segments(
    own,
    keeps,
    before,
    starts,
    size,
    segments,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """Write the state before every segment from the segments' own sums; grid (blocks, B·H).

    own, starts [B·H, segments, size], before [B·H, size], keeps [B, segments].
    """
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    state = tl.zeros((BLOCK,), tl.float32)
    if HAS_BEFORE:
        state = tl.load(before + head * size + i, mask=mask, other=0.0)
    for segment in range(segments):
        place = (head * segments + segment) * size + i
        tl.store(starts + place, state, mask=mask)
        if HAS_MASKS:
            state *= tl.load(keeps + (head // H) * segments + segment).to(tl.float32)
        state += tl.load(own + place, mask=mask, other=0.0)
