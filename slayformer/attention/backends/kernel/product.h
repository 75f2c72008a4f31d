// Products of small matrices: of floats, and with bf16 operands where the processor has their dot
// products.
#pragma once

#include "halves.h"

namespace slay {

inline Vector add_product(Vector total, Vector a, Vector b) { return total + a * b; }

// what becomes of a product C: written, added, squared, squared and added, multiplied onto C
enum class Into { store, add, square, add_square, multiply };

// C[R][V vectors] from A and B over `depth`; A's element (i, p) is at a[i lda + p] if BY_ROW, else
// at a[p lda + i]
template <Index R, Index V, bool BY_ROW, Into INTO, class Number>
inline void tile(Index depth, const Number* a, Index lda, const Number* b, Index ldb, float* c,
                 Index ldc) {
  Vector total[R][V];
  for (Index i = 0; i < R; ++i)
    for (Index j = 0; j < V; ++j) total[i][j] = Vector{};
  for (Index p = 0; p < depth; ++p) {
    decltype(splat(*b)) row[V];
    for (Index j = 0; j < V; ++j) row[j] = load<decltype(splat(*b))>(b + j * LANES);
    for (Index i = 0; i < R; ++i) {
      const auto x = splat(BY_ROW ? a[i * lda] : a[i]);
      for (Index j = 0; j < V; ++j) total[i][j] = add_product(total[i][j], x, row[j]);
    }
    a += BY_ROW ? 1 : lda;
    b += ldb;
  }
  for (Index i = 0; i < R; ++i)
    for (Index j = 0; j < V; ++j) {
      float* to = c + i * ldc + j * LANES;
      Vector x = total[i][j];
      if (INTO == Into::square || INTO == Into::add_square) x *= x;
      if (INTO == Into::add || INTO == Into::add_square) x += load(to);
      if (INTO == Into::multiply) x *= load(to);
      store(to, x);
    }
}

template <Index V, bool BY_ROW, Into INTO, class Number>
inline void strip(Index rows, Index depth, const Number* a, Index lda, const Number* b, Index ldb,
                  float* c, Index ldc) {
  const Index step = BY_ROW ? lda : 1;
  Index i = 0;
  for (; i + ROWS <= rows; i += ROWS)
    tile<ROWS, V, BY_ROW, INTO>(depth, a + i * step, lda, b, ldb, c + i * ldc, ldc);
  if (ROWS > 4 && i + 4 <= rows) {
    tile<4, V, BY_ROW, INTO>(depth, a + i * step, lda, b, ldb, c + i * ldc, ldc);
    i += 4;
  }
  if (i + 2 <= rows) {
    tile<2, V, BY_ROW, INTO>(depth, a + i * step, lda, b, ldb, c + i * ldc, ldc);
    i += 2;
  }
  if (i < rows) tile<1, V, BY_ROW, INTO>(depth, a + i * step, lda, b, ldb, c + i * ldc, ldc);
}

template <bool BY_ROW, Into INTO, class Number>
__attribute__((noinline)) void product_as(Index rows, Index columns, Index depth, const Number* a,
                                          Index lda, const Number* b, Index ldb, float* c,
                                          Index ldc) {
  Index j = 0;
  for (; j + 2 * LANES <= padded(columns); j += 2 * LANES)
    strip<2, BY_ROW, INTO>(rows, depth, a, lda, b + j, ldb, c + j, ldc);
  if (j < columns) strip<1, BY_ROW, INTO>(rows, depth, a, lda, b + j, ldb, c + j, ldc);
}

// C[rows][columns] = A B: A by rows. B and C are read and written up to padded(columns).
template <Into INTO>
inline void product(Index rows, Index columns, Index depth, const float* a, Index lda,
                    const float* b, Index ldb, float* c, Index ldc) {
  product_as<true, INTO>(rows, columns, depth, a, lda, b, ldb, c, ldc);
}

// The same for A given transposed, as [depth][rows].
template <Into INTO>
inline void product_of_transposed(Index rows, Index columns, Index depth, const float* a, Index lda,
                                  const float* b, Index ldb, float* c, Index ldc) {
  product_as<false, INTO>(rows, columns, depth, a, lda, b, ldb, c, ldc);
}

// The second operand of products, made ready once for several of them.
struct Second {
  const float* plain;
  Index ld;
  const Halves* halves;
};

// Products whose operands are rounded to bf16 first, if `is_half` and if that is faster here; sums
// are fp32 all the same.
class Products {
 public:
  explicit Products(bool is_half) : is_half_(is_half) {}

  bool is_half() const { return HAS_HALVES && is_half_; }

  // B [depth][columns]; good until the next one
  Second second(Index depth, Index columns, const float* b, Index ldb) {
    if (!is_half()) return {b, ldb, nullptr};
    return {nullptr, padded(columns), second_.weave(depth, columns, b, ldb)};
  }

  template <Into INTO>
  void by_row(Index rows, Index columns, Index depth, const float* a, Index lda, const Second& b,
              float* c, Index ldc) {
    if (is_half())
      product_as<true, INTO>(rows, columns, pairs(depth), first_.narrow(rows, depth, a, lda),
                             padded(depth) / 2, b.halves, b.ld, c, ldc);
    else
      product<INTO>(rows, columns, depth, a, lda, b.plain, b.ld, c, ldc);
  }

  template <Into INTO>
  void of_transposed(Index rows, Index columns, Index depth, const float* a, Index lda,
                     const Second& b, float* c, Index ldc) {
    if (is_half())
      product_as<false, INTO>(rows, columns, pairs(depth), first_.weave(depth, rows, a, lda),
                              padded(rows), b.halves, b.ld, c, ldc);
    else
      product_of_transposed<INTO>(rows, columns, depth, a, lda, b.plain, b.ld, c, ldc);
  }

 private:
  bool is_half_;
  HalfMatrix first_, second_;
};

}  // namespace slay
