"""What the Triton kernels share: products in a given form, features from factors, scores of pairs.

Kernels hold no tensor of a sequence's features. Factors X [B·H, T, F] lie in memory, and feature m
is c_m X[a_m] X[b_m] X[r_m] for columns a_m, b_m, r_m that a table names: a gather from one short
row, which never leaves the first cache. Its transpose, the way of the gradients, is a product with
a matrix of zeros and ones, so no two programs ever add to one number.

Shape suffixes of comments: X own rows, Y rows of the other side, F columns of factors, M features.
"""

from __future__ import annotations

import triton
import triton.language as tl

# how products take their operands: bf16; fp32 rounded to bf16, for the interpreter, whose own bf16
# is wrong; fp32 as three tf32 products; one tf32 product
BF16 = tl.constexpr(0)
ROUNDED = tl.constexpr(1)
FP32 = tl.constexpr(2)
TF32 = tl.constexpr(3)
# the groups of columns that are no blocks of squares
LINEAR = tl.constexpr(1 << 20)
FACTOR = tl.constexpr((1 << 20) + 1)
# near kernels, and the rules by which pairs are near
NO_KERNEL = tl.constexpr(0)
YAT = tl.constexpr(1)
EXPONENTIAL = tl.constexpr(2)
SAME_STRETCH = tl.constexpr(1)
LARGEST_SCORE = tl.constexpr(40.0)
NORM_FLOOR = tl.constexpr(1e-4)


@triton.jit
def rounded(x, FORM: tl.constexpr):
    """Return what `x` is as an operand of a product, in fp32."""
    x = x.to(tl.float32)
    if FORM == BF16:
        x = x.to(tl.bfloat16).to(tl.float32)
    elif FORM == ROUNDED:
        # to the nearest, to even between two
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def product(a, b, onto, FORM: tl.constexpr):
    """Return a b + onto, summed up in fp32."""
    if FORM == BF16:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), onto)
    elif FORM == TF32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), onto, input_precision="tf32")
    else:
        return tl.dot(rounded(a, FORM), rounded(b, FORM), onto, input_precision="tf32x3")


@triton.jit
def rows_of(x, rows, row_mask, stride, columns, width):
    """Return x[rows, columns], zero where masked or from `width` on."""
    at = x + rows[:, None] * stride + columns[None, :]
    return tl.load(at, mask=row_mask[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def columns_of(x, rows, row_mask, stride, columns, width):
    """Return the transpose of `rows_of`, loaded as such."""
    at = x + rows[None, :] * stride + columns[:, None]
    return tl.load(at, mask=row_mask[None, :] & (columns < width)[:, None], other=0.0)


@triton.jit
def gathered(x, rows, row_mask, F: tl.constexpr, table, features, M: tl.constexpr):
    """Return x[rows, table[features]], where column −1 is one, and the columns."""
    columns = tl.load(table + features, mask=features < M, other=-1)
    at = x + rows[:, None] * F + columns[None, :]
    found = tl.load(at, mask=row_mask[:, None] & (columns >= 0)[None, :], other=1.0)
    return found.to(tl.float32), columns


@triton.jit
def features_of(
    x, rows, row_mask, table, scale, features, F: tl.constexpr, M: tl.constexpr, TERMS: tl.constexpr
):
    """Return φ[rows, features] in fp32, zero in masked rows and from M on."""
    phi, _ = gathered(x, rows, row_mask, F, table, features, M)
    if TERMS > 1:
        second, _ = gathered(x, rows, row_mask, F, table + M, features, M)
        phi *= second
    if TERMS > 2:
        third, _ = gathered(x, rows, row_mask, F, table + 2 * M, features, M)
        phi *= third
    c = tl.load(scale + features, mask=features < M, other=0.0)
    return tl.where(row_mask[:, None], phi * c[None, :], 0.0)


@triton.jit
def scores_of(
    x,
    x_rows,
    x_mask,
    y,
    y_rows,
    y_mask,
    groups,
    squares,
    BX: tl.constexpr,
    BY: tl.constexpr,
    F: tl.constexpr,
    BF: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return p and r [X, Y], whose product is φ(x)·φ(y).

    p sums the squares of the blocks' products and the product of the linear columns; r is the
    product of the factor columns. Only linear columns may be more than BF.
    """
    p = tl.zeros((BX, BY), tl.float32)
    r = tl.full((BX, BY), 1.0, tl.float32)
    zero = tl.zeros((BX, BY), tl.float32)
    for block in range(0, F, BF):
        columns = block + tl.arange(0, BF)
        group = tl.load(groups + columns, mask=columns < F, other=-1)[None, :]
        own = rows_of(x, x_rows, x_mask, F, columns, F)
        other = columns_of(y, y_rows, y_mask, F, columns, F)
        if HAS_SQUARES:
            # their number is no constant: unrolled, all blocks would fill the registers at once
            for square in range(squares):
                s = product(tl.where(group == square, own, 0.0), other, zero, FORM)
                p += s * s
        if HAS_LINEAR:
            p = product(tl.where(group == LINEAR, own, 0.0), other, p, FORM)
        if HAS_FACTOR:
            r = product(tl.where(group == FACTOR, own, 0.0), other, zero, FORM)
    return p, r


@triton.jit
def inverse_norms(x, axis: tl.constexpr):
    """Return 1/‖x‖ as `kernels.unit` has it."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis) + NORM_FLOOR)


@triton.jit
def near_scores_of(s, epsilon, scale, NEAR: tl.constexpr):
    """Return the near kernel of inner products s, its derivative, and that by −ε."""
    if NEAR == YAT:
        x = tl.minimum(s, 1.0)
        inverse = 1.0 / (2.0 + epsilon - 2.0 * x)
        score = scale * x * x * inverse
        slope = tl.where(s > 1.0, 0.0, scale * 2.0 * x * (2.0 + epsilon - x) * inverse * inverse)
        return score, slope, score * inverse
    else:
        score = scale * tl.exp(tl.minimum(s, LARGEST_SCORE))
        return score, tl.where(s > LARGEST_SCORE, 0.0, score), score


@triton.jit
def query_places(documents, positions, b, length, t, mask, HAS_DOCUMENTS: tl.constexpr):
    """Return the documents and positions of tokens t of sequence b, zeros where there are none."""
    document = tl.zeros_like(t).to(tl.int64)
    if HAS_DOCUMENTS:
        document = tl.load(documents + b * length + t, mask=mask, other=-1)
    position = tl.load(positions + b * length + t, mask=mask, other=0)
    return document, position


@triton.jit
def sees(
    t,
    t_mask,
    t_document,
    s,
    s_mask,
    s_document,
    chunk,
    lag,
    strict,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Return whether queries t meet keys s one by one; t and s broadcast against each other."""
    met = t_mask & s_mask & (s <= t + lag - strict) & (s >= (t // chunk) * chunk)
    if HAS_DOCUMENTS:
        met = met & (t_document == s_document)
    return met


@triton.jit
def is_near(t_position, s_position, size, RULE: tl.constexpr):
    """Return whether the exact kernel decides pairs at these positions."""
    if RULE == SAME_STRETCH:
        return t_position // size == s_position // size
    else:
        return tl.abs(t_position - s_position) < size


@triton.jit
def near_products(
    x,
    x_rows,
    x_mask,
    x_token,
    y,
    y_rows,
    y_mask,
    y_token,
    zero,
    D: tl.constexpr,
    BD: tl.constexpr,
    NORMALISE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return x·y [X, Y] of the near kernel's vectors, of their directions with NORMALISE."""
    d = tl.arange(0, BD)
    own = rows_of(x, x_rows, x_mask, x_token, d, D)
    other = columns_of(y, y_rows, y_mask, y_token, d, D)
    s = product(own, other, zero, FORM)
    if NORMALISE:
        s *= inverse_norms(own, 1)[:, None] * inverse_norms(other, 0)[None, :]
    return s
