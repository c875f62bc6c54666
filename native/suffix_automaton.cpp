#include "suffix_automaton.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>

namespace paceline {

namespace {

constexpr size_t kMaxFollowers = 64;
constexpr double kUnseen = 2.0;

// -probability of the path, -latest occurrence, token, probability, parent, state, length
using Candidate = std::tuple<double, int32_t, int32_t, double, int32_t, int32_t, int32_t>;

}  // namespace

SuffixAutomaton::SuffixAutomaton(int32_t max_length) : max_length_(max_length) {
  states_[new_state(0)].link = kNoState;
  states_[kRoot].count = 1;
}

int32_t SuffixAutomaton::new_state(int32_t length) {
  states_.push_back({length, kRoot, 0, 0, kNoToken, kNoState, kNoToken, kNoToken});
  return num_states() - 1;
}

int32_t SuffixAutomaton::target(int32_t state, int32_t token) const {
  const State& own = states_[state];
  if (own.first_token == token) return own.first_target;
  if (own.second_token == kNoToken) return kNoState;
  const auto found = more_.find(key(state, token));
  return found == more_.end() ? kNoState : found->second.target;
}

template <class Visit>
void SuffixAutomaton::each_follower(int32_t state, const Visit& visit) const {
  const State& own = states_[state];
  if (own.first_token == kNoToken || !visit(own.first_token, own.first_target)) return;
  for (int32_t token = own.second_token; token != kNoToken;) {
    const Transition& next = more_.at(key(state, token));
    if (!visit(token, next.target)) return;
    token = next.next_token;
  }
}

// A token that has not followed the state before.
void SuffixAutomaton::follow(int32_t state, int32_t token, int32_t target) {
  State& own = states_[state];
  if (own.first_token == kNoToken) {
    own.first_token = token;
    own.first_target = target;
  } else {
    more_[key(state, token)] = {target, kNoToken};
    (own.second_token == kNoToken ? own.second_token : more_.at(key(state, own.last_token)).next_token) = token;
  }
  own.last_token = token;
}

SuffixAutomaton::Suffix SuffixAutomaton::longest_suffix(int32_t state) const {
  const int32_t link = states_[state].link;
  return {link, states_[link].length};
}

SuffixAutomaton::Suffix SuffixAutomaton::shorten(int32_t state, int32_t length, int32_t to) const {
  if (length <= to) return {state, length};
  const int32_t link = states_[state].link;
  return {states_[link].length >= to ? link : state, to};
}

SuffixAutomaton::Suffix SuffixAutomaton::repeated_suffix() const {
  if (states_[suffix_].count > 1) return {suffix_, suffix_length_};
  return suffix_ == kRoot ? Suffix{kRoot, 0} : longest_suffix(suffix_);
}

SuffixAutomaton::Suffix SuffixAutomaton::find_suffix(const std::vector<int32_t>& tokens) const {
  Suffix found{kRoot, 0};
  for (const int32_t token : tokens) {
    int32_t next = target(found.first, token);
    while (next == kNoState && found.first != kRoot) {
      found = longest_suffix(found.first);
      next = target(found.first, token);
    }
    if (next != kNoState) found = {next, found.second + 1};
  }
  return found;
}

std::vector<SuffixAutomaton::Follower> SuffixAutomaton::followers(int32_t state, size_t limit) const {
  std::vector<Follower> found;
  each_follower(state, [&](int32_t token, int32_t target) {
    found.push_back({states_[target].count, states_[target].latest, token, target});
    return found.size() < limit;
  });
  return found;
}

GrownTree SuffixAutomaton::grow(int32_t state, int32_t length, size_t num_nodes, double min_probability,
                                bool chain) const {
  GrownTree tree;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> frontier;
  int32_t parent = -1;
  double path_probability = 1;
  while (tree.token_ids.size() < num_nodes) {
    while (state != kRoot && num_followed(state) == 0) std::tie(state, length) = longest_suffix(state);
    if (state != kRoot) {
      const double total = num_followed(state) + kUnseen / length;
      std::vector<Follower> found = followers(state, kMaxFollowers);
      if (chain) found = {*std::max_element(found.begin(), found.end())};
      for (const Follower& next : found) {
        const double probability = next.count / total, path = path_probability * probability;
        if (path >= min_probability && next.token != kSeparator)
          frontier.emplace(-path, -next.latest, next.token, probability, parent, next.target, length + 1);
      }
    }
    if (frontier.empty()) break;
    const auto [negative, latest, token, probability, grown_from, grown, grown_length] = frontier.top();
    frontier.pop();
    path_probability = -negative;
    tree.score += path_probability;
    parent = static_cast<int32_t>(tree.token_ids.size());
    tree.token_ids.push_back(token);
    tree.parents.push_back(grown_from);
    tree.confidence.push_back(probability);
    std::tie(state, length) = shorten(grown, grown_length, max_length_ - 1);
  }
  return tree;
}

void SuffixAutomaton::append(int32_t token) {
  const int32_t added = new_state(++num_tokens_);
  int32_t state = last_, next = kNoState;
  for (; state != kNoState; state = states_[state].link) {
    next = target(state, token);
    if (next != kNoState) break;
    follow(state, token, added);
  }
  if (state != kNoState)
    states_[added].link = states_[next].length == states_[state].length + 1 ? next : split(next, state, token);
  last_ = added;
  count_suffixes(token);
}

// Moves the strings of target that also end at the text's end to a state of their own, and returns it. They are those of
// state, and of the states that it links to, with the token after them.
int32_t SuffixAutomaton::split(int32_t target, int32_t state, int32_t token) {
  const int32_t clone = new_state(states_[state].length + 1);
  states_[clone].link = states_[target].link;
  states_[clone].count = states_[target].count;
  states_[clone].latest = states_[target].latest;
  std::vector<std::pair<int32_t, int32_t>> copied;
  each_follower(target, [&](int32_t next_token, int32_t next) {
    copied.emplace_back(next_token, next);
    return true;
  });
  for (const auto& [next_token, next] : copied) follow(clone, next_token, next);
  states_[target].link = clone;
  if (target == suffix_ && suffix_length_ <= states_[clone].length) suffix_ = clone;
  for (; state != kNoState && this->target(state, token) == target; state = states_[state].link)
    (states_[state].first_token == token ? states_[state].first_target : more_.at(key(state, token)).target) = clone;
  return clone;
}

void SuffixAutomaton::count_suffixes(int32_t token) {
  std::tie(suffix_, suffix_length_) = shorten(target(suffix_, token), suffix_length_ + 1, max_length_);
  for (int32_t state = suffix_; state != kNoState; state = states_[state].link) {
    states_[state].count++;
    states_[state].latest = num_tokens_;
  }
}

}  // namespace paceline
