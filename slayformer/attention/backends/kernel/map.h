// The layout of the factors, and of the features made of them.
#pragma once

#include <cmath>
#include <vector>

#include "problem.h"
#include "vector.h"

namespace slay {

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

}  // namespace slay
