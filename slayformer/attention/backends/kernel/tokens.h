// One head's tensors, a chunk at a time: keys, values and queries come in, gradients go out.
#pragma once

#include "pairs.h"
#include "projection.h"

namespace slay {

// A chunk of queries start … start + count − 1; its keys are start … start + count + lag − 1.
struct Chunk {
  Index start, count;
  bool has_past, has_future;
  // queries that see the state before the chunk are the first `reads`; keys that belong in the
  // state after it are those from `enters` up to count; `keeps`: the old state belongs there too
  Index reads, enters;
  bool keeps;
};

class Tokens {
 public:
  void choose(Index b, Index h) {
    b_ = b, h_ = h;
    if (!query_projector_) return;
    query_projector_->choose(b, h);
    key_projector_->choose(b, h);
  }

  // put the gradients of the projections' parameters into place `slot`
  void finish(Index slot) const {
    if (!query_projector_) return;
    query_projector_->finish(slot);
    key_projector_->finish(slot);
  }

  Index chunks() const { return (problem_.length + problem_.chunk - 1) / problem_.chunk; }

 protected:
  Tokens(const Problem& problem, const Map& map, bool is_backward)
      : problem_(problem),
        map_(map),
        lds_(padded(problem.value_width)),
        most_keys_(problem.chunk + problem.lag),
        ldk_(padded(most_keys_) + LANES),
        ldq_(padded(problem.chunk)),
        ldn_(padded(problem.near_width)) {
    keys_.ld = ldk_;
    keys_.f = take(map.columns * ldk_);
    keys_.near = take(problem.near_width * ldk_);
    keys_.values = take(most_keys_ * lds_);
    keys_.real = take(ldk_);
    entering_ = take(ldk_);
    query_f_ = take(map.columns * ldq_);
    sums_ = take(problem.chunk * lds_);
    normaliser_ = take(ldq_);
    places_ = std::vector<int32_t>(problem.chunk + most_keys_);
    if (problem.query_projection) make_projectors(is_backward);
    if (!is_backward) return;
    keys_.values_by_key = take(problem.value_width * ldk_);
    keys_.rows = take(most_keys_ * map.padded_columns);
    keys_.near_rows = take(most_keys_ * ldn_);
    keys_.d_f = take(map.columns * ldk_);
    keys_.d_near = take(problem.near_width * ldk_);
    keys_.d_values = take(most_keys_ * lds_);
    d_rows_ = take(PANEL * map.padded_columns);
    d_near_ = take(PANEL * ldn_);
    row_ = take(lds_);
    std::fill_n(row_, lds_, 0.0f);
  }

  float* take(Index count) {
    buffers_.emplace_back(count);
    return buffers_.back();
  }

  Chunk cut(Index i) const {
    Chunk chunk{};
    chunk.start = i * problem_.chunk;
    chunk.count = std::min(problem_.chunk, problem_.length - chunk.start);
    chunk.has_past = problem_.has_past || chunk.start > 0;
    chunk.has_future = problem_.has_future || chunk.start + chunk.count < problem_.length;
    chunk.reads = chunk.count;
    chunk.keeps = true;
    if (!problem_.query_documents) return chunk;
    const Index* queries = problem_.query_documents + b_ * problem_.length + chunk.start;
    const Index* keys = problem_.key_documents + b_ * all_keys() + chunk.start;
    // the state holds one document: that of the last key which has entered it
    const Index before = chunk.start > 0 ? keys[-1] : problem_.first_document[b_];
    const Index after = keys[chunk.count - 1];
    chunk.keeps = before == after;
    chunk.reads = 0;
    while (chunk.reads < chunk.count && queries[chunk.reads] == before) ++chunk.reads;
    chunk.enters = chunk.count;
    while (chunk.enters > 0 && keys[chunk.enters - 1] == after) --chunk.enters;
    return chunk;
  }

  Index all_keys() const { return problem_.length + problem_.lag; }

  // how many of the first `count` keys of a chunk are absent
  Index absent(const Chunk& chunk, Index count) const {
    return std::min(std::max<Index>(0, problem_.absent - chunk.start), count);
  }

  // the row of key `s` of a chunk that is not absent
  Index key_row(const Chunk& chunk, Index s) const { return chunk.start + s - problem_.absent; }

  template <class T>
  void load_values_as(const Chunk& chunk, Index count) {
    const uint8_t* mask = nullptr;
    if (problem_.key_mask) mask = problem_.key_mask + b_ * all_keys() + chunk.start;
    const Index missing = absent(chunk, count);
    for (Index s = 0; s < count; ++s) {
      const T* __restrict from = problem_.value.at<T>(b_, h_, std::max<Index>(0, key_row(chunk, s)));
      prefetch(from + ROWS_AHEAD * problem_.value.token, problem_.value_width);
      float* __restrict to = keys_.values + s * lds_;
      const bool is_real = s >= missing && (!mask || mask[s]);
      for (Index e = 0; is_real && e < problem_.value_width; ++e) to[e] = to_float(from[e]);
      if (!is_real) std::fill_n(to, problem_.value_width, 0.0f);
      for (Index e = problem_.value_width; e < lds_; ++e) to[e] = 0.0f;
      keys_.real[s] = is_real ? 1.0f : 0.0f;
    }
    std::fill(keys_.real + count, keys_.real + ldk_, 0.0f);
    std::copy_n(keys_.real, chunk.count, entering_);
    std::fill(entering_ + chunk.count, entering_ + ldk_, 0.0f);
  }

  void load_values(const Chunk& chunk, Index count) {
    if (problem_.is_bf16)
      load_values_as<uint16_t>(chunk, count);
    else
      load_values_as<float>(chunk, count);
  }

  static void clear_columns(float* columns, Index rows, Index ld, Index from) {
    for (Index i = 0; i < rows; ++i) std::fill(columns + i * ld + from, columns + (i + 1) * ld, 0.0f);
  }

  // call `body(term, rows of its part)` for all columns of the factors
  template <class Body>
  void each_part(Body body) const {
    Index column = 0;
    for (Index p = 0; p < problem_.parts; ++p) {
      body(problem_.part[p], column);
      column += problem_.part[p].width;
    }
  }

  void load_key_columns(const Chunk& chunk, Index count) {
    if (key_projector_) {
      const Index missing = absent(chunk, count);
      std::fill_n(key_rows_, missing * ld_rows_, 0.0f);
      key_projector_->forward(key_row(chunk, missing), count - missing,
                              key_rows_ + missing * ld_rows_);
      point(chunk.start, key_rows_, &Part::key, &problem_.near_key);
      if (d_key_rows_) point(chunk.start, d_key_rows_, &Part::d_key, &problem_.d_near_key);
    }
    each_part([&](const Part& part, Index column) {
      transpose(count, part.width, part.key.at<float>(b_, h_, chunk.start), part.key.token,
                keys_.f + column * ldk_, ldk_);
    });
    clear_columns(keys_.f, map_.columns, ldk_, count);
  }

  void project_queries(const Chunk& chunk) {
    if (!query_projector_) return;
    query_projector_->forward(chunk.start, chunk.count, query_rows_);
    point(chunk.start, query_rows_, &Part::query, &problem_.near_query);
    if (d_query_rows_) point(chunk.start, d_query_rows_, &Part::d_query, &problem_.d_near_query);
  }

  // let the rows of every part, and of the near vectors, be those in `rows`, which start at token
  // `first`
  void point(Index first, float* rows, Rows Part::* of_part, Rows* of_near) {
    float* at = rows - first * ld_rows_;
    for (Index p = 0; p < problem_.parts; ++p) {
      problem_.part[p].*of_part = Rows{at, 0, 0, ld_rows_};
      at += problem_.part[p].width;
    }
    *of_near = Rows{at, 0, 0, ld_rows_};
  }

  void make_projectors(bool is_backward) {
    const Behind near = problem_.near_kind == YAT           ? Behind::UNIT
                        : problem_.near_kind == EXPONENTIAL ? Behind::VECTOR
                                                            : Behind::NOTHING;
    ld_rows_ = padded(problem_.query_projection->outputs + (near == Behind::NOTHING ? 0 : ldn_));
    auto make = [&](const Projection* projection, Index most) {
      return std::make_unique<Projector>(*projection, near, ld_rows_, most, is_backward);
    };
    query_projector_ = make(problem_.query_projection, problem_.chunk);
    key_projector_ = make(problem_.key_projection, most_keys_);
    query_rows_ = take(problem_.chunk * ld_rows_ + LANES);
    key_rows_ = take(most_keys_ * ld_rows_ + LANES);
    if (!is_backward) return;
    // columns between the rows stay 0
    auto take_zeros = [&](Index count) {
      float* at = take(count);
      std::fill_n(at, count, 0.0f);
      return at;
    };
    d_query_rows_ = take_zeros(problem_.chunk * ld_rows_ + LANES);
    d_key_rows_ = take_zeros(most_keys_ * ld_rows_ + LANES);
  }

  void load_query_columns(const Chunk& chunk) {
    each_part([&](const Part& part, Index column) {
      transpose(chunk.reads, part.width, part.query.at<float>(b_, h_, chunk.start),
                part.query.token, query_f_ + column * ldq_, ldq_);
    });
    clear_columns(query_f_, map_.columns, ldq_, chunk.reads);
  }

  void load_keys(const Chunk& chunk) {
    keys_.count = chunk.count + problem_.lag;
    load_values(chunk, keys_.count);
    load_key_columns(chunk, keys_.count);
    if (problem_.key_documents)
      keys_.documents = problem_.key_documents + b_ * all_keys() + chunk.start;
    else
      keys_.documents = nullptr;
    if (problem_.near_kind == NO_KERNEL) return;
    const Rows& near = problem_.near_key;
    transpose(keys_.count, problem_.near_width, near.at<float>(b_, h_, chunk.start), near.token,
              keys_.near, ldk_);
    clear_columns(keys_.near, problem_.near_width, ldk_, keys_.count);
    const Index divisor = problem_.near_rule == SAME_STRETCH ? problem_.near_size : 1;
    auto place = [&](const Index* positions, Index count, int32_t* to) {
      for (Index i = 0; i < count; ++i) to[i] = static_cast<int32_t>(positions[i] / divisor);
    };
    place(problem_.query_positions + b_ * problem_.length + chunk.start, chunk.count,
          places_.data());
    place(problem_.key_positions + b_ * all_keys() + chunk.start, keys_.count,
          places_.data() + problem_.chunk);
    keys_.places = places_.data() + problem_.chunk;
  }

  // what only the backward pass reads of the keys
  void load_key_rows(const Chunk& chunk) {
    transpose(keys_.count, problem_.value_width, keys_.values, lds_, keys_.values_by_key, ldk_);
    clear_columns(keys_.values_by_key, problem_.value_width, ldk_, keys_.count);
    auto copy = [&](const Term& term) {
      const Rows& key = problem_.part[term.part].key;
      copy_rows(key.at<float>(b_, h_, chunk.start) + term.offset, key.token, term.width,
                keys_.rows + term.padded_column, map_.padded_columns);
    };
    for (const Term& term : map_.terms) copy(term);
    if (map_.factor.width > 0) copy(map_.factor);
    if (problem_.near_kind != NO_KERNEL)
      copy_rows(problem_.near_key.at<float>(b_, h_, chunk.start), problem_.near_key.token,
                problem_.near_width, keys_.near_rows, ldn_);
  }

  void copy_rows(const float* from, Index ld_from, Index width, float* to, Index ld_to) const {
    for (Index s = 0; s < keys_.count; ++s) {
      std::copy_n(from + s * ld_from, width, to + s * ld_to);
      std::fill(to + s * ld_to + width, to + s * ld_to + padded(width), 0.0f);
    }
  }

  Queries panel(const Chunk& chunk, Index start) const {
    Queries queries;
    // what a panel sees fills whole vectors, a short lag counted
    const Index most = start == 0 && problem_.lag < PANEL ? PANEL - problem_.lag : PANEL;
    queries.count = std::min(most, chunk.count - start);
    queries.first = chunk.start + start;
    queries.sees = start + problem_.lag + (problem_.strict ? 0 : 1);
    queries.places = places_.data() + start;
    queries.documents = nullptr;
    if (problem_.query_documents)
      queries.documents = problem_.query_documents + b_ * problem_.length + queries.first;
    queries.sums = sums_ + start * lds_;
    queries.normaliser = normaliser_ + start;
    queries.d_sums = queries.sums;
    queries.d_normaliser = queries.normaliser;
    queries.d_rows = d_rows_;
    queries.d_near = d_near_;
    return queries;
  }

  float offset() const { return problem_.is_quotient ? problem_.offset[h_] : 0.0f; }

  void put_output(const Chunk& chunk) const {
    for (Index t = 0; t < chunk.count; ++t) {
      const float factor = problem_.is_quotient ? 1.0f / (normaliser_[t] + offset()) : 1.0f;
      const float* __restrict from = sums_ + t * lds_;
      float* __restrict to = problem_.output.at<float>(b_, h_, chunk.start + t);
      prefetch<true>(to + ROWS_AHEAD * problem_.output.token, problem_.value_width);
      for (Index e = 0; e < problem_.value_width; ++e) to[e] = from[e] * factor;
      *problem_.normaliser.at<float>(b_, h_, chunk.start + t) = normaliser_[t];
    }
  }

  // gradients of the sums and of the normaliser into the places of both; `is_rounded`: those of the
  // sums as products with the state will round them, so that the normaliser's fit
  void load_d_sums(const Chunk& chunk, bool is_rounded) {
    const Index width = problem_.value_width;
    for (Index t = 0; t < chunk.count; ++t) {
      const Index at = chunk.start + t;
      float* to = sums_ + t * lds_;
      const float* d = problem_.d_output.at<float>(b_, h_, at);
      prefetch(d + ROWS_AHEAD * problem_.d_output.token, width);
      std::copy_n(d, width, to);
      std::fill(to + width, to + lds_, 0.0f);
      if (problem_.is_quotient) {
        const float* y = problem_.output.at<float>(b_, h_, at);
        prefetch(y + ROWS_AHEAD * problem_.output.token, width);
        std::copy_n(y, width, row_);
        const float inverse = 1.0f / (*problem_.normaliser.at<float>(b_, h_, at) + offset());
        Vector weighted{};
        for (Index e = 0; e < lds_; e += LANES) {
          Vector x = load(to + e) * inverse;
          if (is_rounded) x = rounded(x);
          weighted += x * load(row_ + e);
          store(to + e, x);
        }
        normaliser_[t] = -sum(weighted);
      } else {
        normaliser_[t] = *problem_.d_normaliser.at<float>(b_, h_, at);
      }
    }
    std::fill(normaliser_ + chunk.count, normaliser_ + ldq_, 0.0f);
  }

  void put_d_queries(const Queries& queries) const {
    auto put = [&](const Rows& to, Index offset, Index width, const float* from, Index ld) {
      for (Index t = 0; t < queries.count; ++t)
        std::copy_n(from + t * ld, width, to.at<float>(b_, h_, queries.first + t) + offset);
    };
    auto put_term = [&](const Term& term) {
      put(problem_.part[term.part].d_query, term.offset, term.width, d_rows_ + term.padded_column,
          map_.padded_columns);
    };
    for (const Term& term : map_.terms) put_term(term);
    if (map_.factor.width > 0) put_term(map_.factor);
    if (problem_.near_kind != NO_KERNEL)
      put(problem_.d_near_query, 0, problem_.near_width, d_near_, ldn_);
  }

  // keys below `touched` have been written by the chunk before
  void put_d_keys(const Chunk& chunk, Index touched) const {
    const Index old = std::max<Index>(0, std::min(touched - chunk.start, keys_.count));
    auto put = [&](const Rows& to, Index width, const float* columns) {
      float* at = to.at<float>(b_, h_, chunk.start);
      // a projector adds up by itself
      const Index added = key_projector_ ? 0 : old;
      transpose<true>(width, added, columns, ldk_, at, to.token);
      transpose(width, keys_.count - added, columns + added, ldk_, at + added * to.token, to.token);
    };
    each_part([&](const Part& part, Index column) {
      put(part.d_key, part.width, keys_.d_f + column * ldk_);
    });
    if (problem_.near_kind != NO_KERNEL)
      put(problem_.d_near_key, problem_.near_width, keys_.d_near);
    for (Index s = absent(chunk, keys_.count); s < keys_.count; ++s) {
      float* to = problem_.d_value.at<float>(b_, h_, key_row(chunk, s));
      prefetch<true>(to + ROWS_AHEAD * problem_.d_value.token, problem_.value_width);
      const float* d = keys_.d_values + s * lds_;
      for (Index e = 0; e < problem_.value_width; ++e) {
        const float x = d[e] * keys_.real[s];
        to[e] = s < old ? to[e] + x : x;
      }
    }
  }

  // with projections its parts point at the rows of the chunk
  Problem problem_;
  const Map& map_;
  const Index lds_, most_keys_, ldk_, ldq_, ldn_;
  std::vector<Buffer> buffers_;
  std::vector<int32_t> places_;
  Keys keys_{};
  std::unique_ptr<Projector> query_projector_, key_projector_;
  Index b_ = 0, h_ = 0, ld_rows_ = 0;
  float *query_rows_ = nullptr, *key_rows_ = nullptr;
  float *d_query_rows_ = nullptr, *d_key_rows_ = nullptr;
  float *entering_ = nullptr, *query_f_ = nullptr, *sums_ = nullptr, *normaliser_ = nullptr;
  float *d_rows_ = nullptr, *d_near_ = nullptr, *row_ = nullptr;
};

}  // namespace slay
