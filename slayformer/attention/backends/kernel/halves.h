// Numbers rounded to bf16, two by two along the depth of a product, as the processor's dot products
// take them.
#pragma once

#include "vector.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace slay {

// the first number is the lower half
struct Halves {
  int32_t bits;
};

inline Integers splat(Halves x) { return x.bits - Integers{}; }

inline Index pairs(Index count) { return (count + 1) / 2; }

#if defined(__AVX512BF16__)

constexpr bool HAS_HALVES = true;

inline Vector add_product(Vector total, Integers a, Integers b) {
  return (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
}

// a pair in each lane
inline void store_woven(Halves* to, Vector low, Vector high) {
  // 0, 16, 1, 17, …
  struct Order {
    int16_t at[2 * LANES];
    constexpr Order() : at() {
      for (Index i = 0; i < 2 * LANES; ++i) at[i] = static_cast<int16_t>(i / 2 + i % 2 * LANES);
    }
  };
  static constexpr Order order;
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  store(to, _mm512_permutexvar_epi16(load<__m512i>(order.at), both));
}

// neighbouring lanes as pairs
inline void store_narrow(Halves* to, Vector x) { store(to, _mm512_cvtneps_pbh((__m512)x)); }

// the nearest number in bf16
inline Vector rounded(Vector x) {
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}

// the first `count` floats, zeros behind them
inline Vector load_some(const float* from, Index count) {
  if (count >= LANES) return load(from);
  return (Vector)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}

#else

// without the instruction floats are faster, and nothing of this is called
constexpr bool HAS_HALVES = false;

inline Vector add_product(Vector, Integers, Integers) { __builtin_unreachable(); }
inline void store_woven(Halves*, Vector, Vector) { __builtin_unreachable(); }
inline void store_narrow(Halves*, Vector) { __builtin_unreachable(); }
inline Vector rounded(Vector) { __builtin_unreachable(); }
inline Vector load_some(const float*, Index) { __builtin_unreachable(); }

#endif

// A matrix in halves; its memory grows to the largest that has been asked for.
class HalfMatrix {
 public:
  Halves* reserve(Index count) {
    if (count > size_) buffer_ = Buffer(size_ = count);
    return reinterpret_cast<Halves*>(static_cast<float*>(buffer_));
  }

  // pairs of rows: [pairs(rows)][padded(columns)]
  const Halves* weave(Index rows, Index columns, const float* from, Index ld) {
    const Index ld_to = padded(columns);
    Halves* to = reserve(pairs(rows) * ld_to);
    for (Index i = 0; i < rows; i += 2)
      for (Index j = 0; j < columns; j += LANES) {
        const float* at = from + i * ld + j;
        const Vector low = load_some(at, columns - j);
        store_woven(to + i / 2 * ld_to + j, low,
                    i + 1 < rows ? load_some(at + ld, columns - j) : Vector{});
      }
    return to;
  }

 private:
  Buffer buffer_;
  Index size_ = 0;
};

}  // namespace slay
