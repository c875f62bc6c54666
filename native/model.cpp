#include "model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <new>

#include "pack.hpp"

namespace paceline {

namespace {

constexpr int kSerialRows = 2;         // up to here one thread does the work between two products: cheaper than a barrier
constexpr int kPiecesPerThread = 4;    // pieces of a product, so that a delayed thread leaves its share to the others
constexpr size_t kBlockBytes = 1 << 18;  // activations of the rows that go through a panel together, for the L2 cache
constexpr int kLogitRows = 32;         // rows whose logits are held at once
constexpr int kPanels = 2;             // that go through a product together

size_t attention_stride(int keys) { return padded(keys + 3 * kLanes, kLanes); }

int pairs_of(int panels) { return (panels + kPanels - 1) / kPanels; }

// The panels [first, second) of one of several pieces of a product.
std::pair<int, int> share(int panels, int pieces, int piece) {
  const int64_t pairs = pairs_of(panels);
  return {static_cast<int>(pairs * piece / pieces) * kPanels,
          std::min(panels, static_cast<int>(pairs * (piece + 1) / pieces) * kPanels)};
}

// An epilogue of a product: into the same place of some rows.
auto into(Rows& rows) {
  return [&rows](int row, int panel, const float* values) {
    std::copy_n(values, kLanes, rows.row(row) + panel * kLanes);
  };
}

}  // namespace

struct Model::Piece {
  int request;
  int kv_head;
  int first_query;  // among the request's queries of this head: row * heads per K/V head + head
  int num_queries;
};

struct Model::Pass {
  const Batch& batch;
  const Outputs& outputs;
  std::vector<Piece> pieces;
  std::vector<int> counts;                 // [T] keys that a token sees, from position 0
  std::vector<const int32_t*> paths;       // [T] own keys that a tree's node sees, or null
  std::vector<std::vector<int32_t>> path_storage;
  int first_wanted;  // row, at the start of a tile: of those before it the last layer computes only keys and values
};

Model::Model(ModelConfig config, const Kernels& kernels, int num_threads)
    : config_(std::move(config)),
      kernels_(kernels),
      threads_(num_threads),
      dim_(static_cast<int>(padded(config_.head_dim, kLanes))),
      hidden_(config_.hidden_size),
      normed_(config_.hidden_size),
      residual_(config_.hidden_size),
      q_(config_.num_heads * config_.head_dim),
      k_(config_.num_kv_heads * config_.head_dim),
      v_(config_.num_kv_heads * config_.head_dim),
      attended_(config_.num_heads * config_.head_dim),
      inner_(config_.intermediate_size),
      final_(config_.hidden_size),
      cosines_(config_.ropes.size()),
      sines_(config_.ropes.size()),
      scratch_(num_threads) {
  for (int i = 0; i < num_threads; i++) samplers_.emplace_back(kernels_, config_.vocab_size);
  const bool wide = config_.kv_type == KVType::kI16;
  const size_t slots = static_cast<size_t>(config_.num_blocks) * std::max(config_.block_size, kLanes);
  const size_t data_bytes = 2 * dim_ * (wide ? 2 : 1), scale_bytes = 2 * sizeof(float);  // of a slot and head
  const size_t own = size_t{kStretch} * config_.num_kv_heads, stretch = own * config_.layers.size();
  if (slots > SIZE_MAX / 4 / std::max<size_t>(stretch, 1) / kLanes / (data_bytes + scale_bytes)) throw std::bad_alloc();
  const size_t heads = padded(slots / kLanes, kStretch) / kStretch * stretch;  // of all tiles
  kv_ = Buffer(heads * kLanes * (data_bytes + scale_bytes));  // takes the memory of what was used of it
  uint8_t* data = kv_.data();
  auto* scales = reinterpret_cast<float*>(data + heads * kLanes * data_bytes);
  for (size_t i = 0; i < config_.layers.size(); i++, data += own * kLanes * data_bytes, scales += own * kLanes * 2) {
    pools_.push_back({.data = data,
                      .scales = scales,
                      .kv_heads = config_.num_kv_heads,
                      .stretch = stretch,
                      .dim = dim_,
                      .block_shift = std::countr_zero(static_cast<unsigned>(config_.block_size)),
                      .place_shift = std::countr_zero(static_cast<unsigned>(std::max(config_.block_size, kLanes)))});
  }
}

size_t Model::weight_bytes() const {
  size_t total = config_.head.bytes();
  for (const Layer& layer : config_.layers)
    for (const Matrix* w : {&layer.q, &layer.k, &layer.v, &layer.output, &layer.gate, &layer.up, &layer.down})
      total += w->bytes();
  return total;
}

void Model::forward(const Batch& batch, const Outputs& outputs) {
  Pass pass{batch, outputs, {}, {}, {}, {}, batch.num_tokens};
  prepare(pass);
  const TokenMap& map = outputs.token_map;
  for (RowSampler& sampler : samplers_) sampler.fit(map.ids != nullptr ? map.size : config_.vocab_size);
  threads_.run([&](int thread) { run(pass, thread); });
}

void Model::prepare(Pass& pass) {
  const Batch& batch = pass.batch;
  const int rows = batch.num_tokens, group = config_.num_heads / config_.num_kv_heads;
  for (Rows* buffer : {&hidden_, &normed_, &residual_, &q_, &k_, &v_, &attended_, &inner_}) buffer->reserve(rows);
  queries_.reserve(static_cast<size_t>(rows) * config_.num_heads * dim_);
  const int logit_rows = std::min(batch.num_rows, kLogitRows);
  final_.reserve(logit_rows);
  logits_.reserve(logit_rows * padded(config_.vocab_size, kLanes));
  for (size_t i = 0; i < config_.ropes.size(); i++) {
    const size_t half = config_.ropes[i].inverse_frequencies.size();
    cosines_[i].reserve(rows * padded(half, kLanes));
    sines_[i].reserve(rows * padded(half, kLanes));
  }
  for (int i = 0; i < batch.num_rows; i++) pass.first_wanted = std::min(pass.first_wanted, batch.logit_rows[i]);
  if (batch.num_rows > 0) pass.first_wanted -= pass.first_wanted % kTileRows;
  pass.counts.resize(rows);
  pass.paths.resize(rows, nullptr);
  int most_keys = 0;
  for (int r = 0; r < batch.num_requests; r++) {
    const int start = batch.query_starts[r], own = batch.query_starts[r + 1] - start, context = batch.context_lengths[r];
    most_keys = std::max(most_keys, context + own);
    for (int i = 0; i < own; i++) {
      pass.counts[start + i] = context + i + 1;
      if (batch.ancestors[r] == nullptr) continue;
      std::vector<int32_t>& path = pass.path_storage.emplace_back();
      for (int j = 0; j < own; j++)
        if (batch.ancestors[r][static_cast<size_t>(i) * own + j] != 0) path.push_back(j);
      pass.counts[start + i] = context + static_cast<int>(path.size());
      pass.paths[start + i] = path.data();
    }
    const int queries = own * group, size = queries_together(queries, batch.num_requests);
    for (int head = 0; head < config_.num_kv_heads; head++)  // outside: a thread's share has few heads, whose K/V it keeps
      for (int first = 0; first < queries; first += size)
        pass.pieces.push_back({r, head, first, std::min(size, queries - first)});
  }
  for (Scratch& scratch : scratch_) {
    scratch.scores.reserve(attention_scratch(attention_stride(most_keys), dim_));
    scratch.head.reserve(2 * dim_);
    scratch.outputs.reserve(kMaxQueries * dim_);
  }
}

// Of a request's queries of one head those that make a piece of attention: as many as may be, unless fewer leave the
// threads less to wait for, were all requests alike.
int Model::queries_together(int queries, int num_requests) const {
  const int64_t heads = static_cast<int64_t>(num_requests) * config_.num_kv_heads, threads = threads_.num_threads();
  int best = std::max(1, (queries + kMaxQueries - 1) / kMaxQueries);  // parts of the queries
  const auto rounds = [&](int parts) { return (heads * parts + threads - 1) / threads; };  // pieces of the busiest thread
  for (int parts = best + 1; parts <= std::min<int64_t>(queries, best + threads); parts++)
    if (rounds(parts) * best < rounds(best) * parts) best = parts;
  return (queries + best - 1) / best;
}

// Pieces of a stage, then what comes after it for each row.
template <class Body, class Row>
void Model::stage(int thread, int pieces, const Body& body, RowRange rows, const Row& row) {
  if (rows.last - rows.first <= kSerialRows) {
    threads_.each(thread, pieces, body, [&] {
      for (int i = rows.first; i < rows.last; i++) row(i);
    });
  } else {
    threads_.each(thread, pieces, body);
    each_row(thread, rows, row);
  }
}

// By whole blocks where they are enough for all threads: those share cache lines.
template <class Row>
void Model::each_row(int thread, RowRange rows, const Row& row) {
  const int count = rows.last - rows.first, size = count > kBlockRows * (threads_.num_threads() - 1) ? kBlockRows : 1;
  threads_.each(thread, (count + size - 1) / size, [&](int piece) {
    const int begin = rows.first + piece * size;
    for (int i = begin; i < std::min(rows.last, begin + size); i++) row(i);
  });
}

// Panels [first_panel, last_panel) of w times the rows: store(row, panel, values [16]) for each.
template <class Epilogue>
void Model::multiply(const Matrix& w, const Activations& x, RowRange rows, int first_panel, int last_panel,
                     const Epilogue& store) {
  alignas(64) float tile[kPanels * kTileRows * kLanes];
  const size_t row_bytes = is_quantised(w.format) ? x.groups * kGroup : x.stride * sizeof(float);
  const int block = std::max<int>(kTileRows, static_cast<int>(kBlockBytes / row_bytes) / kTileRows * kTileRows);
  for (int begin = rows.first; begin < rows.last; begin += block) {
    const int end = std::min(rows.last, begin + block);
    for (int panel = first_panel, panels = 0; panel < last_panel; panel += panels) {
      panels = std::min(kPanels - panel % kPanels, last_panel - panel);
      for (int row = begin; row < end; row += kTileRows) {
        const int count = std::min(kTileRows, end - row);
        kernels_.tile[static_cast<int>(w.format)](w, panel, panels, x, row, count, tile);
        for (int p = 0; p < panels; p++)
          for (int i = 0; i < count; i++) store(row + i, panel + p, tile + (p * kTileRows + i) * kLanes);
      }
    }
  }
}

void Model::run(Pass& pass, int thread) noexcept {
  const Batch& batch = pass.batch;
  each_row(thread, {0, batch.num_tokens}, [&](int row) {
    unpack_row(config_.embedding, batch.token_ids[row], hidden_.row(row));
    if (config_.embedding_scale != 1.0f)
      for (int i = 0; i < config_.hidden_size; i++) hidden_.row(row)[i] *= config_.embedding_scale;
    for (size_t i = 0; i < config_.ropes.size(); i++) {
      const std::vector<float>& inverse = config_.ropes[i].inverse_frequencies;
      const size_t at = row * padded(inverse.size(), kLanes);
      for (size_t j = 0; j < inverse.size(); j++) {
        const double angle = static_cast<float>(batch.positions[row]) * inverse[j];  // rounded to float32, as trained
        cosines_[i].data()[at + j] = static_cast<float>(std::cos(angle)) * config_.ropes[i].factor;
        sines_[i].data()[at + j] = static_cast<float>(std::sin(angle)) * config_.ropes[i].factor;
      }
    }
    enter(pass, 0, row);
  });
  for (size_t at = 0; at < batch.layers.size(); at++) run_layer(pass, at, thread);
  sample(pass, thread);
}

// The row as it enters the layer that runs at a place of the pass, and those skipped before it, or leaves the last one.
void Model::enter(Pass& pass, size_t at, int row) {
  const bool last = at == pass.batch.layers.size();
  const int number = last ? static_cast<int>(config_.layers.size()) : pass.batch.layers[at];
  const int first = at == 0 ? 0 : pass.batch.layers[at - 1] + 1;
  for (const auto& [layer, out] : pass.batch.hidden) {
    float* to = out + static_cast<size_t>(row) * config_.hidden_size;
    if (first <= layer && layer <= number) std::copy_n(hidden_.row(row), config_.hidden_size, to);
    if (last && layer == number + 1)
      kernels_.rms_norm(hidden_.row(row), config_.final_norm, config_.hidden_size, config_.norm_eps, to);
  }
  if (last) return;
  const Layer& layer = config_.layers[number];
  kernels_.rms_norm(hidden_.row(row), layer.input_norm, config_.hidden_size, config_.norm_eps, normed_.row(row));
  if (is_quantised(layer.q.format) || is_quantised(layer.k.format) || is_quantised(layer.v.format))
    normed_.quantise(kernels_, row);
}

void Model::run_layer(Pass& pass, size_t at, int thread) {
  const int number = pass.batch.layers[at];
  const Layer& layer = config_.layers[number];
  RowRange rows{0, pass.batch.num_tokens};
  if (at + 1 == pass.batch.layers.size() && pass.batch.hidden.empty()) rows.first = pass.first_wanted;
  attention_block(layer, pools_[number], pass, rows, thread);
  if (rows.first < rows.last) mlp_block(layer, rows, thread, [&](int row) { enter(pass, at + 1, row); });
}

// Keys and values of all rows go into the pool; only the given ones are computed beyond that.
void Model::attention_block(const Layer& layer, const KVPool& pool, Pass& pass, RowRange rows, int thread) {
  const RowRange all{0, pass.batch.num_tokens};
  const Matrix* projections[] = {&layer.q, &layer.k, &layer.v};
  Rows* projected[] = {&q_, &k_, &v_};
  const int qkv_panels = layer.q.panels() + layer.k.panels() + layer.v.panels(), qkv_pieces = pieces_of(qkv_panels);
  stage(
      thread, qkv_pieces,
      [&](int piece) {
        auto [begin, end] = share(qkv_panels, qkv_pieces, piece);
        for (int i = 0; i < 3; i++) {
          const int panels = projections[i]->panels();
          multiply(*projections[i], normed_.view(), i == 0 ? rows : all, std::clamp(begin, 0, panels),
                   std::clamp(end, 0, panels), into(*projected[i]));
          begin -= panels;
          end -= panels;
        }
      },
      all, [&](int row) { cache_row(layer, pool, pass, row, thread); });
  if (rows.first >= rows.last) return;

  threads_.each(thread, static_cast<int>(pass.pieces.size()),
                [&](int piece) { attend(layer, pool, pass, rows, piece, thread); });
  if (is_quantised(layer.output.format) && config_.head_dim % kGroup != 0)  // attend rounds heads of whole groups
    each_row(thread, rows, [&](int row) { attended_.quantise(kernels_, row); });

  const int pieces = pieces_of(layer.output.panels());
  stage(
      thread, pieces,
      [&](int piece) {
        const auto [begin, end] = share(layer.output.panels(), pieces, piece);
        multiply(layer.output, attended_.view(), rows, begin, end, into(residual_));
      },
      rows,
      [&](int row) {
        add_residual(row, layer.attention_norm);
        kernels_.rms_norm(hidden_.row(row), layer.mlp_norm, config_.hidden_size, config_.norm_eps, normed_.row(row));
        if (is_quantised(layer.gate.format) || is_quantised(layer.up.format)) normed_.quantise(kernels_, row);
      });
}

// What follows is called for each row when it has left the block.
template <class Next>
void Model::mlp_block(const Layer& layer, RowRange rows, int thread, const Next& next) {
  const int panels = layer.gate.panels(), inner_pieces = pieces_of(panels);
  const bool rounds = is_quantised(layer.down.format);
  threads_.each(thread, inner_pieces, [&](int piece) {
    const auto [begin, end] = share(panels, inner_pieces, piece);
    multiply(layer.gate, normed_.view(), rows, begin, end, into(inner_));
    multiply(layer.up, normed_.view(), rows, begin, end, [&](int row, int panel, const float* values) {
      float* inner = inner_.row(row) + panel * kLanes;
      kernels_.gate(inner, values, kLanes, config_.gelu, inner);
      if (rounds && (panel % kPanels == kPanels - 1 || panel == panels - 1))  // a pair of panels is a group of inputs
        inner_.quantise(kernels_, row, panel / kPanels * kGroup, kGroup);
    });
  });

  const int pieces = pieces_of(layer.down.panels());
  stage(
      thread, pieces,
      [&](int piece) {
        const auto [begin, end] = share(layer.down.panels(), pieces, piece);
        multiply(layer.down, inner_.view(), rows, begin, end, into(residual_));
      },
      rows,
      [&](int row) {
        add_residual(row, layer.output_norm);
        next(row);
      });
}

// Adds what a block gives to the row, in sandwich layers through its norm.
void Model::add_residual(int row, const float* norm) {
  float* output = residual_.row(row);
  if (norm != nullptr) kernels_.rms_norm(output, norm, config_.hidden_size, config_.norm_eps, output);
  kernels_.add(output, static_cast<int>(padded(config_.hidden_size, kLanes)), hidden_.row(row));
}

int Model::pieces_of(int panels) const { return std::min(pairs_of(panels), threads_.num_threads() * kPiecesPerThread); }

// Norms and rotates a row's queries and keys, and writes its K/V into the pool.
void Model::cache_row(const Layer& layer, const KVPool& pool, Pass& pass, int row, int thread) {
  const int dim = config_.head_dim;
  const auto finish = [&](float* head, const float* norm) {
    if (norm != nullptr) kernels_.rms_norm(head, norm, dim, config_.norm_eps, head);
    if (layer.rope < 0) return;
    const int half = static_cast<int>(config_.ropes[layer.rope].inverse_frequencies.size());
    const size_t at = row * padded(half, kLanes);
    kernels_.rotate(head, cosines_[layer.rope].data() + at, sines_[layer.rope].data() + at, half);
  };
  for (int head = 0; head < config_.num_heads; head++) {
    float* query = queries_.data() + (static_cast<size_t>(row) * config_.num_heads + head) * dim_;
    std::copy_n(q_.row(row) + head * dim, dim, query);
    finish(query, layer.q_norm);
  }
  float *key = scratch_[thread].head.data(), *value = key + dim_;  // what is beyond head_dim stays zero
  for (int head = 0; head < config_.num_kv_heads; head++) {
    std::copy_n(k_.row(row) + head * dim, dim, key);
    finish(key, layer.k_norm);
    std::copy_n(v_.row(row) + head * dim, dim, value);
    kernels_.store_kv[static_cast<int>(config_.kv_type)](pool, pass.batch.slots[row], head, key, value);
  }
}

void Model::attend(const Layer& layer, const KVPool& pool, Pass& pass, RowRange rows, int index, int thread) {
  const Piece& piece = pass.pieces[index];
  const Batch& batch = pass.batch;
  Scratch& scratch = scratch_[thread];
  const int group = config_.num_heads / config_.num_kv_heads, start = batch.query_starts[piece.request];
  if (start + (piece.first_query + piece.num_queries - 1) / group < rows.first) return;
  const int keys = batch.context_lengths[piece.request] + batch.query_starts[piece.request + 1] - start;
  AttentionTask task{.pool = pool,
                     .kv_head = piece.kv_head,
                     .blocks = batch.block_tables[piece.request],
                     .context = batch.context_lengths[piece.request],
                     .num_queries = piece.num_queries,
                     .queries = {},
                     .outputs = {},
                     .first = {},
                     .count = {},
                     .path = {},
                     .scale = config_.attention_scale,
                     .softcap = config_.attention_softcap,
                     .scratch = scratch.scores.data(),
                     .scratch_stride = attention_stride(keys)};
  const bool direct = dim_ == config_.head_dim;
  for (int i = 0; i < piece.num_queries; i++) {
    const int row = start + (piece.first_query + i) / group;
    const int head = piece.kv_head * group + (piece.first_query + i) % group;
    task.queries[i] = queries_.data() + (static_cast<size_t>(row) * config_.num_heads + head) * dim_;
    task.outputs[i] = direct ? attended_.row(row) + head * dim_ : scratch.outputs.data() + i * dim_;
    task.count[i] = pass.counts[row];
    task.first[i] = layer.window > 0 ? std::max(0, pass.counts[row] - layer.window) : 0;
    task.path[i] = pass.paths[row];
  }
  kernels_.attend[static_cast<int>(config_.kv_type)](task);
  const bool rounds = is_quantised(layer.output.format) && config_.head_dim % kGroup == 0;
  for (int i = 0; i < piece.num_queries; i++) {
    const int row = start + (piece.first_query + i) / group;
    const int head = piece.kv_head * group + (piece.first_query + i) % group;
    if (!direct) std::copy_n(task.outputs[i], config_.head_dim, attended_.row(row) + head * config_.head_dim);
    if (rounds) attended_.quantise(kernels_, row, head * config_.head_dim, config_.head_dim);
  }
}

// Logits of the wanted rows, some at a time, and what is asked of them.
void Model::sample(Pass& pass, int thread) {
  const Batch& batch = pass.batch;
  const int width = static_cast<int>(padded(config_.vocab_size, kLanes));
  const int panels = config_.head.panels(), pieces = pieces_of(panels);
  for (int begin = 0; begin < batch.num_rows; begin += kLogitRows) {
    const int count = std::min(kLogitRows, batch.num_rows - begin);
    each_row(thread, {0, count}, [&](int i) {
      const float* row = hidden_.row(batch.logit_rows[begin + i]);
      kernels_.rms_norm(row, config_.final_norm, config_.hidden_size, config_.norm_eps, final_.row(i));
      if (is_quantised(config_.head.format)) final_.quantise(kernels_, i);
    });
    threads_.each(thread, pieces, [&](int piece) {
      const auto [first, last] = share(panels, pieces, piece);
      multiply(config_.head, final_.view(), {0, count}, first, last, [&](int row, int panel, const float* values) {
                 std::copy_n(values, kLanes, logits_.data() + static_cast<size_t>(row) * width + panel * kLanes);
               });
    });
    threads_.each(thread, count, [&](int i) {
      float* row = logits_.data() + static_cast<size_t>(i) * width;
      if (config_.final_softcap > 0) kernels_.softcap(row, width, config_.final_softcap);
      if (pass.outputs.logits != nullptr)
        std::copy_n(row, config_.vocab_size, pass.outputs.logits + static_cast<size_t>(begin + i) * config_.vocab_size);
      if (pass.outputs.sampling != nullptr)
        samplers_[thread].sample(row, pass.outputs.sampling[begin + i], pass.outputs.token_map,
                                 pass.outputs.results[begin + i]);
    });
  }
}

void Model::move(const int64_t* sources, const int64_t* destinations, int count) {
  const size_t element = config_.kv_type == KVType::kI16 ? 2 : 1, heads = config_.num_kv_heads;
  std::vector<uint8_t> kept(count * heads * 2 * (dim_ * element + sizeof(float)));
  for (const KVPool& pool : pools_) {
    // Calls copy(what lies in the pool, its place among what is kept, bytes) for all parts of a slot.
    const auto visit = [&](int64_t slot, uint8_t* to, const auto& copy) {
      const int64_t place = pool.place(slot);
      const auto part = [&](void* at, size_t bytes) {
        copy(at, to, bytes);
        to += bytes;
      };
      for (int head = 0; head < static_cast<int>(heads); head++) {
        auto* data = static_cast<uint8_t*>(pool.data);
        for (int d = 0; d < dim_; d++) {
          part(data + pool.key_at(place, head, d) * element, element);
          part(data + pool.value_at(place, head, d) * element, element);
        }
        float* scales = pool.scales + pool.scales_at(place, head) + place % kLanes;
        part(scales, sizeof(float));
        part(scales + kLanes, sizeof(float));
      }
    };
    const size_t bytes = kept.size() / std::max(count, 1);
    for (int i = 0; i < count; i++)
      visit(sources[i], &kept[i * bytes], [](const void* at, void* to, size_t size) { std::memcpy(to, at, size); });
    for (int i = 0; i < count; i++)
      visit(destinations[i], &kept[i * bytes], [](void* at, const void* from, size_t size) { std::memcpy(at, from, size); });
  }
}

}  // namespace paceline
