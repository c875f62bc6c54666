// The rows of a table of successors one by one: src/paceline/draft/successor_rows.py, which describes them, does the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "suffix_automaton.hpp"

namespace paceline {

// What a step showed of one request; tokens [N] and parents [N] of its draft, successors [1 + N, width].
struct Seen {
  int32_t before, root;
  const int32_t *token_ids, *parents;
  size_t num_nodes;
  std::vector<int32_t> path;
  int32_t final_token;
  const int32_t* successors;
};

// Works on arrays that others own.
class SuccessorRows {
 public:
  static constexpr int32_t kNumPairs = 1 << 16;
  static constexpr int64_t kMix = 0x9E3779B1;
  static constexpr int kNumStates = 3;

  struct Arrays {
    int32_t* successors;  // [kNumPairs + vocab_size, width]
    uint8_t* kinds;       // [kNumPairs + vocab_size]
    int64_t* keys;        // [kNumPairs]
    double* hits;         // [2 * kNumStates, width]
    double* trials;       // [2 * kNumStates]
    int32_t vocab_size;
    int32_t width;
  };
  struct Row {
    const int32_t* successors;  // [width]
    uint8_t kind;
  };

  explicit SuccessorRows(const Arrays& arrays);

  const Arrays& arrays() const { return arrays_; }
  const std::vector<double>& rates() const { return rates_; }  // [2 * kNumStates, width]
  Row look(int32_t before, int32_t token) const;
  GrownTree grow(int32_t before, int32_t root, size_t budget, double least_reach, bool chain) const;
  void learn(const std::vector<Seen>& step);
  void count(int32_t before, int32_t token, int32_t following);

 private:
  struct Said {
    int32_t before, token;
    const int32_t* successors;
  };

  void rate(int kind);
  void write(const std::vector<Said>& rows);
  void put(int64_t row, int first_kind, const int32_t* successors, bool known);

  Arrays arrays_;
  std::vector<double> rates_;
};

}  // namespace paceline
