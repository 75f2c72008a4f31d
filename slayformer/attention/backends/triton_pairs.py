"""The kernel of the gradients of queries and keys that meet one by one."""

from __future__ import annotations

import triton
import triton.language as tl

from slayformer.attention.backends.triton_math import (
    FACTOR,
    LINEAR,
    NO_KERNEL,
    columns_of,
    inverse_norms,
    is_near,
    near_products,
    near_scores_of,
    product,
    query_places,
    rows_of,
    scores_of,
    sees,
)

UNSPECIALISED = ["length", "chunk", "tiles", "lag", "strict", "near_size", "squares"]


@triton.jit(do_not_specialize=UNSPECIALISED)
def pairs_backward(
    x,
    y,
    a,
    weight,
    other_a,
    near_x,
    near_y,
    epsilon,
    near_scale,
    d_x,
    d_near,
    d_value,
    d_epsilon,
    d_near_scale,
    groups,
    key_mask,
    query_documents,
    key_documents,
    query_positions,
    key_positions,
    a_batch,
    a_head,
    a_token,
    other_a_batch,
    other_a_head,
    other_a_token,
    near_x_batch,
    near_x_head,
    near_x_token,
    near_y_batch,
    near_y_head,
    near_y_token,
    length,
    chunk,
    tiles,
    lag,
    strict,
    near_size,
    squares,
    H: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    NEAR: tl.constexpr,
    RULE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BE: tl.constexpr,
    BF: tl.constexpr,
    BD: tl.constexpr,
    IS_KEY: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    FORM: tl.constexpr,
    NEAR_FORM: tl.constexpr,
):
    """Write the gradients of a tile of one side; grid (tiles, B·H, blocks of columns).

    The other side comes in tiles of BO rows.

    For queries x, a, other_a are X_q, dN, v; for keys X_k, v, dN; `weight` is dZ for both. A
    block's program writes its columns of d_x [B·H, own length, F]; the first also the near
    vectors' gradient [B·H, own length, D], for keys d_value [B·H, own length, E], for queries
    −Σ dε [B·H, tiles].
    """
    number = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    writes_all = tl.program_id(2) == 0
    b = head // H
    h = head % H
    total_length = length + lag
    own_length = total_length if IS_KEY else length
    other_length = length if IS_KEY else total_length
    start = (number // tiles) * chunk
    first = start + (number % tiles) * BT
    own = first + tl.arange(0, BT)
    stop = tl.minimum(start + chunk, own_length)
    own_mask = own < stop
    if IS_KEY:
        # the queries up to the end of the chunk, from those that the lag lets see the first key
        low = tl.maximum(first - lag + strict, 0)
        high = tl.minimum(start + chunk, length)
    else:
        low = start
        high = tl.minimum(first + BT, stop) + lag
    high = tl.where(first < stop, high, low)
    e = tl.arange(0, BE)
    d = tl.arange(0, BD)
    f = tl.program_id(2) * BF + tl.arange(0, BF)
    x += head * own_length * F
    y += head * other_length * F
    a += b * a_batch + h * a_head
    other_a += b * other_a_batch + h * other_a_head
    near_x += b * near_x_batch + h * near_x_head
    near_y += b * near_y_batch + h * near_y_head
    weight += head * length
    group = tl.load(groups + f, mask=f < F, other=-1)[None, :]
    own_a = rows_of(a, own, own_mask, a_token, e, E)
    d_rows = tl.zeros((BT, BF), tl.float32)
    d_v = tl.zeros((BT, BE), tl.float32)
    d_n = tl.zeros((BT, BD), tl.float32)
    d_eps = tl.zeros((BT,), tl.float32)
    d_scale = tl.zeros((BT,), tl.float32)
    zero = tl.zeros((BT, BO), tl.float32)
    if IS_KEY:
        own_document, own_position = query_places(
            key_documents, key_positions, b, total_length, own, own_mask, HAS_DOCUMENTS
        )
        key_real = own_mask
        if HAS_MASK:
            there = tl.load(key_mask + b * total_length + own, mask=own_mask, other=0)
            key_real = key_real & (there != 0)
    else:
        own_document, own_position = query_places(
            query_documents, query_positions, b, length, own, own_mask, HAS_DOCUMENTS
        )
        own_weight = tl.load(weight + own, mask=own_mask, other=0.0)
    for tile in range(low, high, BO):
        other = tile + tl.arange(0, BO)
        other_mask = other < other_length
        other_value = columns_of(other_a, other, other_mask, other_a_token, e, E)
        d_score = product(own_a, other_value, zero, FORM)
        if IS_KEY:
            document, position = query_places(
                query_documents, query_positions, b, length, other, other_mask, HAS_DOCUMENTS
            )
            d_score += tl.load(weight + other, mask=other_mask, other=0.0)[None, :]
            met = sees(
                other[None, :],
                other_mask[None, :],
                document[None, :],
                own[:, None],
                key_real[:, None],
                own_document[:, None],
                chunk,
                lag,
                strict,
                HAS_DOCUMENTS,
            )
        else:
            document, position = query_places(
                key_documents, key_positions, b, total_length, other, other_mask, HAS_DOCUMENTS
            )
            d_score += own_weight[:, None]
            met_mask = other_mask
            if HAS_MASK:
                there = tl.load(key_mask + b * total_length + other, mask=other_mask, other=0)
                met_mask = met_mask & (there != 0)
            met = sees(
                own[:, None],
                own_mask[:, None],
                own_document[:, None],
                other[None, :],
                met_mask[None, :],
                document[None, :],
                chunk,
                lag,
                strict,
                HAS_DOCUMENTS,
            )
        d_score = tl.where(met, d_score, 0.0)
        p, r = scores_of(
            x,
            own,
            own_mask,
            y,
            other,
            other_mask,
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
        d_far = d_score
        if NEAR != NO_KERNEL:
            near = is_near(own_position[:, None], position[None, :], near_size, RULE)
            s = near_products(
                near_x,
                own,
                own_mask,
                near_x_token,
                near_y,
                other,
                other_mask,
                near_y_token,
                zero,
                D,
                BD,
                NORMALISE,
                NEAR_FORM,
            )
            exact, slope, by_epsilon = near_scores_of(
                s, tl.load(epsilon + h), tl.load(near_scale + h), NEAR
            )
            score = tl.where(near, exact, score)
            d_far = tl.where(near, 0.0, d_score)
            d_near_score = tl.where(near, d_score, 0.0)
            others = rows_of(near_y, other, other_mask, near_y_token, d, D)
            slope *= d_near_score
            if NORMALISE:
                slope *= inverse_norms(others, 1)[None, :]
            d_n = product(slope, others, d_n, NEAR_FORM)
            if not IS_KEY:
                d_eps += tl.sum(d_near_score * by_epsilon, 1)
                # the scores have the scale in them
                d_scale += tl.sum(d_near_score * exact, 1)
        rows = rows_of(y, other, other_mask, F, f, F)
        d_p = d_far
        if HAS_FACTOR:
            d_p = d_far * r
            d_rows = product(d_far * p, tl.where(group == FACTOR, rows, 0.0), d_rows, FORM)
        if HAS_LINEAR:
            d_rows = product(d_p, tl.where(group == LINEAR, rows, 0.0), d_rows, FORM)
        if HAS_SQUARES:
            own_rows = rows_of(x, own, own_mask, F, f, F)
            turned = columns_of(y, other, other_mask, F, f, F)
            for square in range(squares):
                s = product(tl.where(group == square, own_rows, 0.0), turned, zero, FORM)
                chosen = tl.where(group == square, rows, 0.0)
                d_rows = product(2.0 * d_p * s, chosen, d_rows, FORM)
        if IS_KEY:
            n = rows_of(other_a, other, other_mask, other_a_token, e, E)
            d_v = product(tl.where(met, score, 0.0), n, d_v, FORM)
    place = head * own_length + own
    at = d_x + place[:, None] * F + f[None, :]
    tl.store(at, d_rows, mask=own_mask[:, None] & (f < F)[None, :])
    # the other blocks of columns repeat what only one of them writes
    own_mask = own < tl.where(writes_all, stop, 0)
    if NEAR != NO_KERNEL:
        if NORMALISE:
            vectors = rows_of(near_x, own, own_mask, near_x_token, d, D).to(tl.float32)
            inverse = inverse_norms(vectors, 1)
            along = tl.sum(vectors * d_n, 1) * inverse * inverse
            d_n = (d_n - vectors * along[:, None]) * inverse[:, None]
        at = d_near + place[:, None] * D + d[None, :]
        tl.store(at, d_n, mask=own_mask[:, None] & (d < D)[None, :])
        if not IS_KEY:
            at = head * tl.num_programs(0) + number
            tl.store(d_epsilon + at, -tl.sum(d_eps, 0))
            tl.store(d_near_scale + at, tl.sum(d_scale, 0) / tl.load(near_scale + h))
    if IS_KEY:
        at = d_value + place[:, None] * E + e[None, :]
        tl.store(at, d_v, mask=own_mask[:, None] & (e < E)[None, :])
