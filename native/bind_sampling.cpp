#include "sampled_rows.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "philox.hpp"

namespace paceline {
namespace {

template <class T>
const T* elements(nb::handle array, const char* name, size_t size, std::vector<nb::object>& kept) {
  const auto values = nb::cast<Vector<T>>(array.attr(name));
  if (values.size() != size) throw std::invalid_argument(std::string(name) + " has the wrong length");
  kept.push_back(nb::cast(values));
  return values.data();
}

int count_or(nb::handle number, int missing) { return number.is_none() ? missing : nb::cast<int>(number); }

nb::object sample_rows(const Table<float>& logits, nb::handle sampling, const std::string& isa) {
  const auto vocab_size = static_cast<int>(logits.shape(1));
  if (vocab_size < 1) throw std::invalid_argument("the vocabulary is empty");
  SampledRows rows(sampling, logits.shape(0), vocab_size);
  {
    nb::gil_scoped_release released;
    RowSampler sampler(select_kernels(isa.c_str()), rows.vocab_size());
    for (size_t i = 0; i < logits.shape(0); i++) {
      sampler.sample(logits.data() + i * vocab_size, rows.params()[i], rows.token_map(), rows.results()[i]);
    }
  }
  return rows.arrays();
}

nb::object row_words(size_t num_groups, uint64_t seed, uint32_t stream, uint32_t position, uint32_t purpose,
                     const std::string& isa) {
  const auto [array, words] = new_array<uint32_t>({32 * num_groups});
  RaceParams params{};
  params.seed = seed, params.stream = stream, params.position = position, params.purpose = purpose;
  select_kernels(isa.c_str()).vocabulary.words(params, static_cast<int>(num_groups), words);
  return array;
}

}  // namespace

SampledRows::SampledRows(nb::handle sampling, size_t num_rows, int vocab_size)
    : params_(num_rows), results_(num_rows), vocab_size_(vocab_size) {
  if (const nb::object map = sampling.attr("token_map"); !map.is_none()) {
    token_map_ = {elements<int32_t>(map, "ids", vocab_size, kept_), vocab_size, nb::cast<int>(map.attr("size"))};
    const int32_t* ids = token_map_.ids;
    if (vocab_size < 1 || *std::max_element(ids, ids + vocab_size) >= token_map_.size) {
      throw std::invalid_argument("the token map leads outside its vocabulary");
    }
    vocab_size = vocab_size_ = token_map_.size;
  }
  const auto column = [&]<class T>(const char* name, T RowParams::* field) {
    const T* values = elements<T>(sampling, name, num_rows, kept_);
    for (size_t i = 0; i < num_rows; i++) params_[i].*field = values[i];
  };
  column("temperature", &RowParams::temperature);
  column("top_k", &RowParams::top_k);
  column("top_p", &RowParams::top_p);
  column("min_p", &RowParams::min_p);
  column("seed", &RowParams::seed);
  column("stream", &RowParams::stream);
  column("position", &RowParams::position);
  column("purpose", &RowParams::purpose);
  const auto in_vocabulary = [&](int32_t id) { return 0 <= id && id < vocab_size; };

  if (const nb::object changes = sampling.attr("adjustments"); !changes.is_none()) {
    const int32_t* offsets = elements<int32_t>(changes, "offsets", num_rows + 1, kept_);
    const size_t total = nb::len(nb::object(changes.attr("ids")));
    const int32_t* ids = elements<int32_t>(changes, "ids", total, kept_);
    const float* bias = elements<float>(changes, "bias", total, kept_);
    const float* scale = elements<float>(changes, "scale", total, kept_);
    const float* penalty = elements<float>(changes, "penalty", total, kept_);
    for (size_t k = 0; k < total; k++) {
      if (!in_vocabulary(ids[k])) throw std::invalid_argument("an adjusted id is outside the vocabulary");
    }
    for (size_t i = 0; i < num_rows; i++) {
      const int32_t start = offsets[i], end = offsets[i + 1];
      if (start < 0 || end < start || end > static_cast<int64_t>(total)) throw std::invalid_argument("offsets ascend");
      params_[i].adjusted_ids = ids + start;
      params_[i].bias = bias + start;
      params_[i].scale = scale + start;
      params_[i].penalty = penalty + start;
      params_[i].num_adjusted = end - start;
    }
  }
  if (const nb::object allowed = sampling.attr("allowed"); !allowed.is_none()) {
    const auto masks = nb::cast<Table<uint8_t>>(allowed);
    const size_t width = (vocab_size + 7) / 8;
    if (masks.shape(0) != num_rows || masks.shape(1) != width) throw std::invalid_argument("allowed has a wrong shape");
    kept_.push_back(nb::cast(masks));
    for (size_t i = 0; i < num_rows; i++) params_[i].allowed = masks.data() + i * width;
  }
  if (const nb::object ids = sampling.attr("logprob_ids"); !ids.is_none()) {
    column("logprob_ids", &RowParams::logprob_id);
    for (const RowParams& row : params_) {
      if (row.logprob_id >= vocab_size) throw std::invalid_argument("a logprob id is outside the vocabulary");
    }
  }

  const int num_logprobs = count_or(sampling.attr("num_logprobs"), -1);
  const int num_successors = count_or(sampling.attr("num_successors"), 0);
  const size_t num_top = std::min(std::max(num_logprobs, 0), vocab_size);
  const int num_candidates = count_or(sampling.attr("num_candidates"), 0);
  if (num_candidates > kMaxCandidates) throw std::invalid_argument("too many candidates");
  const size_t width = std::min(std::max(num_successors, 0), vocab_size);
  const size_t breadth = std::min(std::max(num_candidates, 0), vocab_size);
  auto [top_ids, top_id] = new_array<int32_t>({num_rows, num_top});
  auto [top, top_value] = new_array<float>({num_rows, num_top});
  auto [successors, successor] = new_array<int32_t>({num_rows, width});
  auto [candidates, candidate] = new_array<int32_t>({num_rows, breadth});
  auto [candidate_scores, candidate_score] = new_array<float>({num_rows, breadth});
  for (size_t i = 0; i < num_rows; i++) {
    params_[i].num_logprobs = num_logprobs;
    params_[i].num_successors = static_cast<int>(width);
    params_[i].num_candidates = static_cast<int>(breadth);
    results_[i].top_ids = top_id + i * num_top;
    results_[i].top = top_value + i * num_top;
    results_[i].successors = successor + i * width;
    results_[i].candidates = candidate + i * breadth;
    results_[i].candidate_scores = candidate_score + i * breadth;
  }
  if (num_logprobs >= 0) top_ids_ = top_ids, top_ = top;
  if (num_successors > 0) successors_ = successors;
  if (num_candidates > 0) candidates_ = candidates, candidate_scores_ = candidate_scores;
}

nb::object SampledRows::arrays() const {
  const size_t num_rows = results_.size();
  nb::dict arrays;
  const auto add = [&]<class T>(const char* name, T RowResult::* field) {
    const auto [array, values] = new_array<T>({num_rows});
    for (size_t i = 0; i < num_rows; i++) values[i] = results_[i].*field;
    arrays[name] = array;
  };
  add("token_ids", &RowResult::token);
  add("all_banned", &RowResult::all_banned);
  add("has_nan", &RowResult::has_nan);
  if (top_ids_.is_valid()) {
    add("token", &RowResult::logprob);
    add("rank", &RowResult::rank);
    arrays["top_ids"] = top_ids_;
    arrays["top"] = top_;
  }
  if (successors_.is_valid()) arrays["successors"] = successors_;
  if (candidates_.is_valid()) {
    arrays["candidates"] = candidates_;
    arrays["candidate_scores"] = candidate_scores_;
  }
  return arrays;
}

void bind_sampling(nb::module_& module) {
  module.def("sample_rows", &sample_rows, nb::arg("logits"), nb::arg("sampling"), nb::arg("isa") = "",
             "Samples rows of logits [M, V] float32 by a types.RowSampling.");
  module.def("row_words", &row_words, nb::arg("num_groups"), nb::kw_only(), nb::arg("seed"), nb::arg("stream"),
             nb::arg("position"), nb::arg("purpose"), nb::arg("isa") = "",
             "Words of the tokens 0 .. 32 * num_groups - 1.");
  module.def("philox4x32",
             [](std::array<uint32_t, 4> counter, uint64_t key) {
               const Words words = philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key);
               return std::array{words.word[0], words.word[1], words.word[2], words.word[3]};
             },
             nb::arg("counter"), nb::arg("key"), "One block of Philox-4x32-10.");
}

}  // namespace paceline
