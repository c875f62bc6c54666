// The table of vector kernels. One instance for each instruction set, chosen at run time; the model calls nothing else.
//
// Every kernel is row-invariant: what it writes for a row, query or head is a fixed sequence of operations on that
// row's own inputs, whatever is computed beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format.hpp"
#include "vocabulary_kernels.hpp"

namespace paceline {

constexpr int kTileRows = 16;  // rows of one GEMM tile
constexpr int kMaxQueries = 16;  // of one attention task
constexpr int kStretch = 32;   // tiles of a layer's K/V that lie side by side
constexpr int kBlockRows = 4;  // rows of a register block, two panels wide: more of either would not fit

// Inputs of a GEMM: rows as float32 and, for quantised weights, as int8 in groups of 32 with a scale each. The latter lie
// in blocks of kBlockRows rows, group by group, so that a kernel reads them as one stream too.
struct Activations {
  const float* values = nullptr;           // [rows, stride], padded with zeros to whole groups
  size_t stride = 0;
  const int8_t* quants = nullptr;          // [blocks, groups, kBlockRows, 32]
  const float* scales = nullptr;           // [blocks, groups, kBlockRows]
  const float* scaled_sums = nullptr;      // [blocks, groups, kBlockRows] scale * sum of the group's quants
  const int32_t* negative_sums = nullptr;  // [blocks, groups, kBlockRows, 2] minus the sum of each half group's quants
  size_t groups = 0;
};

// Where one row of quantised inputs is written: its place in the first group of its block.
struct QuantisedRow {
  int8_t* quants;
  float* scales;
  float* scaled_sums;
  int32_t* negative_sums;
};

// Where the K/V of one layer lies, as integers with one scale a token and head: tiles of 16 slots, each [kv_heads] of keys
// [dim / 2, 16, 2] and values [8, dim, 2], pairs that one instruction multiplies and adds; scales are [tiles, kv_heads] of
// keys' [16] and values' [16]. Both come in stretches of kStretch tiles, between which the other layers' lie. Blocks of
// less than 16 slots take a tile each. dim is head_dim padded to 16.
struct KVPool {
  void* data = nullptr;
  float* scales = nullptr;
  int kv_heads = 0;
  size_t stretch = 0;   // heads from a stretch of kStretch tiles to the next: other layers' stretches lie in between
  int dim = 0;
  int block_shift = 0;  // log2 of the tokens of a block
  int place_shift = 0;  // log2 of the places that a block takes, 16 at least

  // Index of a slot (block * tokens + offset) in an array of whole tiles.
  int64_t place(int64_t slot) const {
    return (slot >> block_shift << place_shift) + (slot & ((int64_t{1} << block_shift) - 1));
  }
  // Slots of a tile that are in use.
  int tile_lanes() const { return 1 << block_shift < kLanes ? 1 << block_shift : kLanes; }
  // Index of a place's tile and head in data (elements), and in scales.
  size_t tile_at(int64_t place, int head) const { return head_of(place, head) * 2 * dim * kLanes; }
  size_t scales_at(int64_t place, int head) const { return head_of(place, head) * 2 * kLanes; }
  // Index of a dimension of the key, or value, that lies at a place.
  size_t key_at(int64_t place, int head, int d) const {
    return tile_at(place, head) + d / 2 * 2 * kLanes + place % kLanes * 2 + d % 2;
  }
  size_t value_at(int64_t place, int head, int d) const {
    return tile_at(place, head) + (kLanes + place % kLanes / 2 * 2) * dim + 2 * d + place % 2;
  }

 private:
  size_t head_of(int64_t place, int head) const {
    const size_t tile = place / kLanes;
    return tile / kStretch * stretch + tile % kStretch * kv_heads + head;
  }
};

// Floats that an attention task works in: scores, then weights; rounded queries; scales of values.
constexpr size_t attention_scratch(size_t stride, size_t dim) { return (kMaxQueries + 3) * stride + kMaxQueries * dim; }

// Up to kMaxQueries queries of one request and one K/V head.
struct AttentionTask {
  KVPool pool;
  int kv_head = 0;
  const int32_t* blocks = nullptr;  // the request's block table
  int context = 0;                  // keys before this pass
  int num_queries = 0;
  const float* queries[kMaxQueries];  // [dim]
  float* outputs[kMaxQueries];        // [dim]
  int first[kMaxQueries];             // first key seen
  int count[kMaxQueries];             // keys from position 0 up to the query's own, itself included
  const int32_t* path[kMaxQueries];   // of a tree's node: own key indices seen [count - context], ascending; or none
  float scale = 1;
  float softcap = 0;                // 0 = none
  float* scratch = nullptr;         // attention_scratch(scratch_stride, dim) floats
  size_t scratch_stride = 0;        // a multiple of 16, at least the request's keys + 48
};

enum class KVType : uint8_t { kI16, kI8 };

struct Kernels {
  const char* name;
  // tile [panels, kTileRows, 16] = rows row0.. of x times one or two panels; row0 is a multiple of kTileRows
  void (*tile[kNumFormats])(const Matrix& w, int panel, int panels, const Activations& x, int row0, int rows, float* tile);
  void (*rms_norm)(const float* x, const float* gain, int n, float eps, float* y);
  void (*add)(const float* x, int n, float* y);  // y += x; n is a multiple of 16
  void (*quantise)(const float* x, int n, const QuantisedRow& row);
  void (*rotate)(float* head, const float* cosines, const float* sines, int half);
  void (*gate)(const float* gate, const float* up, int n, bool gelu, float* y);  // n is a multiple of 16
  void (*softcap)(float* x, int n, float cap);                                   // n is a multiple of 16
  void (*store_kv[2])(const KVPool& pool, int64_t slot, int kv_head, const float* key, const float* value);
  void (*attend[2])(const AttentionTask& task);
  VocabularyKernels vocabulary;
};

// By name ("avx512", "avx2vnni", "avx2", "portable"), or the best that the machine has for an empty one.
// Throws std::invalid_argument for a name that is unknown or that the machine cannot run.
const Kernels& select_kernels(const char* name);

}  // namespace paceline
