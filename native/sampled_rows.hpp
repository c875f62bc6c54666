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
  const TokenMap& token_map() const { return token_map_; }
  int vocab_size() const { return vocab_size_; }  // that of the ids

  // A dict of arrays: token_ids [M] int32 (-1 where there is none), all_banned and has_nan [M] bool; token, rank,
  // top_ids and top of types.Logprobs where asked for; where asked for, successors [M, k] int32, and candidates [M, k]
  // int32 with candidate_scores [M, k] float32.
  nb::object arrays() const;

 private:
  std::vector<nb::object> kept_;  // arrays that params_ points into
  std::vector<RowParams> params_;
  std::vector<RowResult> results_;
  TokenMap token_map_;
  int vocab_size_;
  nb::object top_ids_, top_, successors_, candidates_, candidate_scores_;  // null = not asked for
};

}  // namespace paceline
