// Scores of queries and keys one by one: a panel of queries meets a block of keys.
#pragma once

#include <algorithm>

#include "expansion.h"

namespace slay {

constexpr Index PANEL = 32, BLOCK = 64;
// e^s is followed up to here; `LARGEST_SCORE` of the torch form
constexpr float LARGEST_SCORE = 40.0f;

// Keys of a chunk, columns of F as in expansion.h; the backward pass also wants rows.
struct Keys {
  Index count = 0, ld = 0;
  // [column][key], [key][padded column]; the same of the near kernel's vectors
  float *f, *rows, *near, *near_rows;
  // [key][value] and [value][key], 0 where masked; 1 where not masked
  float *values, *values_by_key, *real;
  // gradients: [column][key], [near column][key], [key][value]
  float *d_f, *d_near, *d_values;
  // what `near_rule` compares, and documents
  const int32_t* places;
  const Index* documents;
};

// Queries of a panel.
struct Queries {
  Index count = 0, first = 0;
  // how many keys the first query sees; each further one sees one more
  Index sees = 0;
  const int32_t* places;
  const Index* documents;
  // sums of values [query][padded value] and of scores
  float *sums, *normaliser;
  // their gradients
  const float *d_sums, *d_normaliser;
  // gradients: [query][padded column], [query][padded near column]
  float *d_rows, *d_near;
};

class Pairs {
 public:
  Pairs(const Problem& problem, const Map& map, Index b, Index h)
      : problem_(problem), map_(map), b_(b), h_(h) {
    if (problem.near_kind == YAT) c_ = 2.0f + problem.epsilon[h];
    if (problem.near_kind != NO_KERNEL) scale_ = problem.near_scale[h];
    factor_ = static_cast<float>(problem.near_factor);
  }

  // add what `keys` give `queries`
  void forward(const Queries& queries, const Keys& keys) {
    for (Index start = 0; start < last_seen(queries, keys); start += BLOCK) {
      const Index count = cut(queries, keys, start), lds = padded(problem_.value_width);
      if (nearness_ != NEAR) far_scores(queries, keys, start, count, scores_);
      if (nearness_ != FAR) {
        near_products(queries, keys, start);
        each_near(queries.count, [&](Index at) {
          const Vector exact = kernel(load(products_ + at));
          store(scores_ + at, nearness_ == NEAR ? exact : blend(at, exact, load(scores_ + at)));
        });
      }
      for (Index i = 0; i < queries.count; ++i) {
        Vector total{};
        for (Index j = 0; j < padded(count); j += LANES) {
          Vector score = load(scores_ + i * BLOCK + j);
          if (is_masked_) score *= load(visible_ + i * BLOCK + j);
          if (is_masked_) store(scores_ + i * BLOCK + j, score);
          total += score * load(keys.real + start + j);
        }
        queries.normaliser[i] += sum(total);
      }
      product<Into::add>(queries.count, problem_.value_width, count, scores_, BLOCK,
                         keys.values + start * lds, lds, queries.sums, lds);
    }
  }

  // add the gradients of what `keys` gave `queries`
  void backward(const Queries& queries, const Keys& keys) {
    for (Index start = 0; start < last_seen(queries, keys); start += BLOCK) {
      const Index count = cut(queries, keys, start), lds = padded(problem_.value_width);
      product<Into::store>(queries.count, count, problem_.value_width, queries.d_sums, lds,
                           keys.values_by_key + start, keys.ld, d_scores_, BLOCK);
      each(queries.count, count, [&](Index at, Index j) {
        Vector d = load(d_scores_ + at) +
                   load(keys.real + start + j) * queries.d_normaliser[at / BLOCK];
        store(d_scores_ + at, is_masked_ ? d * load(visible_ + at) : d);
      });
      float* near_scores = nearness_ == NEAR ? scores_ : near_scores_;
      if (nearness_ != FAR) near_backward(queries, keys, start, near_scores);
      if (nearness_ != NEAR) far_backward(queries, keys, start, count, scores_);
      if (nearness_ == MIXED) {
        each_near(queries.count, [&](Index at) {
          store(scores_ + at, blend(at, load(near_scores + at), load(scores_ + at)));
        });
      }
      if (is_masked_) {
        each(queries.count, count, [&](Index at, Index) {
          store(scores_ + at, load(scores_ + at) * load(visible_ + at));
        });
      }
      product_of_transposed<Into::add>(count, problem_.value_width, queries.count, scores_, BLOCK,
                                       queries.d_sums, lds, keys.d_values + start * lds, lds);
    }
  }

  double d_epsilon() const { return d_epsilon_; }

  double d_scale() const { return d_scale_ / scale_; }

 private:
  enum Nearness { FAR, NEAR, MIXED };

  template <class Body>
  static void each(Index rows, Index columns, Body body) {
    for (Index i = 0; i < rows; ++i)
      for (Index j = 0; j < padded(columns); j += LANES) body(i * BLOCK + j, j);
  }

  // pairs of the block's columns that hold near pairs
  template <class Body>
  void each_near(Index rows, Body body) const {
    for (Index i = 0; i < rows; ++i)
      for (Index j = near_from_; j < near_to_; j += LANES) body(i * BLOCK + j);
  }

  static Index last_seen(const Queries& queries, const Keys& keys) {
    return std::min(keys.count, queries.sees + queries.count - 1);
  }

  // work out which pairs of the block at `start` are near and which are visible; return its keys
  Index cut(const Queries& queries, const Keys& keys, Index start) {
    const Index count = std::min(BLOCK, last_seen(queries, keys) - start);
    nearness_ = problem_.near_kind == NO_KERNEL ? FAR : NEAR;
    near_from_ = 0, near_to_ = count;
    if (nearness_ == NEAR && problem_.near_rule != EVERY_PAIR) find_near(queries, keys, start, count);
    bool is_of_one_document = true;
    if (keys.documents) {
      const Index document = queries.documents[0];
      for (Index i = 0; i < queries.count; ++i)
        is_of_one_document &= queries.documents[i] == document;
      for (Index j = 0; j < count; ++j)
        is_of_one_document &= keys.documents[start + j] == document;
    }
    // lanes behind the last key seen count as well
    is_masked_ = !is_of_one_document || queries.sees < start + padded(count);
    if (!is_masked_) return count;
    for (Index i = 0; i < queries.count; ++i)
      for (Index j = 0; j < padded(count); ++j) {
        bool is_seen = start + j < queries.sees + i && j < count;
        if (is_seen && !is_of_one_document)
          is_seen = keys.documents[start + j] == queries.documents[i];
        visible_[i * BLOCK + j] = is_seen ? 1.0f : 0.0f;
      }
    return count;
  }

  struct Span {
    int32_t low = INT32_MAX, high = INT32_MIN;
    Span(const int32_t* places, Index count) {
      for (Index i = 0; i < count; ++i) {
        low = std::min(low, places[i]);
        high = std::max(high, places[i]);
      }
    }
  };

  void find_near(const Queries& queries, const Keys& keys, Index start, Index count) {
    const int32_t reach = static_cast<int32_t>(std::min<Index>(problem_.near_size, INT32_MAX));
    near_from_ = count, near_to_ = 0;
    const Span of_queries(queries.places, queries.count), of_keys(keys.places + start, count);
    const int32_t least_apart =
        std::max(of_queries.low - of_keys.high, of_keys.low - of_queries.high);
    nearness_ = FAR;
    if (least_apart >= (problem_.near_rule == SAME_STRETCH ? 1 : reach)) return;
    bool is_all = true;
    for (Index i = 0; i < queries.count; ++i) {
      const int32_t place = queries.places[i];
      float* row = near_ + i * BLOCK;
      int32_t found = 0;
      for (Index j = 0; j < count; ++j) {
        const int32_t apart = place - keys.places[start + j];
        const int32_t is_near =
            problem_.near_rule == SAME_STRETCH ? apart == 0 : apart < reach && -apart < reach;
        row[j] = static_cast<float>(is_near);
        found += is_near;
      }
      if (found > 0) {
        Index from = 0, to = count;
        while (row[from] == 0.0f) ++from;
        while (row[to - 1] == 0.0f) --to;
        near_from_ = std::min(near_from_, from / LANES * LANES);
        near_to_ = std::max(near_to_, to);
      }
      for (Index j = count; j < padded(count); ++j) row[j] = 0.0f;
      is_all &= found == count;
    }
    nearness_ = is_all ? NEAR : near_to_ > 0 ? MIXED : FAR;
  }

  Vector blend(Index at, Vector near, Vector far) const {
    const Vector is_near = load(near_ + at);
    return near * is_near + far * (1.0f - is_near);
  }

  const float* query_part(const Queries& queries, const Term& term) const {
    return problem_.part[term.part].query.at<float>(b_, h_, queries.first) + term.offset;
  }

  Index query_stride(const Term& term) const { return problem_.part[term.part].query.token; }

  template <Into INTO>
  void term_scores(const Queries& queries, const Keys& keys, Index start, Index count,
                   const Term& term, float* out) {
    product<INTO>(queries.count, count, term.width, query_part(queries, term), query_stride(term),
                  keys.f + term.column * keys.ld + start, keys.ld, out, BLOCK);
  }

  void left_scores(const Queries& queries, const Keys& keys, Index start, Index count, float* out) {
    bool is_first = true;
    for (const Term& term : map_.terms) {
      if (is_first && term.is_squared)
        term_scores<Into::square>(queries, keys, start, count, term, out);
      else if (is_first)
        term_scores<Into::store>(queries, keys, start, count, term, out);
      else if (term.is_squared)
        term_scores<Into::add_square>(queries, keys, start, count, term, out);
      else
        term_scores<Into::add>(queries, keys, start, count, term, out);
      is_first = false;
    }
  }

  void far_scores(const Queries& queries, const Keys& keys, Index start, Index count, float* out) {
    left_scores(queries, keys, start, count, out);
    if (map_.factor.width > 0)
      term_scores<Into::multiply>(queries, keys, start, count, map_.factor, out);
  }

  void near_products(const Queries& queries, const Keys& keys, Index start) {
    product<Into::store>(queries.count, near_to_ - near_from_, problem_.near_width,
                         problem_.near_query.at<float>(b_, h_, queries.first),
                         problem_.near_query.token, keys.near + start + near_from_, keys.ld,
                         products_ + near_from_, BLOCK);
  }

  // the exact kernel of a product x
  Vector kernel(Vector x) const {
    if (problem_.near_kind == EXPONENTIAL) {
      const Vector largest = splat(LARGEST_SCORE);
      x *= factor_;
      return exponential(x < largest ? x : largest) * scale_;
    }
    // rounding above 1 counts as 1
    const Vector one = splat(1.0f);
    x = x < one ? x : one;
    return x * x * scale_ / (c_ - 2.0f * x);
  }

  // leaves the near scores in `out`
  void near_backward(const Queries& queries, const Keys& keys, Index start, float* out) {
    near_products(queries, keys, start);
    const Vector one = splat(1.0f), largest = splat(LARGEST_SCORE);
    Vector d_epsilon{}, d_scale{};
    each_near(queries.count, [&](Index at) {
      const Vector x = load(products_ + at), score = kernel(x);
      Vector d_score = load(d_scores_ + at), slope{};
      if (nearness_ == MIXED) d_score *= load(near_ + at);
      if (problem_.near_kind == YAT) {
        const Vector inverse = 1.0f / (c_ - 2.0f * (x < one ? x : one));
        slope = x <= one ? 2.0f * scale_ * x * inverse * (1.0f + x * inverse) : Vector{};
        d_epsilon -= d_score * score * inverse;
      } else {
        slope = x * factor_ <= largest ? score * factor_ : Vector{};
      }
      d_scale += d_score * score;
      store(out + at, score);
      store(products_ + at, d_score * slope);
    });
    d_epsilon_ += sum(d_epsilon);
    // the scores have the scale in them
    d_scale_ += sum(d_scale);
    const Rows& query = problem_.near_query;
    const Index first = start + near_from_, ld = padded(problem_.near_width);
    pull(queries, first, near_to_ - near_from_, products_ + near_from_,
         query.at<float>(b_, h_, queries.first), query.token, problem_.near_width,
         keys.near_rows + first * ld, ld, queries.d_near, ld, keys.d_near, keys.ld);
  }

  // leaves the far scores in `out`; `d_scores_` is used up
  void far_backward(const Queries& queries, const Keys& keys, Index start, Index count,
                    float* out) {
    if (nearness_ == MIXED) {
      each_near(queries.count, [&](Index at) {
        store(d_scores_ + at, load(d_scores_ + at) * (1.0f - load(near_ + at)));
      });
    }
    const bool has_factor = map_.factor.width > 0;
    if (has_factor) {
      left_scores(queries, keys, start, count, out);
      term_scores<Into::store>(queries, keys, start, count, map_.factor, products_);
      each(queries.count, count, [&](Index at, Index) {
        const Vector left = load(out + at), right = load(products_ + at), d = load(d_scores_ + at);
        store(out + at, left * right);
        store(d_scores_ + at, d * right);
        store(products_ + at, d * left);
      });
      pull_term(queries, keys, start, count, products_, map_.factor);
    }
    bool is_first = !has_factor;
    for (const Term& term : map_.terms) {
      if (term.is_squared || !has_factor)
        term_scores<Into::store>(queries, keys, start, count, term, products_);
      if (!term.is_squared && has_factor) {
        pull_term(queries, keys, start, count, d_scores_, term);
        continue;
      }
      each(queries.count, count, [&](Index at, Index) {
        const Vector x = load(products_ + at);
        const Vector score = term.is_squared ? x * x : x;
        if (is_first)
          store(out + at, score);
        else if (!has_factor)
          store(out + at, load(out + at) + score);
        if (term.is_squared) store(products_ + at, load(d_scores_ + at) * x * 2.0f);
      });
      is_first = false;
      pull_term(queries, keys, start, count, term.is_squared ? products_ : d_scores_, term);
    }
  }

  void pull_term(const Queries& queries, const Keys& keys, Index start, Index count,
                 const float* d_products, const Term& term) {
    pull(queries, start, count, d_products, query_part(queries, term), query_stride(term),
         term.width, keys.rows + start * map_.padded_columns + term.padded_column,
         map_.padded_columns, queries.d_rows + term.padded_column, map_.padded_columns,
         keys.d_f + term.column * keys.ld, keys.ld);
  }

  // the gradients of products q·k: to the queries' rows, and to the keys' columns
  static void pull(const Queries& queries, Index start, Index count, const float* d_products,
                   const float* query, Index ld_query, Index width, const float* key_rows,
                   Index ld_rows, float* d_query, Index ld_d_query, float* d_key, Index ld_key) {
    product<Into::add>(queries.count, width, count, d_products, BLOCK, key_rows, ld_rows, d_query,
                       ld_d_query);
    product_of_transposed<Into::add>(width, count, queries.count, query, ld_query, d_products,
                                     BLOCK, d_key + start, ld_key);
  }

  const Problem& problem_;
  const Map& map_;
  const Index b_, h_;
  float c_ = 0, scale_ = 1, factor_ = 1;
  double d_epsilon_ = 0, d_scale_ = 0;
  Nearness nearness_ = FAR;
  bool is_masked_ = false;
  // columns of the block between which all near pairs lie; the first is a multiple of LANES
  Index near_from_ = 0, near_to_ = 0;
  alignas(64) float scores_[PANEL * BLOCK], near_scores_[PANEL * BLOCK], d_scores_[PANEL * BLOCK];
  alignas(64) float products_[PANEL * BLOCK], near_[PANEL * BLOCK], visible_[PANEL * BLOCK];
};

}  // namespace slay
