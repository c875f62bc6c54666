#include "sampling.hpp"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>

namespace paceline {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kFew = 512;     // tokens worth sorting
constexpr double kNats = 42;  // smaller weights than e^-42 have no part in a mass

// RowSampler::Key: a token's place in the order of its row, the larger number first.
uint64_t key_of(float logit, int32_t id) {
  const auto bits = std::bit_cast<int32_t>(logit + 0.0f);  // -0 becomes 0
  const uint32_t ordered = static_cast<uint32_t>(bits < 0 ? ~bits : bits ^ INT32_MIN);
  return uint64_t{ordered} << 32 | static_cast<uint32_t>(~id);
}

int32_t id_of(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

float logit_of(uint64_t key) {
  const auto ordered = static_cast<int32_t>(key >> 32);
  return std::bit_cast<float>(ordered < 0 ? ordered ^ INT32_MIN : ~ordered);
}

// Log weight of a logit, as survivors() in sampling/filters.py computes it.
struct LogWeight {
  double max, temperature;
  double operator()(float z) const { return (static_cast<double>(z) - max) / temperature; }
};

// The smallest logit that min_p keeps; without min_p, the smallest that is not banned.
float min_p_floor(const LogWeight& log_weight, float min_p) {
  if (min_p <= 0) return -FLT_MAX;
  const double lowest = std::log(static_cast<double>(min_p));
  auto floor = static_cast<float>(log_weight.max + lowest * log_weight.temperature);
  const auto below = [](float z) { return std::nextafter(z, -kInfinity); };
  while (log_weight(below(floor)) >= lowest) floor = below(floor);
  while (log_weight(floor) < lowest) floor = std::nextafter(floor, kInfinity);
  return std::max(floor, -FLT_MAX);
}

void ban(std::vector<float>& logits, const uint8_t* allowed) {
  const int size = static_cast<int>(logits.size());
  for (int first = 0; first < size; first += 8) {
    const int byte = allowed[first / 8], end = std::min(first + 8, size);
    if (byte == 0xFF) continue;
    for (int i = first; i < end; i++) logits[i] = byte >> (i - first) & 1 ? logits[i] : -kInfinity;
  }
}

int32_t first_of_max(const VocabularyRow& row) {
  const auto block = std::find(row.block_max, row.block_max + vocabulary_blocks(row.size), row.max) - row.block_max;
  const float* first = std::find(row.logits + block * kVocabularyBlock, row.logits + row.size, row.max);
  return static_cast<int32_t>(first - row.logits);
}

}  // namespace

RowSampler::RowSampler(const Kernels& kernels, int vocab_size) : kernels_(kernels.vocabulary) { fit(vocab_size); }

void RowSampler::fit(int vocab_size) {
  if (vocab_size == vocab_size_) return;
  const int num_blocks = vocabulary_blocks(vocab_size);
  raw_max_.resize(num_blocks);
  adjusted_max_.resize(num_blocks);
  ordered_max_.reserve(num_blocks);
  mapped_.reserve(vocab_size);
  adjusted_.reserve(vocab_size);
  ids_.resize(vocab_size);
  keys_.reserve(vocab_size);
  vocab_size_ = vocab_size;
}

void RowSampler::sample(const float* logits, const RowParams& params, const TokenMap& map, RowResult& result) {
  if (map.ids != nullptr) {
    mapped_.assign(map.size, -kInfinity);
    for (int i = 0; i < map.count; i++) {
      if (map.ids[i] >= 0) mapped_[map.ids[i]] = logits[i];
    }
    logits = mapped_.data();
  }
  bool finite;
  const float max = kernels_.scan(logits, vocab_size_, raw_max_.data(), &finite);
  result.has_nan = !finite;
  result.all_banned = false;
  result.token = -1;
  std::fill_n(result.candidates, params.num_candidates, -1);
  std::fill_n(result.candidate_scores, params.num_candidates, -kInfinity);
  if (result.has_nan) return;
  const VocabularyRow raw{logits, raw_max_.data(), vocab_size_, max};
  const bool changed = params.num_adjusted > 0 || params.allowed != nullptr;
  const VocabularyRow row = changed ? adjust(raw, params) : raw;
  result.all_banned = row.max == -kInfinity;
  if (!result.all_banned) result.token = choose(row, params, result);
  report(raw, params, result);
}

VocabularyRow RowSampler::adjust(const VocabularyRow& raw, const RowParams& params) {
  adjusted_.assign(raw.logits, raw.logits + raw.size);
  for (int i = 0; i < params.num_adjusted; i++) {
    float& z = adjusted_[params.adjusted_ids[i]];
    z += params.bias[i];
    z = z > 0 ? z / params.scale[i] : z * params.scale[i];
    z -= params.penalty[i];
  }
  if (params.allowed) ban(adjusted_, params.allowed);
  bool finite;
  const float max = kernels_.scan(adjusted_.data(), raw.size, adjusted_max_.data(), &finite);
  return {adjusted_.data(), adjusted_max_.data(), raw.size, max};
}

// The filters keep a front part of the row's order: each of them only moves the border, the last token that stays.
int32_t RowSampler::choose(const VocabularyRow& row, const RowParams& params, RowResult& result) {
  const int32_t likeliest = first_of_max(row);
  if (params.temperature == 0) {
    if (params.num_candidates > 0) rank_by_logit(row, params.num_candidates, result);
    return likeliest;
  }
  const float floor = min_p_floor({row.max, params.temperature}, params.min_p);
  Key border = key_of(floor, INT32_MAX);
  const bool limited = params.top_k > 0 && params.top_k < vocab_size_;
  if (limited) {
    keep_best(row, params.top_k, floor);
    border = *std::min_element(keys_.begin(), keys_.end());
  }
  if (params.top_p < 1) border = std::max(border, nucleus(row, params, floor, limited));
  Entrant best[kMaxCandidates];
  const RaceParams race{params.temperature, logit_of(border), id_of(border), likeliest, params.seed, params.stream,
                        params.position, params.purpose};
  const int count = kernels_.race(row, race, std::max(params.num_candidates, 1), best);
  for (int i = 0; i < std::min(count, params.num_candidates); i++) {
    result.candidates[i] = best[i].id;
    result.candidate_scores[i] = static_cast<float>(std::log(best[i].score));
  }
  return best[0].id;
}

// Candidates of a greedy row.
void RowSampler::rank_by_logit(const VocabularyRow& row, int count, RowResult& result) {
  keep_best(row, count, -FLT_MAX);
  std::sort(keys_.begin(), keys_.end(), std::greater<>());
  for (size_t i = 0; i < keys_.size(); i++) {
    result.candidates[i] = id_of(keys_[i]);
    result.candidate_scores[i] = logit_of(keys_[i]) - row.max;
  }
}

// keys_ = the tokens of logits in [floor, ceiling).
void RowSampler::collect(const VocabularyRow& row, float floor, float ceiling) {
  const int count = kernels_.collect(row, floor, ceiling, ids_.data());
  keys_.resize(count);
  for (int i = 0; i < count; i++) keys_[i] = key_of(row.logits[ids_[i]], ids_[i]);
}

// keys_ = the `count` best tokens of logits >= floor, in no order.
void RowSampler::keep_best(const VocabularyRow& row, int count, float floor) {
  const int num_blocks = vocabulary_blocks(row.size);
  if (count <= num_blocks) {  // as many blocks reach the count-th largest of their maxima, so as many tokens do
    ordered_max_.assign(row.block_max, row.block_max + num_blocks);
    std::nth_element(ordered_max_.begin(), ordered_max_.begin() + (count - 1), ordered_max_.end(), std::greater<>());
    floor = std::max(floor, ordered_max_[count - 1]);
  }
  collect(row, floor, kInfinity);
  if (count < static_cast<int>(keys_.size())) {
    std::nth_element(keys_.begin(), keys_.begin() + count, keys_.end(), std::greater<>());
    keys_.resize(count);
  }
}

// Last token of the smallest set of likeliest ones that holds top_p of the mass: of keys_ if they are `limited` by
// top_k, else of the logits >= floor. No sort of the vocabulary: bisection narrows the place where the mass is reached
// down to a few tokens, and only those are sorted.
RowSampler::Key RowSampler::nucleus(const VocabularyRow& row, const RowParams& params, float floor, bool limited) {
  const LogWeight log_weight{row.max, params.temperature};
  const auto weight = [&](Key key) { return std::exp(log_weight(logit_of(key))); };
  double target = 0, reached = 0;
  if (limited) {
    for (const Key key : keys_) target += weight(key);
    target *= params.top_p;
  } else {
    const auto lowest = static_cast<float>(std::max<double>(-FLT_MAX, row.max - kNats * params.temperature));
    float low = std::max(floor, lowest), high = std::nextafter(row.max, kInfinity);  // where it is reached: [low, high)
    VocabularyMass above_low = kernels_.weigh(row, params.temperature, low), above_high{0, 0};
    target = above_low.sum * params.top_p;
    while (above_low.count - above_high.count > kFew) {
      const auto middle = static_cast<float>((static_cast<double>(low) + high) / 2);
      if (middle <= low || middle >= high) break;  // neighbours: many equal logits
      const VocabularyMass above = kernels_.weigh(row, params.temperature, middle);
      (above.sum < target ? high : low) = middle;
      (above.sum < target ? above_high : above_low) = above;
    }
    collect(row, low, high);
    reached = above_high.sum;
  }
  std::sort(keys_.begin(), keys_.end(), std::greater<>());
  size_t last = 0;
  while ((reached += weight(keys_[last])) < target && last + 1 < keys_.size()) ++last;
  return keys_[last];
}

void RowSampler::report(const VocabularyRow& raw, const RowParams& params, RowResult& result) {
  const int num_top = std::min(std::max(params.num_logprobs, 0), vocab_size_);
  const int num_successors = std::min(params.num_successors, vocab_size_);
  if (num_top > 0 || num_successors > 0) {
    keep_best(raw, std::max(num_top, num_successors), -kInfinity);
    std::sort(keys_.begin(), keys_.end(), std::greater<>());
    for (int i = 0; i < num_successors; i++) result.successors[i] = id_of(keys_[i]);
  }
  if (params.num_logprobs < 0) return;
  const double log_total = raw.max + std::log(kernels_.weigh(raw, 1, -kInfinity).sum);
  for (int i = 0; i < num_top; i++) {
    result.top_ids[i] = id_of(keys_[i]);
    result.top[i] = static_cast<float>(logit_of(keys_[i]) - log_total);
  }
  const int32_t token = params.logprob_id >= 0 ? params.logprob_id : result.token;
  if (token < 0) return;  // nothing was sampled
  result.logprob = static_cast<float>(raw.logits[token] - log_total);
  result.rank = 1 + kernels_.count_above(raw, raw.logits[token]);
}

}  // namespace paceline
