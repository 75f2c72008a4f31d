// The walk over one head's stretch of tokens, forward and backward, chunk by chunk.
#pragma once

#include "tokens.h"

namespace slay {

// gradients of the near kernel's numbers
struct Scalars {
  double d_epsilon, d_near_scale;
};

class Stretch : public Tokens {
 public:
  Stretch(const Problem& problem, const Map& map, bool is_backward)
      : Tokens(problem, map, is_backward),
        has_state_(problem.has_past || problem.has_future || problem.chunk < problem.length),
        expansion_(map, problem.value_width, has_state_ ? problem.chunk : 0, problem.is_bf16) {
    if (!has_state_) return;
    state_ = take(map.features * lds_);
    state_ones_ = take(map.features);
    if (!is_backward) return;
    sums_by_query_ = take(problem.value_width * ldq_);
    d_columns_ = take(map.columns * ldk_);
  }

  bool has_state() const { return has_state_; }

  // set the state from [feature][value_width + 1], or clear it
  void set_state(const float* from) {
    const Index width = problem_.value_width;
    for (Index m = 0; m < map_.features; ++m) {
      float* row = state_ + m * lds_;
      std::fill_n(row, lds_, 0.0f);
      if (from) std::copy_n(from + m * (width + 1), width, row);
      state_ones_[m] = from ? from[m * (width + 1) + width] : 0.0f;
    }
  }

  void get_state(float* to) const {
    const Index width = problem_.value_width;
    for (Index m = 0; m < map_.features; ++m) {
      std::copy_n(state_ + m * lds_, width, to + m * (width + 1));
      to[m * (width + 1) + width] = state_ones_[m];
    }
  }

  // let the keys of chunks first … last − 1 enter the state; return whether the old state is kept
  bool collect_keys(Index first, Index last) {
    bool keeps = true;
    for (Index i = first; i < last; ++i) {
      const Chunk chunk = cut(i);
      keeps = keeps && chunk.keeps;
      load_values(chunk, chunk.count);
      load_key_columns(chunk, chunk.count);
      enter(chunk);
    }
    return keeps;
  }

  // outputs of chunks first … last − 1; the state walks along
  void forward(Index first, Index last) {
    Pairs pairs(problem_, map_, b_, h_);
    for (Index i = first; i < last; ++i) {
      const Chunk chunk = cut(i);
      load_keys(chunk);
      project_queries(chunk);
      std::fill_n(sums_, chunk.count * lds_, 0.0f);
      std::fill_n(normaliser_, ldq_, 0.0f);
      for (Index start = 0; start < chunk.count;) {
        const Queries queries = panel(chunk, start);
        pairs.forward(queries, keys_);
        start += queries.count;
      }
      if (chunk.has_past && chunk.reads > 0) {
        load_query_columns(chunk);
        expansion_.read(query_f_, ldq_, chunk.reads, state_, state_ones_, sums_, normaliser_);
      }
      put_output(chunk);
      if (chunk.has_future) enter(chunk);
    }
  }

  // gradients of queries and, of what happens inside chunks, of keys and values; the state walks
  // along
  Scalars backward_inside(Index first, Index last) {
    Pairs pairs(problem_, map_, b_, h_);
    Index touched = first * problem_.chunk;
    for (Index i = first; i < last; ++i) {
      const Chunk chunk = cut(i);
      load_keys(chunk);
      load_key_rows(chunk);
      project_queries(chunk);
      load_d_sums(chunk, false);
      std::fill_n(keys_.d_f, map_.columns * ldk_, 0.0f);
      std::fill_n(keys_.d_near, problem_.near_width * ldk_, 0.0f);
      std::fill_n(keys_.d_values, keys_.count * lds_, 0.0f);
      for (Index start = 0; start < chunk.count;) {
        const Queries queries = panel(chunk, start);
        std::fill_n(d_rows_, PANEL * map_.padded_columns, 0.0f);
        std::fill_n(d_near_, PANEL * ldn_, 0.0f);
        pairs.backward(queries, keys_);
        put_d_queries(queries);
        start += queries.count;
      }
      if (chunk.has_past && chunk.reads > 0) pull_queries(chunk);
      put_d_keys(chunk, touched);
      if (query_projector_) {
        query_projector_->backward(chunk.start, chunk.count, d_query_rows_, 0);
        const Index missing = absent(chunk, keys_.count);
        key_projector_->backward(key_row(chunk, missing), keys_.count - missing,
                                 d_key_rows_ + missing * ld_rows_, touched - problem_.absent);
      }
      touched = chunk.start + keys_.count;
      if (i + 1 < last) enter(chunk);
    }
    return {pairs.d_epsilon(), pairs.d_scale()};
  }

  // let the queries of chunks last − 1 … first put their gradients into the state's; return
  // whether the old gradient is kept
  bool collect_queries(Index first, Index last) {
    bool keeps = true;
    for (Index i = last - 1; i >= first; --i) {
      const Chunk chunk = cut(i);
      keeps = keeps && chunk.keeps;
      load_d_sums(chunk, expansion_.is_half());
      leave(chunk);
    }
    return keeps;
  }

  // gradients that come to keys and values through the state, whose gradient walks along
  void backward_through_state(Index first, Index last) {
    for (Index i = last - 1; i >= first; --i) {
      const Chunk chunk = cut(i);
      if (chunk.has_future && first_to_enter(chunk) < chunk.count) {
        load_values(chunk, chunk.count);
        load_key_columns(chunk, chunk.count);
        pull_keys(chunk);
      }
      if (!chunk.has_past) continue;
      load_d_sums(chunk, expansion_.is_half());
      leave(chunk);
    }
  }

 private:
  // the keys that leave the lag enter the state
  void enter(const Chunk& chunk) {
    if (!chunk.keeps) set_state(nullptr);
    if (chunk.enters < chunk.count)
      expansion_.write(keys_.f + chunk.enters, ldk_, chunk.count - chunk.enters,
                       keys_.values + chunk.enters * lds_, entering_ + chunk.enters, state_,
                       state_ones_);
  }

  // the same backward in time: the queries' gradients enter the state's
  void leave(const Chunk& chunk) {
    if (!chunk.keeps) set_state(nullptr);
    if (chunk.reads == 0) return;
    project_queries(chunk);
    load_query_columns(chunk);
    std::fill(normaliser_ + chunk.reads, normaliser_ + ldq_, 0.0f);
    expansion_.write(query_f_, ldq_, chunk.reads, sums_, normaliser_, state_, state_ones_);
  }

  void pull_queries(const Chunk& chunk) {
    load_query_columns(chunk);
    if (expansion_.is_half()) load_d_sums(chunk, true);
    transpose(chunk.count, problem_.value_width, sums_, lds_, sums_by_query_, ldq_);
    expansion_.pull(query_f_, ldq_, chunk.reads, state_, state_ones_, sums_by_query_, ldq_,
                    normaliser_, d_columns_);
    each_part([&](const Part& part, Index column) {
      transpose<true>(part.width, chunk.reads, d_columns_ + column * ldq_, ldq_,
                      part.d_query.at<float>(b_, h_, chunk.start), part.d_query.token);
    });
  }

  Index first_to_enter(const Chunk& chunk) const {
    return std::max(chunk.enters, absent(chunk, chunk.count));
  }

  void pull_keys(const Chunk& chunk) {
    const Index from = first_to_enter(chunk), count = chunk.count - from;
    transpose(chunk.count, problem_.value_width, keys_.values, lds_, keys_.values_by_key, ldk_);
    expansion_.pull(keys_.f + from, ldk_, count, state_, state_ones_, keys_.values_by_key + from,
                    ldk_, entering_ + from, d_columns_);
    if (key_projector_) std::fill_n(d_key_rows_, chunk.count * ld_rows_, 0.0f);
    each_part([&](const Part& part, Index column) {
      transpose<true>(part.width, count, d_columns_ + column * ldk_, ldk_,
                      part.d_key.at<float>(b_, h_, chunk.start + from), part.d_key.token);
    });
    if (key_projector_)
      key_projector_->backward(key_row(chunk, from), count, d_key_rows_ + from * ld_rows_,
                               key_row(chunk, chunk.count));
    std::fill_n(keys_.d_values, count * lds_, 0.0f);
    expansion_.read(keys_.f + from, ldk_, count, state_, state_ones_, keys_.d_values, nullptr);
    for (Index s = 0; s < count; ++s) {
      float* to = problem_.d_value.at<float>(b_, h_, key_row(chunk, from + s));
      const float* d = keys_.d_values + s * lds_;
      const float is_real = keys_.real[from + s];
      for (Index e = 0; e < problem_.value_width; ++e) to[e] += d[e] * is_real;
    }
  }

  const bool has_state_;
  Expansion expansion_;
  float *state_ = nullptr, *state_ones_ = nullptr;
  float *sums_by_query_ = nullptr, *d_columns_ = nullptr;
};

}  // namespace slay
