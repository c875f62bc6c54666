#include "successor_rows.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

namespace paceline {

namespace {

constexpr int kFirst = 0, kConfirmed = 1, kChanged = 2;

// -probability of the path, parent and rank, which no two share; then what the node comes of.
struct Candidate {
  double minus_reach;
  int32_t parent, rank;
  double above;  // the parent's path probability
  SuccessorRows::Row row;
  int32_t before;

  bool operator>(const Candidate& other) const {
    return std::tie(minus_reach, parent, rank) > std::tie(other.minus_reach, other.parent, other.rank);
  }
};

int64_t key_of(int32_t before, int32_t token) { return before * SuccessorRows::kMix + token; }
int64_t slot_of(int64_t key) { return key & (SuccessorRows::kNumPairs - 1); }

}  // namespace

SuccessorRows::SuccessorRows(const Arrays& arrays)
    : arrays_(arrays), rates_(static_cast<size_t>(2 * kNumStates) * arrays.width) {
  for (int kind = 0; kind < 2 * kNumStates; kind++) rate(kind);
}

SuccessorRows::Row SuccessorRows::look(int32_t before, int32_t token) const {
  const int64_t key = key_of(before, token), slot = slot_of(key);
  const int64_t row = arrays_.keys[slot] == key ? slot : token + int64_t{kNumPairs};
  return {arrays_.successors + row * arrays_.width, arrays_.kinds[row]};
}

GrownTree SuccessorRows::grow(int32_t before, int32_t root, size_t budget, double least_reach, bool chain) const {
  GrownTree tree;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto rate_of = [&](const Row& row, int32_t rank) { return rates_[row.kind * arrays_.width + rank]; };
  if (const Row row = look(before, root); row.successors[0] >= 0)
    candidates.push({-rate_of(row, 0), -1, 0, 1.0, row, root});
  while (!candidates.empty() && tree.token_ids.size() < budget && -candidates.top().minus_reach >= least_reach) {
    const Candidate best = candidates.top();
    candidates.pop();
    const auto node = static_cast<int32_t>(tree.token_ids.size());
    const int32_t token = best.row.successors[best.rank], next = best.rank + 1;
    if (token >= arrays_.vocab_size) throw std::out_of_range("a successor is outside the vocabulary");
    tree.token_ids.push_back(token);
    tree.parents.push_back(best.parent);
    tree.confidence.push_back(rate_of(best.row, best.rank));
    if (!chain && next < arrays_.width && best.row.successors[next] >= 0)
      candidates.push({-best.above * rate_of(best.row, next), best.parent, next, best.above, best.row, best.before});
    if (const Row below = look(best.before, token); below.successors[0] >= 0)
      candidates.push({best.minus_reach * rate_of(below, 0), node, 0, -best.minus_reach, below, token});
  }
  return tree;
}

void SuccessorRows::learn(const std::vector<Seen>& step) {
  std::vector<Said> dropped, accepted;
  for (const Seen& seen : step) {
    const auto token_of = [&](int32_t node) { return node < 0 ? seen.root : seen.token_ids[node]; };
    const auto before_of = [&](int32_t node) { return node < 0 ? seen.before : token_of(seen.parents[node]); };
    std::vector<bool> on_path(seen.num_nodes + 1);
    int32_t node = -1;
    for (size_t i = 0; i <= seen.path.size(); i++) {
      const int32_t next = i < seen.path.size() ? seen.path[i] : -1;
      count(before_of(node), token_of(node), next < 0 ? seen.final_token : token_of(next));
      on_path[node + 1] = true;
      node = next;
    }
    for (node = -1; node < static_cast<int32_t>(seen.num_nodes); node++)
      (on_path[node + 1] ? accepted : dropped)
          .push_back({before_of(node), token_of(node), seen.successors + (node + 1) * arrays_.width});
  }
  dropped.insert(dropped.end(), accepted.begin(), accepted.end());
  write(dropped);
}

void SuccessorRows::count(int32_t before, int32_t token, int32_t following) {
  const auto [said, kind] = look(before, token);
  if (said[0] < 0) return;
  arrays_.trials[kind]++;
  const int32_t rank = static_cast<int32_t>(std::find(said, said + arrays_.width, following) - said);
  if (rank < arrays_.width) arrays_.hits[kind * arrays_.width + rank]++;
  rate(kind);
}

void SuccessorRows::rate(int kind) {
  const double trials = arrays_.trials[kind] + 1;
  for (int rank = 0, at = kind * arrays_.width; rank < arrays_.width; rank++, at++) {
    const double own = arrays_.hits[at] / trials;
    rates_[at] = rank == 0 ? own : std::min(own, rates_[at - 1]);
  }
}

void SuccessorRows::write(const std::vector<Said>& rows) {
  // In the order in which pairs, or tokens, come first, each with what was said of it last.
  const auto latest = [&](const auto& identity, const auto& put_row) {
    std::unordered_map<int64_t, size_t> places;
    std::vector<const Said*> kept;
    for (const Said& row : rows) {
      const auto [place, is_new] = places.try_emplace(identity(row), kept.size());
      if (is_new) kept.push_back(&row);
      kept[place->second] = &row;
    }
    for (const Said* row : kept) put_row(*row);
  };
  latest([](const Said& row) { return key_of(row.before, row.token); },
         [&](const Said& row) {
           const int64_t key = key_of(row.before, row.token), slot = slot_of(key);
           const bool known = arrays_.keys[slot] == key;
           arrays_.keys[slot] = key;
           put(slot, 0, row.successors, known);
         });
  latest([](const Said& row) { return int64_t{row.token}; },
         [&](const Said& row) { put(row.token + int64_t{kNumPairs}, kNumStates, row.successors, true); });
}

void SuccessorRows::put(int64_t row, int first_kind, const int32_t* successors, bool known) {
  int32_t* own = arrays_.successors + row * arrays_.width;
  const int32_t old = known ? own[0] : -1;
  const int state = old < 0 ? kFirst : old == successors[0] ? kConfirmed : kChanged;
  arrays_.kinds[row] = static_cast<uint8_t>(first_kind + state);
  std::copy_n(successors, arrays_.width, own);
}

}  // namespace paceline
