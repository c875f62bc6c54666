// Python's view of the model: checks what it is given, since nothing behind it does.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "model.hpp"
#include "pack.hpp"
#include "sampled_rows.hpp"

namespace paceline {
namespace {

void require(bool holds, const char* rule) {
  if (!holds) throw std::invalid_argument(rule);
}

template <class T>
bool within(const Vector<T>& values, int64_t stop) {
  for (size_t i = 0; i < values.size(); i++)
    if (values(i) < 0 || static_cast<int64_t>(values(i)) >= stop) return false;
  return true;
}

// A model and the memory that its description points into.
class PyModel {
 public:
  PyModel(const nb::dict& spec, int num_threads, const std::string& isa) {
    ModelConfig config;
    const auto whole = [&](const char* name) { return nb::cast<int>(spec[name]); };
    const auto real = [&](const char* name) { return nb::cast<float>(spec[name]); };
    config.vocab_size = whole("vocab_size");
    config.hidden_size = whole("hidden_size");
    config.intermediate_size = whole("intermediate_size");
    config.num_heads = whole("num_heads");
    config.num_kv_heads = whole("num_kv_heads");
    config.head_dim = whole("head_dim");
    config.num_blocks = whole("num_blocks");
    config.block_size = whole("block_size");
    config.norm_eps = real("norm_eps");
    config.embedding_scale = real("embedding_scale");
    config.attention_scale = real("attention_scale");
    config.attention_softcap = real("attention_softcap");
    config.final_softcap = real("final_softcap");
    config.gelu = nb::cast<bool>(spec["gelu"]);
    config.kv_type = nb::cast<bool>(spec["int8_kv"]) ? KVType::kI8 : KVType::kI16;
    for (nb::handle entry : nb::cast<nb::list>(spec["ropes"])) {
      const auto [inverse, factor] = nb::cast<std::pair<Vector<float>, float>>(entry);
      require(inverse.size() > 0 && 2 * static_cast<int>(inverse.size()) <= config.head_dim, "a rope fits the head");
      config.ropes.push_back({{inverse.data(), inverse.data() + inverse.size()}, factor});
    }
    const int hidden = config.hidden_size, inner = config.intermediate_size, dim = config.head_dim;
    const int q_width = config.num_heads * dim, kv_width = config.num_kv_heads * dim;
    for (nb::handle entry : nb::cast<nb::list>(spec["layers"])) {
      const auto parts = nb::cast<nb::dict>(entry);
      Layer layer;
      layer.q = matrix(parts, "q", q_width, hidden);
      layer.k = matrix(parts, "k", kv_width, hidden);
      layer.v = matrix(parts, "v", kv_width, hidden);
      layer.output = matrix(parts, "output", hidden, q_width);
      layer.gate = matrix(parts, "gate", inner, hidden);
      layer.up = matrix(parts, "up", inner, hidden);
      layer.down = matrix(parts, "down", hidden, inner);
      layer.input_norm = vector(parts, "input_norm", hidden, true);
      layer.mlp_norm = vector(parts, "mlp_norm", hidden, true);
      layer.attention_norm = vector(parts, "attention_norm", hidden, false);
      layer.output_norm = vector(parts, "output_norm", hidden, false);
      layer.q_norm = vector(parts, "q_norm", dim, false);
      layer.k_norm = vector(parts, "k_norm", dim, false);
      layer.rope = nb::cast<int>(parts["rope"]);
      layer.window = nb::cast<int>(parts["window"]);
      require(layer.rope < static_cast<int>(config.ropes.size()), "a layer's rope exists");
      config.layers.push_back(layer);
    }
    config.embedding = matrix(spec, "embedding", config.vocab_size, hidden);
    config.head = matrix(spec, "head", config.vocab_size, hidden);
    config.final_norm = vector(spec, "final_norm", hidden, true);
    require(config.num_blocks > 0 && config.block_size > 0 && config.num_kv_heads > 0 && num_threads > 0 &&
                config.num_heads % config.num_kv_heads == 0,
            "sizes are positive and heads come in groups");
    require((config.block_size & (config.block_size - 1)) == 0, "block_size is a power of two");
    const Kernels& kernels = select_kernels(isa.c_str());
    isa_ = kernels.name;
    model_ = std::make_unique<Model>(std::move(config), kernels, num_threads);
  }

  nb::tuple forward(const Vector<int32_t>& token_ids, const Vector<int32_t>& positions, const Vector<int64_t>& slots,
                    const Vector<int32_t>& query_starts, const Vector<int32_t>& context_lengths,
                    const nb::list& block_tables, const nb::list& ancestors, const Vector<int32_t>& logit_rows,
                    const Vector<int32_t>& layers, const Vector<int32_t>& hidden_layers, nb::object sampling,
                    bool want_logits) {
    const ModelConfig& config = model_->config();
    const size_t tokens = token_ids.size(), requests = context_lengths.size(), rows = logit_rows.size();
    const int depth = static_cast<int>(config.layers.size());
    require(tokens > 0 && positions.size() == tokens && slots.size() == tokens, "one position and slot a token");
    require(within(token_ids, config.vocab_size), "token ids are in the vocabulary");
    require(within(positions, INT32_MAX), "positions are not negative");
    require(within(slots, static_cast<int64_t>(config.num_blocks) * config.block_size), "slots are in the pool");
    require(within(logit_rows, static_cast<int64_t>(tokens)), "logit rows are tokens of the pass");
    require(within(layers, depth) && within(hidden_layers, depth + 2), "layers exist");
    for (size_t i = 1; i < layers.size(); i++) require(layers(i - 1) < layers(i), "layers ascend");
    require(query_starts.size() == requests + 1 && query_starts(0) == 0 &&
                query_starts(requests) == static_cast<int>(tokens),
            "requests own all tokens");
    require(block_tables.size() == requests && ancestors.size() == requests, "one table and mask a request");

    Batch batch;
    batch.num_tokens = static_cast<int>(tokens);
    batch.token_ids = token_ids.data();
    batch.positions = positions.data();
    batch.slots = slots.data();
    batch.num_requests = static_cast<int>(requests);
    batch.query_starts = query_starts.data();
    batch.context_lengths = context_lengths.data();
    std::vector<Vector<int32_t>> tables;
    std::vector<Table<bool>> masks;
    for (size_t r = 0; r < requests; r++) {
      const int64_t own = static_cast<int64_t>(query_starts(r + 1)) - query_starts(r), context = context_lengths(r);
      require(own >= 0 && context >= 0, "lengths are not negative");
      tables.push_back(nb::cast<Vector<int32_t>>(block_tables[r]));
      require(within(tables.back(), config.num_blocks), "blocks are in the pool");
      require(static_cast<int64_t>(tables.back().size()) * config.block_size >= context + own, "tables cover all keys");
      batch.block_tables.push_back(tables.back().data());
      batch.ancestors.push_back(nullptr);
      if (ancestors[r].is_none()) continue;
      masks.push_back(nb::cast<Table<bool>>(ancestors[r]));
      require(masks.back().shape(0) == static_cast<size_t>(own) && masks.back().shape(1) == static_cast<size_t>(own),
              "a mask is [n, n]");
      for (int64_t i = 0; i < own; i++) require(masks.back()(i, i), "a token sees itself");
      batch.ancestors.back() = reinterpret_cast<const uint8_t*>(masks.back().data());
    }
    batch.num_rows = static_cast<int>(rows);
    batch.logit_rows = logit_rows.data();
    batch.layers.assign(layers.data(), layers.data() + layers.size());

    nb::dict hidden;
    for (size_t i = 0; i < hidden_layers.size(); i++) {
      require(!hidden.contains(nb::int_(hidden_layers(i))), "a layer's hidden states are asked for once");
      auto [array, data] = new_array<float>({tokens, static_cast<size_t>(config.hidden_size)});
      hidden[nb::int_(hidden_layers(i))] = array;
      batch.hidden.emplace_back(hidden_layers(i), data);
    }
    nb::object logits = nb::none();
    Outputs outputs;
    if (want_logits) {
      auto [array, data] = new_array<float>({rows, static_cast<size_t>(config.vocab_size)});
      logits = array;
      outputs.logits = data;
    }
    std::unique_ptr<SampledRows> sampled;
    if (!sampling.is_none()) {
      sampled = std::make_unique<SampledRows>(sampling, rows, config.vocab_size);
      outputs.sampling = sampled->params();
      outputs.results = sampled->results();
      outputs.token_map = sampled->token_map();
    }
    {
      nb::gil_scoped_release released;
      const std::scoped_lock turn(turn_);
      model_->forward(batch, outputs);
    }
    return nb::make_tuple(logits, sampled ? sampled->arrays() : nb::none(), hidden);
  }

  void move(const Vector<int64_t>& sources, const Vector<int64_t>& destinations) {
    const int64_t slots = static_cast<int64_t>(model_->config().num_blocks) * model_->config().block_size;
    require(sources.size() == destinations.size(), "one destination a source");
    require(within(sources, slots) && within(destinations, slots), "slots are in the pool");
    nb::gil_scoped_release released;
    const std::scoped_lock turn(turn_);
    model_->move(sources.data(), destinations.data(), static_cast<int>(sources.size()));
  }

  size_t weight_bytes() const { return model_->weight_bytes(); }
  const std::string& isa() const { return isa_; }

 private:
  Matrix matrix(const nb::dict& parts, const char* name, int outputs, int inputs) {
    nb::object packed = parts[name];
    Matrix view = nb::cast<const PackedMatrix&>(packed).view();
    require(view.outputs == outputs && view.inputs == inputs, "a matrix has the description's shape");
    kept_.push_back(packed);
    const std::string bias = std::string(name) + "_bias";
    if (parts.contains(bias.c_str())) view.bias = vector(parts, bias.c_str(), outputs, true);
    return view;
  }

  // A copy, padded with zeros to whole vectors.
  const float* vector(const nb::dict& parts, const char* name, int size, bool needed) {
    if (!parts.contains(name)) {
      require(!needed, "a vector is missing");
      return nullptr;
    }
    const auto values = nb::cast<Vector<float>>(parts[name]);
    require(static_cast<int>(values.size()) == size, "a vector has the description's length");
    float* copy = vectors_.emplace_back().reserve(padded(size, kLanes));
    std::memcpy(copy, values.data(), size * sizeof(float));
    return copy;
  }

  std::vector<nb::object> kept_;
  std::vector<Array<float>> vectors_;
  std::string isa_;
  std::unique_ptr<Model> model_;
  std::mutex turn_;  // Python threads that share a model wait for each other's passes
};

}  // namespace

void bind_model(nb::module_& module) {
  nb::class_<PyModel>(module, "Model", "A model with its K/V pool.")
      .def(nb::init<const nb::dict&, int, const std::string&>(), nb::arg("spec"), nb::arg("num_threads"), nb::arg("isa"))
      .def("forward", &PyModel::forward, nb::kw_only(), nb::arg("token_ids"), nb::arg("positions"), nb::arg("slots"),
           nb::arg("query_starts"), nb::arg("context_lengths"), nb::arg("block_tables"), nb::arg("ancestors"),
           nb::arg("logit_rows"), nb::arg("layers"), nb::arg("hidden_layers"), nb::arg("sampling").none(),
           nb::arg("want_logits"))
      .def("move", &PyModel::move, nb::arg("sources"), nb::arg("destinations"))
      .def_prop_ro("weight_bytes", &PyModel::weight_bytes)
      .def_prop_ro("isa", &PyModel::isa);
}

}  // namespace paceline
