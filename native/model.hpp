// A decoder of the Llama family with its paged K/V pool: one packed pass at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "array.hpp"
#include "buffer.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "sampling.hpp"
#include "thread_pool.hpp"

namespace paceline {

struct Layer {
  Matrix q, k, v, output, gate, up, down;
  const float* input_norm = nullptr;      // [hidden]
  const float* q_norm = nullptr;          // [head_dim], or none
  const float* k_norm = nullptr;
  const float* attention_norm = nullptr;  // after attention, in sandwich layers
  const float* mlp_norm = nullptr;
  const float* output_norm = nullptr;  // after the MLP, in sandwich layers
  int rope = -1;                       // index into ModelConfig::ropes, -1 = positions play no part
  int window = 0;                      // a query sees keys less than this behind it, 0 = all
};

struct Rope {
  std::vector<float> inverse_frequencies;  // [half of the rotated dimensions]
  float factor = 1;                        // multiplies sines and cosines
};

struct ModelConfig {
  int vocab_size = 0, hidden_size = 0, intermediate_size = 0;
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float norm_eps = 0, embedding_scale = 1, attention_scale = 1;
  float attention_softcap = 0, final_softcap = 0;  // 0 = none
  bool gelu = false;
  KVType kv_type = KVType::kI16;
  int num_blocks = 0, block_size = 0;
  std::vector<Rope> ropes;
  std::vector<Layer> layers;
  Matrix embedding, head;
  const float* final_norm = nullptr;
};

// types.ForwardBatch. Arrays are the caller's; the binding has checked every index.
struct Batch {
  int num_tokens = 0;
  const int32_t* token_ids = nullptr;   // [T]
  const int32_t* positions = nullptr;   // [T]
  const int64_t* slots = nullptr;       // [T]
  int num_requests = 0;
  const int32_t* query_starts = nullptr;     // [R+1]
  const int32_t* context_lengths = nullptr;  // [R]
  std::vector<const int32_t*> block_tables;  // [R]
  std::vector<const uint8_t*> ancestors;     // [R] [n, n] masks, null = causal
  int num_rows = 0;
  const int32_t* logit_rows = nullptr;                  // [M]
  std::vector<int> layers;                              // those that run, ascending
  std::vector<std::pair<int, float*>> hidden;           // layer and [T, hidden_size]; L + 1 = after the final norm
};

// What becomes of the wanted rows; a part that is not wanted is null.
struct Outputs {
  const RowParams* sampling = nullptr;  // [M], null = logits alone are wanted
  TokenMap token_map;                   // for the sampling
  RowResult* results = nullptr;         // [M]
  float* logits = nullptr;              // [M, vocab_size]
};

class Model {
 public:
  // Throws std::bad_alloc where memory does not hold the pool.
  Model(ModelConfig config, const Kernels& kernels, int num_threads);

  void forward(const Batch& batch, const Outputs& outputs);
  void move(const int64_t* sources, const int64_t* destinations, int count);

  const ModelConfig& config() const { return config_; }
  size_t weight_bytes() const;  // read by a pass over all layers with one wanted row

 private:
  struct Pass;   // what the threads of a pass share
  struct Piece;  // up to kMaxQueries queries of one request
  struct RowRange {
    int first, last;  // first is a multiple of kTileRows
  };

  void prepare(Pass& pass);
  void run(Pass& pass, int thread) noexcept;  // all memory that it needs was reserved by prepare
  void run_layer(Pass& pass, size_t at, int thread);
  void attention_block(const Layer& layer, const KVPool& pool, Pass& pass, RowRange rows, int thread);
  template <class Next>
  void mlp_block(const Layer& layer, RowRange rows, int thread, const Next& next);
  void enter(Pass& pass, size_t at, int row);
  void cache_row(const Layer& layer, const KVPool& pool, Pass& pass, int row, int thread);
  void attend(const Layer& layer, const KVPool& pool, Pass& pass, RowRange rows, int piece, int thread);
  void add_residual(int row, const float* norm);
  void sample(Pass& pass, int thread);
  int queries_together(int queries, int num_requests) const;
  int pieces_of(int panels) const;  // that a product is cut into
  template <class Epilogue>
  void multiply(const Matrix& w, const Activations& x, RowRange rows, int first_panel, int last_panel,
                const Epilogue& store);
  template <class Row>
  void each_row(int thread, RowRange rows, const Row& row);
  template <class Body, class Row>
  void stage(int thread, int pieces, const Body& body, RowRange rows, const Row& row);

  struct Scratch {  // of one thread
    Array<float> scores, head, outputs;
  };

  ModelConfig config_;
  const Kernels& kernels_;
  ThreadPool threads_;
  int dim_;  // head_dim padded to whole vectors
  Buffer kv_;
  std::vector<KVPool> pools_;  // one a layer
  Rows hidden_, normed_, residual_, q_, k_, v_, attended_, inner_, final_;
  Array<float> queries_, logits_;
  std::vector<Array<float>> cosines_, sines_;  // one a rope
  std::vector<Scratch> scratch_;
  std::vector<RowSampler> samplers_;
};

}  // namespace paceline
