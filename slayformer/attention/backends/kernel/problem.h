// What Python hands over: the same fields in the same order as `Problem` in engine.py.
#pragma once

#include <cstdint>

namespace slay {

using Index = int64_t;

// a [batch, heads, tokens, width] tensor: strides count elements, the last one is 1
struct Rows {
  void* data;
  Index batch, head, token;

  template <class T>
  T* at(Index b, Index h, Index t = 0) const {
    return static_cast<T*>(data) + b * batch + h * head + t * token;
  }
};

// scores of a part: Σ over blocks of (y·y)², an inner product, or an inner product that multiplies
// the sum of all the others
enum PartKind : Index { SQUARES, LINEAR, FACTOR };

// columns of the features' factors, fp32, and where their gradients go; with a projection the walk
// makes the factors itself and fills these in
struct Part {
  Index kind, width, block;
  Rows query, key, d_query, d_key;
};

enum NearKind : Index { NO_KERNEL, YAT, EXPONENTIAL };
enum NearRule : Index { EVERY_PAIR, SAME_STRETCH, CLOSER };

constexpr Index MOST_PARTS = 8;

// what becomes of the columns of a product: as they are, squared, e to them, or blocks each times e
// to a column of their own behind them
enum Activation : Index { IDENTITY, SQUARE, EXPONENT, GATED };

// columns of a product that one activation takes
struct Columns {
  Index activation, width, block;
};

// Factors of features as activations of û W + b, û = x/√(‖x‖² + floor).
struct Projection {
  Index width, columns, outputs, is_bf16, parts;
  Columns part[MOST_PARTS];
  double floor;
  // d_x is fp32
  Rows x, d_x;
  // [heads, width, columns] and [heads, columns]; gradients: one a head and stretch, or null where
  // neither is trained
  const float *weight, *bias;
  float *d_weight, *d_bias;
};

struct Problem {
  // absent: of the lag's keys before the first token, which rows of keys leave out; arrays by key
  // have places for them
  Index batch, heads, length, lag, absent, strict, value_width, feature_count, chunk, segments, threads;
  // has_past, has_future: a state before the first token; one wanted after the last
  Index has_past, has_future;
  // value is bf16 rather than fp32; the output is the quotient rather than two sums
  Index is_bf16, is_quotient;
  Index parts;
  Part part[MOST_PARTS];
  const Projection *query_projection, *key_projection;
  Index near_kind, near_rule, near_size, near_width;
  // what multiplies the inner products of the exponential kernel
  double near_factor;
  Rows near_query, near_key, d_near_query, d_near_key;
  // one a head; gradients: one a head and stretch
  const float *epsilon, *near_scale, *offset;
  double *d_epsilon, *d_near_scale;
  Rows value, d_value, output, d_output;
  Rows normaliser, d_normaliser;
  // [batch, heads, features, value_width + 1]
  const float *memory, *d_memory_after;
  float *memory_after, *d_memory;
  // [batch, length] and [batch, lag + length]
  const Index *query_positions, *key_positions, *query_documents, *key_documents, *first_document;
  const uint8_t* key_mask;
};

}  // namespace slay
