// Passes over one row of the vocabulary, as a table: one instance an instruction set (vocabulary.hpp has the code).
#pragma once

#include <cstdint>

namespace paceline {

// A row is seen in blocks of 64 tokens, the last one perhaps short. Most passes look at the largest logit of each block
// and leave out those that cannot matter.
constexpr int kVocabularyBlock = 64;
namespace {
constexpr int vocabulary_blocks(int size) { return (size + kVocabularyBlock - 1) / kVocabularyBlock; }
}  // namespace

struct VocabularyRow {
  const float* logits;     // [size]
  const float* block_max;  // [vocabulary_blocks(size)], by scan
  int size;
  float max;               // by scan
};

struct VocabularyMass {
  double sum;
  int count;
};

struct RaceParams {
  float temperature;
  float border;       // tokens of a logit below this are out of the race,
  int32_t border_id;  // and those of this very logit whose id is above
  int32_t likeliest;  // the lowest id of the largest logit
  uint64_t seed;
  uint32_t stream, position, purpose;
};

// A token of a race, and its score exp((z - max) / temperature) / -log(u).
struct Entrant {
  double score;
  int32_t id;
};
constexpr double kLeastScore = 1e-26;  // a token that does not score more is never among the best

struct VocabularyKernels {
  // Largest logit of each block and of the row; `finite` is false if a NaN or +inf is among them.
  float (*scan)(const float* logits, int size, float* block_max, bool* finite);
  // Number of logits z >= floor, and the sum of exp((z - max) / temperature) over them, in fixed tiles.
  VocabularyMass (*weigh)(const VocabularyRow& row, float temperature, float floor);
  // Ids of the logits with floor <= z < ceiling, ascending; returns how many. `ids` has room for all.
  int (*collect)(const VocabularyRow& row, float floor, float ceiling, int32_t* ids);
  int (*count_above)(const VocabularyRow& row, float value);  // logits > value
  // The `count` >= 1 tokens of the best scores, in float64 (docs/noise.md), best first, the lowest id first on ties.
  // Returns how many there are.
  int (*race)(const VocabularyRow& row, const RaceParams& params, int count, Entrant* best);
  // Words of the tokens 0 .. 32 * count - 1: what race draws, for tests.
  void (*words)(const RaceParams& params, int count, uint32_t* out);
};

}  // namespace paceline
