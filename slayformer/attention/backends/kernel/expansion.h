// Features from their factors, a slice at a time, and what they do with the state.
//
// Factors stand as F[column][token], features as φ[feature][token]. The state is S[feature][value]
// and z[feature].
#pragma once

#include <algorithm>
#include <vector>

#include "problem.h"
#include "vector.h"

namespace slay {

// features expanded at a time: a slice of them and of the state stays in the nearest cache
constexpr Index SLICE = 64;

// columns whose inner product is a score, or a part of one
struct Term {
  Index part, offset, column, padded_column, width;
  bool is_squared;
};

// factor · F[first] · F[second], or without a second column factor · F[first]
struct Feature {
  Index first, second;
  float factor;
};

// The layout of the factors and of the features made of them.
struct Map {
  std::vector<Term> terms;
  Term factor{};
  std::vector<Feature> left;
  Index columns = 0, padded_columns = 0, features = 0;
  // whether the left features are columns of F as they stand
  bool is_plain = true;

  explicit Map(const Problem& problem) {
    for (Index p = 0; p < problem.parts; ++p) {
      const Part& part = problem.part[p];
      const Index width = part.kind == SQUARES ? part.block : part.width;
      for (Index offset = 0; offset < part.width; offset += width) {
        const Term term{p, offset, columns, padded_columns, width, part.kind == SQUARES};
        if (part.kind == FACTOR) {
          factor = term;
        } else {
          terms.push_back(term);
          add_left(term);
        }
        columns += width;
        padded_columns += padded(width);
      }
    }
    features = static_cast<Index>(left.size()) * std::max<Index>(factor.width, 1);
  }

 private:
  void add_left(const Term& term) {
    is_plain = is_plain && !term.is_squared && term.column == static_cast<Index>(left.size());
    for (Index i = 0; i < term.width; ++i) {
      if (!term.is_squared) left.push_back({term.column + i, -1, 1.0f});
      for (Index j = i; term.is_squared && j < term.width; ++j)
        left.push_back({term.column + i, term.column + j, i == j ? 1.0f : std::sqrt(2.0f)});
    }
  }
};

// One stretch of tokens between the factors and the state.
class Expansion {
 public:
  Expansion(const Map& map, Index value_width, Index most_tokens)
      : map_(map), width_(value_width), ld_(padded(most_tokens)) {
    slice_ = Buffer(SLICE * ld_);
    if (map.factor.width == 0) return;
    const Index left = static_cast<Index>(map.left.size());
    if (!map.is_plain) left_ = Buffer(left * ld_);
    d_left_ = Buffer(left * ld_);
  }

  // out[token][value] += φᵀS, and for `normaliser` also += φᵀz
  void read(const float* f, Index ld, Index tokens, const float* s, const float* z, float* out,
            float* normaliser) {
    const Index lds = padded(width_);
    expand_left(f, ld, tokens);
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      const Slice phi = slice(f, ld, tokens, m, count);
      product_of_transposed<Into::add>(tokens, width_, count, phi.at, phi.ld, s + m * lds, lds, out,
                                       lds);
      for (Index t = 0; normaliser && t < tokens; t += LANES) {
        Vector total = load(normaliser + t);
        for (Index i = 0; i < count; ++i) total += load(phi.at + i * phi.ld + t) * z[m + i];
        store(normaliser + t, total);
      }
    }
  }

  // S += φ values, z += φ weights; weights are 0 behind the tokens
  void write(const float* f, Index ld, Index tokens, const float* values, const float* weights,
             float* s, float* z) {
    const Index lds = padded(width_);
    expand_left(f, ld, tokens);
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      const Slice phi = slice(f, ld, tokens, m, count);
      product<Into::add>(count, width_, tokens, phi.at, phi.ld, values, lds, s + m * lds, lds);
      for (Index i = 0; i < count; ++i) {
        Vector total{};
        for (Index t = 0; t < tokens; t += LANES)
          total += load(phi.at + i * phi.ld + t) * load(weights + t);
        z[m + i] += sum(total);
      }
    }
  }

  // dF = the gradient of Σ φ·(S x + z w), for x given as [value][token]; d_f need not be clear
  void pull(const float* f, Index ld, Index tokens, const float* s, const float* z, const float* x,
            Index ldx, const float* weights, float* d_f) {
    const Index lds = padded(width_), factor = map_.factor.width;
    std::fill_n(d_f, map_.columns * ld, 0.0f);
    expand_left(f, ld, tokens);
    if (factor > 0) std::fill_n(static_cast<float*>(d_left_), map_.left.size() * ld_, 0.0f);
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      product<Into::store>(count, tokens, width_, s + m * lds, lds, x, ldx, slice_, ld_);
      for (Index i = 0; i < count; ++i) {
        float* d_phi = slice_ + i * ld_;
        for (Index t = 0; t < tokens; t += LANES)
          store(d_phi + t, load(d_phi + t) + load(weights + t) * z[m + i]);
        if (factor == 0) {
          pull_left(map_.left[m + i], f, ld, tokens, d_phi, d_f);
          continue;
        }
        const Index p = (m + i) / factor, r = map_.factor.column + (m + i) % factor;
        const float *left = left_at(f, ld, p), *right = f + r * ld;
        float *d_left = d_left_ + p * ld_, *d_right = d_f + r * ld;
        for (Index t = 0; t < tokens; t += LANES) {
          const Vector d = load(d_phi + t);
          store(d_left + t, load(d_left + t) + d * load(right + t));
          store(d_right + t, load(d_right + t) + d * load(left + t));
        }
      }
    }
    for (size_t p = 0; factor > 0 && p < map_.left.size(); ++p)
      pull_left(map_.left[p], f, ld, tokens, d_left_ + p * ld_, d_f);
  }

 private:
  struct Slice {
    const float* at;
    Index ld;
  };

  static void expand_one(const Feature& feature, const float* f, Index ld, Index tokens,
                         float* out) {
    const float* first = f + feature.first * ld;
    if (feature.second < 0) {
      for (Index t = 0; t < tokens; t += LANES) store(out + t, load(first + t));
      return;
    }
    const float* second = f + feature.second * ld;
    for (Index t = 0; t < tokens; t += LANES)
      store(out + t, load(first + t) * load(second + t) * feature.factor);
  }

  static void pull_left(const Feature& feature, const float* f, Index ld, Index tokens,
                        const float* d, float* d_f) {
    float* d_first = d_f + feature.first * ld;
    if (feature.second < 0) {
      for (Index t = 0; t < tokens; t += LANES)
        store(d_first + t, load(d_first + t) + load(d + t));
      return;
    }
    const float *first = f + feature.first * ld, *second = f + feature.second * ld;
    float* d_second = d_f + feature.second * ld;
    for (Index t = 0; t < tokens; t += LANES) {
      const Vector x = load(d + t) * feature.factor;
      store(d_first + t, load(d_first + t) + x * load(second + t));
      store(d_second + t, load(d_second + t) + x * load(first + t));
    }
  }

  void expand_left(const float* f, Index ld, Index tokens) {
    if (!left_) return;
    for (size_t p = 0; p < map_.left.size(); ++p)
      expand_one(map_.left[p], f, ld, tokens, left_ + p * ld_);
  }

  const float* left_at(const float* f, Index ld, Index p) const {
    return !left_ ? f + map_.left[p].first * ld : left_ + p * ld_;
  }

  Slice slice(const float* f, Index ld, Index tokens, Index start, Index count) {
    const Index factor = map_.factor.width;
    if (factor == 0 && map_.is_plain) return {f + start * ld, ld};
    for (Index i = 0; i < count; ++i) {
      float* out = slice_ + i * ld_;
      if (factor == 0) {
        expand_one(map_.left[start + i], f, ld, tokens, out);
        continue;
      }
      const float* left = left_at(f, ld, (start + i) / factor);
      const float* right = f + (map_.factor.column + (start + i) % factor) * ld;
      for (Index t = 0; t < tokens; t += LANES) store(out + t, load(left + t) * load(right + t));
    }
    return {slice_, ld_};
  }

  const Map& map_;
  Index width_, ld_;
  Buffer slice_, left_, d_left_;
};

}  // namespace slay
