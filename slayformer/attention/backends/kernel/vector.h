// Vectors of floats, and transposes of small matrices. Written with the compiler's portable vector
// types; the widths follow the machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace slay {

using Index = int64_t;

// lanes of a vector, and rows of a product that are held in registers beside two vectors of columns
#if defined(__AVX512F__)
constexpr Index LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr Index LANES = 8, ROWS = 4;
#else
constexpr Index LANES = 4, ROWS = 4;
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef float Quad __attribute__((vector_size(16)));

// floats on a cache line's boundary, not set to anything
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(Index count)
      : at_(static_cast<float*>(::operator new(count * sizeof(float), LINE))) {}
  operator float*() const { return at_.get(); }

 private:
  static constexpr std::align_val_t LINE{64};
  struct Free {
    void operator()(float* at) const { ::operator delete(at, LINE); }
  };
  std::unique_ptr<float, Free> at_;
};

inline Index padded(Index count) { return (count + LANES - 1) / LANES * LANES; }

template <class V = Vector, class T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V, class T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

inline Vector splat(float x) { return x - Vector{}; }

// ones in the first `count` lanes and zeros in the others
inline Vector first_lanes(Index count) {
  struct Steps {
    float at[2 * LANES];
    constexpr Steps() : at() {
      for (Index i = 0; i < LANES; ++i) at[i] = 1.0f;
    }
  };
  static constexpr Steps steps;
  return load(steps.at + LANES - std::min(count, LANES));
}

inline float sum(Vector value) {
  float parts[LANES];
  store(parts, value);
  Quad total = load<Quad>(parts);
  for (Index i = 4; i < LANES; i += 4) total += load<Quad>(parts + i);
  return (total[0] + total[1]) + (total[2] + total[3]);
}

// rows of one head lie apart, where the processor does not see them coming
constexpr Index ROWS_AHEAD = 8;

template <bool WRITE = false, class T>
inline void prefetch(const T* row, Index width) {
  for (Index j = 0; j < width; j += 64 / static_cast<Index>(sizeof(T)))
    __builtin_prefetch(row + j, WRITE ? 1 : 0);
}

inline float to_float(float x) { return x; }

inline float to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// e^x for x up to 88, to about one rounding; 0 far below
inline Vector exponential(Vector x) {
  const Vector lowest = splat(-87.0f), highest = splat(88.0f);
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  // adding and taking away 1.5 · 2²³ rounds to a whole number
  const float round = 12582912.0f;
  Vector n = (x * 1.44269504f + round) - round;
  Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  Integers bits = (__builtin_convertvector(n, Integers) + 127) << 23;
  Vector power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// to[j][i] = from[i][j], or += it
template <bool ADD = false>
inline void transpose(Index rows, Index columns, const float* from, Index ld_from, float* to,
                      Index ld_to) {
  auto put = [](float* at, Quad x) { store(at, ADD ? x + load<Quad>(at) : x); };
  Index i = 0;
  for (; i + 4 <= rows; i += 4) {
    Index j = 0;
    for (; j + 4 <= columns; j += 4) {
      const float* x = from + i * ld_from + j;
      Quad a = load<Quad>(x), b = load<Quad>(x + ld_from);
      Quad c = load<Quad>(x + 2 * ld_from), d = load<Quad>(x + 3 * ld_from);
      Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      Quad ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      Quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      Quad cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      float* y = to + j * ld_to + i;
      put(y, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
      put(y + ld_to, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
      put(y + 2 * ld_to, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
      put(y + 3 * ld_to, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
    }
    for (; j < columns; ++j)
      for (Index r = i; r < i + 4; ++r) {
        float x = from[r * ld_from + j];
        to[j * ld_to + r] = ADD ? x + to[j * ld_to + r] : x;
      }
  }
  for (; i < rows; ++i)
    for (Index j = 0; j < columns; ++j) {
      float x = from[i * ld_from + j];
      to[j * ld_to + i] = ADD ? x + to[j * ld_to + i] : x;
    }
}

}  // namespace slay
