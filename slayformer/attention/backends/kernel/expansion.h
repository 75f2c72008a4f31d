// Features from their factors, a slice at a time, and what they do with the state.
//
// Factors stand as F[column][token], features as φ[feature][token]. The state is S[feature][value]
// and z[feature].
#pragma once

#include <algorithm>

#include "map.h"
#include "product.h"

namespace slay {

// features expanded at a time: a slice of them and of the state stays in the nearest cache
constexpr Index SLICE = 64;

// One stretch of tokens between the factors and the state.
class Expansion {
 public:
  // `is_half`: products may take bf16 operands, if these are faster here
  Expansion(const Map& map, Index value_width, Index most_tokens, bool is_half)
      : map_(map),
        width_(value_width),
        lds_(padded(value_width)),
        ld_(padded(most_tokens)),
        slice_(SLICE * ld_),
        centre_(lds_),
        weights_(ld_),
        is_half_(HAS_HALVES && is_half) {
    if (map.factor.width == 0) return;
    const Index left = static_cast<Index>(map.left.size());
    if (!map.is_plain) left_ = Buffer(left * ld_);
    d_left_ = Buffer(left * ld_);
  }

  bool is_half() const { return is_half_; }

  // out[token][value] += φᵀS, and for `normaliser` also += φᵀz
  void read(const float* f, Index ld, Index tokens, const float* s, const float* z, float* out,
            float* normaliser) {
    expand_left(f, ld, tokens);
    if (is_half_) {
      read_half(f, ld, tokens, s, z, out, normaliser);
      return;
    }
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      const Slice phi = slice(f, ld, tokens, m, count);
      product_of_transposed<Into::add>(tokens, width_, count, phi.at, phi.ld, s + m * lds_, lds_,
                                       out, lds_);
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
    expand_left(f, ld, tokens);
    if (is_half_) {
      write_half(f, ld, tokens, values, weights, s, z);
      return;
    }
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      const Slice phi = slice(f, ld, tokens, m, count);
      product<Into::add>(count, width_, tokens, phi.at, phi.ld, values, lds_, s + m * lds_, lds_);
      for (Index i = 0; i < count; ++i) {
        Vector total{};
        for (Index t = 0; t < tokens; t += LANES)
          total += load(phi.at + i * phi.ld + t) * load(weights + t);
        z[m + i] += sum(total);
      }
    }
  }

  // dF = the gradient of Σ φ·(S x + z w), for x given as [value][token]; d_f need not be clear.
  void pull(const float* f, Index ld, Index tokens, const float* s, const float* z, const float* x,
            Index ldx, const float* weights, float* d_f) {
    std::fill_n(d_f, map_.columns * ld, 0.0f);
    expand_left(f, ld, tokens);
    const Index left = static_cast<Index>(map_.left.size());
    if (d_left_) std::fill_n(static_cast<float*>(d_left_), left * ld_, 0.0f);
    if (is_half_) {
      pull_half(f, ld, tokens, s, z, x, ldx, weights, d_f);
    } else {
      for (Index m = 0; m < map_.features; m += SLICE) {
        const Index count = std::min(SLICE, map_.features - m);
        product<Into::store>(count, tokens, width_, s + m * lds_, lds_, x, ldx, slice_, ld_);
        find_sources(f, ld, m, count, d_f);
        pull_slice(tokens, count, slice_, z + m, weights);
      }
    }
    for (Index p = 0; d_left_ && p < left; p += SLICE) {
      const Index count = std::min(SLICE, left - p);
      for (Index i = 0; i < count; ++i) sources_[i] = left_source(f, ld, p + i, d_f);
      pull_slice(tokens, count, d_left_ + p * ld_, nullptr, nullptr);
    }
  }

 private:
  struct Slice {
    const float* at;
    Index ld;
  };

  // what a feature is made of, first · second · factor or without a second column the first, and
  // where the gradients of both go
  struct Source {
    const float *first, *second;
    float factor;
    float *d_first, *d_second;

    Vector at(Index t) const {
      const Vector x = load(first + t);
      if (!second) return x;
      // most factors are 1
      return factor == 1.0f ? x * load(second + t) : x * load(second + t) * factor;
    }
  };

  Source left_source(const float* f, Index ld, Index p, float* d_f) const {
    const Feature& x = map_.left[p];
    const bool is_one = x.second < 0;
    return {f + x.first * ld, is_one ? nullptr : f + x.second * ld, x.factor,
            d_f ? d_f + x.first * ld : nullptr, d_f && !is_one ? d_f + x.second * ld : nullptr};
  }

  void find_sources(const float* f, Index ld, Index start, Index count, float* d_f = nullptr) {
    const Index factor = map_.factor.width;
    for (Index i = 0; i < count; ++i) {
      if (factor == 0) {
        sources_[i] = left_source(f, ld, start + i, d_f);
        continue;
      }
      const Index p = (start + i) / factor, r = map_.factor.column + (start + i) % factor;
      const float* left = left_ ? left_ + p * ld_ : f + map_.left[p].first * ld;
      sources_[i] = {left, f + r * ld, 1.0f, d_left_ + p * ld_, d_f ? d_f + r * ld : nullptr};
    }
  }

  void expand_left(const float* f, Index ld, Index tokens) {
    if (!left_) return;
    for (size_t p = 0; p < map_.left.size(); ++p) {
      const Source source = left_source(f, ld, static_cast<Index>(p), nullptr);
      for (Index t = 0; t < tokens; t += LANES) store(left_ + p * ld_ + t, source.at(t));
    }
  }

  Slice slice(const float* f, Index ld, Index tokens, Index start, Index count) {
    if (map_.factor.width == 0 && map_.is_plain) return {f + start * ld, ld};
    find_sources(f, ld, start, count);
    for (Index i = 0; i < count; ++i) {
      const Source source = sources_[i];
      for (Index t = 0; t < tokens; t += LANES) store(slice_ + i * ld_ + t, source.at(t));
    }
    return {slice_, ld_};
  }

  void read_half(const float* f, Index ld, Index tokens, const float* s, const float* z, float* out,
                 float* normaliser) {
    float* sums = weights_;
    std::fill_n(sums, ld_, 0.0f);
    if (normaliser)
      find_centre(s, z);
    else
      std::fill_n(static_cast<float*>(centre_), lds_, 0.0f);
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      find_sources(f, ld, m, count);
      product_as<false, Into::add>(tokens, width_, pairs(count),
                                   weave_slice(tokens, count, z + m, sums), ld_,
                                   weave_centred(count, s + m * lds_, z + m), lds_, out, lds_);
    }
    for (Index t = 0; normaliser && t < tokens; ++t) {
      normaliser[t] += sums[t];
      for (Index e = 0; e < lds_; e += LANES)
        store(out + t * lds_ + e, load(out + t * lds_ + e) + load(centre_ + e) * sums[t]);
    }
  }

  // pairs of features; sums += φᵀz
  const Halves* weave_slice(Index tokens, Index count, const float* z, float* sums) {
    Halves* to = first_.reserve(SLICE / 2 * ld_);
    for (Index i = 0; i < count; i += 2) {
      const bool is_pair = i + 1 < count;
      const Source one = sources_[i], two = sources_[is_pair ? i + 1 : i];
      const float z_one = z[i], z_two = is_pair ? z[i + 1] : 0.0f;
      for (Index t = 0; t < tokens; t += LANES) {
        const Vector low = one.at(t), high = is_pair ? two.at(t) : Vector{};
        store_woven(to + i / 2 * ld_ + t, low, high);
        store(sums + t, load(sums + t) + low * z_one + high * z_two);
      }
    }
    return to;
  }

  void write_half(const float* f, Index ld, Index tokens, const float* values,
                  const float* weights, float* s, float* z) {
    const Halves* second = second_.weave(tokens, width_, values, lds_);
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      find_sources(f, ld, m, count);
      product_as<true, Into::add>(count, width_, pairs(tokens),
                                  narrow_slice(tokens, count, weights, z + m), ld_ / 2, second,
                                  lds_, s + m * lds_, lds_);
    }
  }

  // pairs of tokens; z += φ weights, for φ rounded, so that z fits S
  const Halves* narrow_slice(Index tokens, Index count, const float* weights, float* z) {
    Halves* to = first_.reserve(SLICE / 2 * ld_);
    for (Index i = 0; i < count; ++i) {
      const Source source = sources_[i];
      Vector total{};
      for (Index t = 0; t < tokens; t += LANES) {
        const Vector phi = source.at(t);
        store_narrow(to + (i * ld_ + t) / 2, phi);
        total += rounded(phi) * load(weights + t);
      }
      z[i] += sum(total);
    }
    return to;
  }

  // What S and z give nearly cancels where all values are alike, which S rounded would not survive.
  // So z μᵀ is taken from S first, for the μ that leaves least of it, and added by way of z.
  void find_centre(const float* s, const float* z) {
    product_of_transposed<Into::store>(1, width_, map_.features, z, 1, s, lds_, centre_, lds_);
    float squares = 0;
    for (Index m = 0; m < map_.features; ++m) squares += z[m] * z[m];
    // without a quotient to be had, there is no centre
    const bool has_centre = squares > 1e-30f && squares < 1e30f;
    for (Index e = 0; e < lds_; e += LANES)
      store(centre_ + e, has_centre ? load(centre_ + e) / squares : Vector{});
  }

  Vector centred(const float* s, float z, Index e) const {
    return load(s + e) - load(centre_ + e) * z;
  }

  // pairs of features of S − z μᵀ
  const Halves* weave_centred(Index count, const float* s, const float* z) {
    Halves* to = second_.reserve(SLICE / 2 * lds_);
    for (Index i = 0; i < count; i += 2)
      for (Index e = 0; e < lds_; e += LANES)
        store_woven(to + i / 2 * lds_ + e, centred(s + i * lds_, z[i], e),
                    i + 1 < count ? centred(s + (i + 1) * lds_, z[i + 1], e) : Vector{});
    return to;
  }

  // the same for S x and z w
  void pull_half(const float* f, Index ld, Index tokens, const float* s, const float* z,
                 const float* x, Index ldx, const float* weights, float* d_f) {
    find_centre(s, z);
    std::copy_n(weights, padded(tokens), static_cast<float*>(weights_));
    product<Into::add>(1, tokens, width_, centre_, lds_, x, ldx, weights_, ld_);
    const Halves* second = second_.weave(width_, tokens, x, ldx);
    for (Index m = 0; m < map_.features; m += SLICE) {
      const Index count = std::min(SLICE, map_.features - m);
      product_as<true, Into::store>(count, tokens, pairs(width_),
                                    narrow_centred(count, s + m * lds_, z + m), lds_ / 2,
                                    second, padded(tokens), slice_, ld_);
      find_sources(f, ld, m, count, d_f);
      pull_slice(tokens, count, slice_, z + m, weights_);
    }
  }

  // pairs of values of S − z μᵀ
  const Halves* narrow_centred(Index count, const float* s, const float* z) {
    Halves* to = first_.reserve(SLICE / 2 * lds_);
    for (Index i = 0; i < count; ++i)
      for (Index e = 0; e < lds_; e += LANES)
        store_narrow(to + (i * lds_ + e) / 2, centred(s + i * lds_, z[i], e));
    return to;
  }

  // from dφ + z w, or dφ without z, to the gradients of what the sources are made of
  void pull_slice(Index tokens, Index count, const float* d_phi, const float* z,
                  const float* weights) {
    for (Index start = 0, end; start < count; start = end) {
      // features with the same first column
      const Source& one = sources_[start];
      for (end = start + 1; end < count && sources_[end].d_first == one.d_first;) ++end;
      for (Index t = 0; t < tokens; t += LANES) {
        const Vector first = load(one.first + t), weight = z ? load(weights + t) : Vector{};
        Vector d_first{};
        for (Index i = start; i < end; ++i) {
          const Source& source = sources_[i];
          Vector d = load(d_phi + i * ld_ + t);
          if (z) d += weight * z[i];
          if (!source.second) {
            d_first += d;
            continue;
          }
          d *= source.factor;
          d_first += d * load(source.second + t);
          if (source.second == source.first)
            d_first += d * first;
          else
            store(source.d_second + t, load(source.d_second + t) + d * first);
        }
        store(one.d_first + t, load(one.d_first + t) + d_first);
      }
    }
  }

  const Map& map_;
  const Index width_, lds_, ld_;
  Source sources_[SLICE];
  Buffer slice_, left_, d_left_, centre_, weights_;
  const bool is_half_;
  HalfMatrix first_, second_;
};

}  // namespace slay
