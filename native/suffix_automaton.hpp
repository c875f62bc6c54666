// Which strings of a text occur how often, and what follows them: src/paceline/draft/automaton.py, which describes it,
// does the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace paceline {

// A draft as it grows: a tree of tokens, parents before children, -1 the root.
struct GrownTree {
  std::vector<int32_t> token_ids, parents;
  std::vector<double> confidence;
  double score = 0;  // sum of the paths' probabilities
};

class SuffixAutomaton {
 public:
  static constexpr int32_t kRoot = 0, kNoState = -1, kSeparator = -1;

  struct Follower {
    int32_t count, latest, token, target;
    auto operator<=>(const Follower&) const = default;
  };
  using Suffix = std::pair<int32_t, int32_t>;  // state, and tokens of one of its strings

  explicit SuffixAutomaton(int32_t max_length);

  void append(int32_t token);

  int32_t max_length() const { return max_length_; }
  int32_t num_tokens() const { return num_tokens_; }
  int32_t num_states() const { return static_cast<int32_t>(states_.size()); }
  int32_t length(int32_t state) const { return states_[state].length; }
  int32_t count(int32_t state) const { return states_[state].count; }
  int32_t num_followed(int32_t state) const { return count(state) - (states_[state].latest == num_tokens_ ? 1 : 0); }
  int32_t target(int32_t state, int32_t token) const;
  Suffix longest_suffix(int32_t state) const;  // not of the root
  Suffix shorten(int32_t state, int32_t length, int32_t to) const;
  Suffix repeated_suffix() const;
  Suffix find_suffix(const std::vector<int32_t>& tokens) const;
  std::vector<Follower> followers(int32_t state, size_t limit) const;
  GrownTree grow(int32_t state, int32_t length, size_t num_nodes, double min_probability, bool chain) const;

 private:
  static constexpr int32_t kNoToken = -2;

  // Of the tokens that follow a state the first is in it, with its target; each names the one that first came after it.
  struct State {
    int32_t length, link, count, latest;
    int32_t first_token, first_target, second_token, last_token;
  };
  struct Transition {
    int32_t target, next_token;
  };

  static uint64_t key(int32_t state, int32_t token) {
    return static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
  }
  // Calls visit(token, target) for what follows a state, in the order of appearance, for as long as it returns true.
  template <class Visit>
  void each_follower(int32_t state, const Visit& visit) const;
  int32_t new_state(int32_t length);
  void follow(int32_t state, int32_t token, int32_t target);
  int32_t split(int32_t target, int32_t state, int32_t token);
  void count_suffixes(int32_t token);

  int32_t max_length_;
  int32_t num_tokens_ = 0;
  std::vector<State> states_;
  std::unordered_map<uint64_t, Transition> more_;  // transitions of a state after its first
  int32_t last_ = kRoot;                           // the whole text
  int32_t suffix_ = kRoot, suffix_length_ = 0;     // its suffix of at most max_length tokens
};

}  // namespace paceline
