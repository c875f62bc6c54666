// Samples a row of logits where it was computed: the C++ of src/paceline/sampling, word for word the same noise.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace paceline {

// How one row is sampled (types.RowSampling); pointers may be null.
struct RowParams {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  uint32_t stream, position, purpose;
  // Sparse changes, in this order: z += bias; z > 0 ? z / scale : z * scale; z -= penalty.
  const int32_t* adjusted_ids = nullptr;
  const float *bias = nullptr, *scale = nullptr, *penalty = nullptr;
  int num_adjusted = 0;
  const uint8_t* allowed = nullptr;  // bit mask, little-endian bits; null = all
  int num_logprobs = -1;             // -1 = none reported
  int32_t logprob_id = -1;           // report on this token; -1 = the sampled one
  int num_successors = 0;            // best tokens of the raw logits
  int num_candidates = 0;            // best tokens of the race, kMaxCandidates at most
};

constexpr int kMaxCandidates = 64;

// Another vocabulary, in whose ids rows are sampled (types.TokenMap); ids null = the model's own.
struct TokenMap {
  const int32_t* ids = nullptr;  // [count], of each token of the model; -1 = none
  int count = 0, size = 0;       // of the model's vocabulary, and of the other
};

// What comes of it. The arrays are the caller's, of min(number asked for, vocabulary) elements.
struct RowResult {
  int32_t token = -1;       // -1 if all_banned or has_nan
  bool all_banned = false;  // no token is left after adjustments and mask
  bool has_nan = false;     // the raw logits hold NaN or +inf; nothing else is filled in
  float logprob = 0;        // raw, of the sampled token or logprob_id
  int32_t rank = 0;         // 1 = likeliest; ties count as not ahead
  int32_t* top_ids = nullptr;
  float* top = nullptr;  // raw log-probabilities
  int32_t* successors = nullptr;
  int32_t* candidates = nullptr;  // -1 where no token is left
  float* candidate_scores = nullptr;  // logarithms
};

// A row's token depends on its logits and parameters alone. Holds scratch: one a thread.
class RowSampler {
 public:
  RowSampler(const Kernels& kernels, int vocab_size);

  // Takes all the memory that rows of this vocabulary need, so that sample does not throw.
  void fit(int vocab_size);
  // logits: of the model's vocabulary; where there is a map, the sampler fits its size.
  void sample(const float* logits, const RowParams& params, const TokenMap& map, RowResult& result);

 private:
  // A token's place in the order of a row, as a number: the larger logit first, the lower id among equals.
  using Key = uint64_t;

  VocabularyRow adjust(const VocabularyRow& raw, const RowParams& params);
  int32_t choose(const VocabularyRow& row, const RowParams& params, RowResult& result);
  void rank_by_logit(const VocabularyRow& row, int count, RowResult& result);
  void report(const VocabularyRow& raw, const RowParams& params, RowResult& result);
  void collect(const VocabularyRow& row, float floor, float ceiling);
  void keep_best(const VocabularyRow& row, int count, float floor);
  Key nucleus(const VocabularyRow& row, const RowParams& params, float floor, bool limited);

  const VocabularyKernels& kernels_;
  int vocab_size_ = 0;
  std::vector<float> raw_max_, adjusted_max_, ordered_max_;  // of blocks
  std::vector<float> mapped_, adjusted_;
  std::vector<int32_t> ids_;
  std::vector<Key> keys_;  // the tokens that collect or keep_best left
};

}  // namespace paceline
