// Products of small matrices, of floats or of numbers in bf16.
#pragma once

#include "halves.h"

namespace slay {

inline Vector add_product(Vector total, Vector a, Vector b) { return total + a * b; }

// what becomes of a product C: written, added, squared, squared and added, multiplied onto C
enum class Into { store, add, square, add_square, multiply };

// C[R][V vectors] from A and B over `depth`, in pairs if they are halves; A's element (i, p) is at a[i lda + p] if BY_ROW, else
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

}  // namespace slay
