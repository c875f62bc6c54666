// Python's view of row sampling: types.RowSampling in, arrays out.
#pragma once

#include <vector>

#include "bindings.hpp"
#include "sampling.hpp"

namespace paceline {

// The rows of one pass: parameters read from a types.RowSampling, and room for the results. Made and read with Python's
// lock held, filled without it.
class SampledRows {
 public:
  // Throws std::invalid_argument where arrays do not fit the number of rows or the vocabulary.
  SampledRows(nb::handle sampling, size_t num_rows, int vocab_size);

  const RowParams* params() const { return params_.data(); }
  RowResult* results() { return results_.data(); }

  // A dict of arrays: token_ids [M] int32 (-1 where there is none), all_banned and has_nan [M] bool; token, rank,
  // top_ids and top of types.Logprobs where asked for; successors [M, k] int32 where asked for.
  nb::object arrays() const;

 private:
  std::vector<nb::object> kept_;  // arrays that params_ points into
  std::vector<RowParams> params_;
  std::vector<RowResult> results_;
  nb::object top_ids_, top_, successors_;  // null = not asked for
};

}  // namespace paceline
