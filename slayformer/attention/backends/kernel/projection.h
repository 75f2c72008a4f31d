// Factors from vectors: normalise, one product for all columns, activations; and the way back.
#pragma once

#include "problem.h"
#include "product.h"

namespace slay {

// What stands behind the activations in a row of factors: nothing, û, or x.
enum class Behind { NOTHING, UNIT, VECTOR };

// A row of factors holds the activations and what is wanted behind them; rows lie `ld` apart.
class Projector {
 public:
  Projector(const Projection& projection, Behind behind, Index ld, Index most_tokens,
            bool is_backward)
      : p_(projection),
        behind_(behind),
        ld_(ld),
        ldu_(padded(projection.width)),
        ldz_(padded(projection.columns)),
        kept_tokens_(is_backward ? most_tokens : TOKENS),
        unit_(kept_tokens_ * ldu_),
        inverse_(kept_tokens_),
        product_(kept_tokens_ * ldz_ + LANES),
        weight_(projection.width * ldz_),
        bias_(ldz_) {
    // vectors reach behind rows; what they find there counts for nothing, but must be a number
    std::fill_n(static_cast<float*>(product_), kept_tokens_ * ldz_ + LANES, 0.0f);
    if (!is_backward) return;
    d_product_ = Buffer(TOKENS * ldz_ + LANES);
    d_gates_ = Buffer(projection.columns);
    d_unit_ = Buffer(TOKENS * ldu_);
    weight_by_column_ = Buffer(projection.columns * ldu_);
    d_weight_ = Buffer(projection.width * ldz_);
    d_bias_ = Buffer(ldz_);
  }

  // take the parameters of a head
  void choose(Index b, Index h) {
    b_ = b, h_ = h;
    const float* weight = p_.weight + h * p_.width * p_.columns;
    for (Index i = 0; i < p_.width; ++i) {
      std::copy_n(weight + i * p_.columns, p_.columns, weight_ + i * ldz_);
      std::fill(weight_ + i * ldz_ + p_.columns, weight_ + (i + 1) * ldz_, 0.0f);
    }
    std::copy_n(p_.bias + h * p_.columns, p_.columns, static_cast<float*>(bias_));
    std::fill(bias_ + p_.columns, bias_ + ldz_, 0.0f);
    if (!d_weight_) return;
    transpose(p_.width, p_.columns, weight_, ldz_, weight_by_column_, ldu_);
    for (Index i = 0; i < p_.columns; ++i)
      std::fill(weight_by_column_ + i * ldu_ + p_.width, weight_by_column_ + (i + 1) * ldu_, 0.0f);
    std::fill_n(static_cast<float*>(d_weight_), p_.width * ldz_, 0.0f);
    std::fill_n(static_cast<float*>(d_bias_), ldz_, 0.0f);
  }

  // factors of tokens first … first + count − 1; LANES more floats behind the rows are written
  void forward(Index first, Index count, float* rows) {
    first_ = first;
    for (Index done = 0; done < count; done += TOKENS) {
      const Index some = std::min(TOKENS, count - done);
      // the backward pass comes back to all of them
      const Index place = kept_tokens_ > TOKENS ? done : 0;
      multiply(first + done, some, place);
      for (Index i = 0; i < some; ++i) {
        float* row = rows + (done + i) * ld_;
        activate(product_ + (place + i) * ldz_, row);
        put_behind(first + done + i, unit_ + (place + i) * ldu_, row + p_.outputs);
      }
    }
  }

  // from gradients of the rows of tokens that `forward` has just been through: the gradient of x,
  // written, or from token `written` down added; those of the parameters add up
  void backward(Index first, Index count, const float* d_rows, Index written) {
    for (Index done = 0; done < count; done += TOKENS) {
      const Index some = std::min(TOKENS, count - done), place = first + done - first_;
      const float *d_row = d_rows + done * ld_, *z = product_ + place * ldz_;
      for (Index i = 0; i < some; ++i) {
        float* d = d_product_ + i * ldz_;
        deactivate(z + i * ldz_, d_row + i * ld_, d);
        std::fill(d + p_.columns, d + ldz_, 0.0f);
        if (p_.d_weight) add_d_bias(d);
      }
      if (p_.d_weight)
        product_of_transposed<Into::add>(p_.width, p_.columns, some, unit_ + place * ldu_, ldu_,
                                         d_product_, ldz_, d_weight_, ldz_);
      product<Into::store>(some, p_.width, p_.columns, d_product_, ldz_, weight_by_column_, ldu_,
                           d_unit_, ldu_);
      for (Index i = 0; i < some; ++i) {
        const Index t = first + done + i;
        put_d_x(t, i, place + i, d_row + i * ld_ + p_.outputs, t < written);
      }
    }
  }

  // put the parameters' gradients, if they are wanted, into place `slot`
  void finish(Index slot) const {
    if (!p_.d_weight) return;
    float *d_weight = p_.d_weight + slot * p_.width * p_.columns,
          *d_bias = p_.d_bias + slot * p_.columns;
    for (Index i = 0; i < p_.width; ++i)
      std::copy_n(d_weight_ + i * ldz_, p_.columns, d_weight + i * p_.columns);
    std::copy_n(static_cast<float*>(d_bias_), p_.columns, d_bias);
  }

 private:
  static constexpr Index TOKENS = 32;

  static Index gates(const Columns& part) {
    return part.activation == GATED ? part.width / part.block : 0;
  }

  template <class T>
  void normalise(Index t, Index count, Index place) {
    const float floor = static_cast<float>(p_.floor);
    for (Index i = 0; i < count; ++i) {
      const T* __restrict x = p_.x.at<T>(b_, h_, t + i);
      prefetch(x + ROWS_AHEAD * p_.x.token, p_.width);
      float* __restrict u = unit_ + (place + i) * ldu_;
      for (Index j = 0; j < p_.width; ++j) u[j] = to_float(x[j]);
      for (Index j = p_.width; j < ldu_; ++j) u[j] = 0.0f;
      Vector squares{};
      for (Index j = 0; j < ldu_; j += LANES) squares += load(u + j) * load(u + j);
      const float inverse = 1.0f / std::sqrt(sum(squares) + floor);
      inverse_[place + i] = inverse;
      for (Index j = 0; j < ldu_; j += LANES) store(u + j, load(u + j) * inverse);
    }
  }

  void multiply(Index t, Index count, Index place) {
    if (p_.is_bf16)
      normalise<uint16_t>(t, count, place);
    else
      normalise<float>(t, count, place);
    float* to = product_ + place * ldz_;
    for (Index i = 0; i < count; ++i)
      for (Index j = 0; j < ldz_; j += LANES) store(to + i * ldz_ + j, load(bias_ + j));
    product<Into::add>(count, p_.columns, p_.width, unit_ + place * ldu_, ldu_, weight_, ldz_, to,
                       ldz_);
  }

  // Vectors reach behind a part's columns; what they leave there is written over by the next part.
  void activate(const float* z, float* to) const {
    for (Index p = 0; p < p_.parts; ++p) {
      const Columns& part = p_.part[p];
      const Index n = part.width, gate_count = gates(part);
      float gate[LANES];
      for (Index g = 0; g < gate_count; ++g) {
        if (g % LANES == 0) store(gate, exponential(load(z + n + g)));
        const Index start = g * part.block;
        for (Index j = start; j < start + part.block; j += LANES)
          store(to + j, load(z + j) * gate[g % LANES]);
      }
      for (Index j = 0; gate_count == 0 && j < n; j += LANES) {
        Vector x = load(z + j);
        if (part.activation == SQUARE) x *= x;
        if (part.activation == EXPONENT) x = exponential(x);
        store(to + j, x);
      }
      z += n + gate_count;
      to += n;
    }
  }

  // the gradient of z from that of the activations
  void deactivate(const float* z, const float* d, float* to) const {
    for (Index p = 0; p < p_.parts; ++p) {
      const Columns& part = p_.part[p];
      const Index n = part.width, gate_count = gates(part);
      float gate[LANES];
      for (Index g = 0; g < gate_count; ++g) {
        if (g % LANES == 0) store(gate, exponential(load(z + n + g)));
        const Index start = g * part.block, end = start + part.block;
        Vector total{};
        for (Index j = start; j < end; j += LANES) {
          const Vector x = load(d + j) * gate[g % LANES];
          total += x * load(z + j) * first_lanes(end - j);
          store(to + j, x);
        }
        d_gates_[g] = sum(total);
      }
      for (Index j = 0; gate_count == 0 && j < n; j += LANES) {
        Vector x = load(d + j);
        if (part.activation == SQUARE) x *= 2.0f * load(z + j);
        if (part.activation == EXPONENT) x *= exponential(load(z + j));
        store(to + j, x);
      }
      // behind the blocks, where no vector of theirs is written any more
      for (Index g = 0; g < gate_count; ++g) to[n + g] = d_gates_[g];
      z += n + gate_count;
      to += n + gate_count;
      d += n;
    }
  }

  // what a token's gradient of z adds to that of the bias
  void add_d_bias(const float* d) {
    for (Index j = 0; j < ldz_; j += LANES) store(d_bias_ + j, load(d_bias_ + j) + load(d + j));
  }

  void put_behind(Index t, const float* unit, float* to) const {
    if (behind_ == Behind::UNIT) {
      for (Index j = 0; j < ldu_; j += LANES) store(to + j, load(unit + j));
    } else if (behind_ == Behind::VECTOR && p_.is_bf16) {
      put_vector(p_.x.at<uint16_t>(b_, h_, t), to);
    } else if (behind_ == Behind::VECTOR) {
      put_vector(p_.x.at<float>(b_, h_, t), to);
    }
  }

  template <class T>
  void put_vector(const T* __restrict x, float* __restrict to) const {
    for (Index j = 0; j < p_.width; ++j) to[j] = to_float(x[j]);
    for (Index j = p_.width; j < ldu_; ++j) to[j] = 0.0f;
  }

  // dx = (dû − û (û·dû))/‖x‖, and what stands behind the activations adds its own
  void put_d_x(Index t, Index i, Index place, const float* d_behind, bool is_added) const {
    float* d = d_unit_ + i * ldu_;
    const float* u = unit_ + place * ldu_;
    Vector products{};
    for (Index j = 0; j < ldu_; j += LANES) {
      // û is 0 behind its columns
      if (behind_ == Behind::UNIT) store(d + j, load(d + j) + load(d_behind + j));
      products += load(d + j) * load(u + j);
    }
    const float along = sum(products), inverse = inverse_[place];
    float* to = p_.d_x.at<float>(b_, h_, t);
    prefetch<true>(to + ROWS_AHEAD * p_.d_x.token, p_.width);
    for (Index j = 0; j < p_.width; ++j) {
      float x = (d[j] - u[j] * along) * inverse;
      if (behind_ == Behind::VECTOR) x += d_behind[j];
      to[j] = is_added ? to[j] + x : x;
    }
  }

  const Projection& p_;
  const Behind behind_;
  const Index ld_, ldu_, ldz_;
  // products kept of the tokens from first_ on
  const Index kept_tokens_;
  Index first_ = 0;
  Index b_ = 0, h_ = 0;
  Buffer unit_, inverse_, product_, weight_, bias_;
  Buffer d_product_, d_gates_, d_unit_, weight_by_column_, d_weight_, d_bias_;
};

}  // namespace slay
