// Attention over the paged cache.
//
// A query's result is fixed by its own keys in the order of their positions: every score is one chain over the head's
// dimensions, the softmax sums lanes counted from the first key seen, and values are added key by key. Slots, blocks,
// chunks, other queries and other branches of a tree only decide which scores are computed along the way and dropped.
#pragma once

#include "elementwise.hpp"

namespace paceline {
namespace {

template <class V, KVType kType>
inline typename V::F load_kv(const void* base, size_t index) {
  if constexpr (kType == KVType::kF16) return V::load_f16(static_cast<const uint16_t*>(base) + index);
  return V::load_i8(static_cast<const int8_t*>(base) + index);
}

// Scores of one or two tiles of 16 keys for all queries: out[q][0..15] and on. queries is [dim, kMaxQueries].
template <class V, KVType kType, int kTiles, int kQueries>
inline void score_tiles(const AttentionTask& task, const float* queries, const int64_t* places, float* const* out) {
  using F = typename V::F;
  const KVPool& pool = task.pool;
  size_t start[kTiles];
  F sums[kTiles][kQueries];
  for (int t = 0; t < kTiles; t++) {
    start[t] = pool.tile_at(places[t], task.kv_head);
    for (int q = 0; q < kQueries; q++) sums[t][q] = V::zero();
  }
  for (int d = 0; d < pool.dim; d++) {
    F keys[kTiles];
    for (int t = 0; t < kTiles; t++) keys[t] = load_kv<V, kType>(pool.data, start[t] + static_cast<size_t>(d) * kLanes);
    for (int q = 0; q < kQueries; q++) {
      const F query = V::set1(queries[d * kMaxQueries + q]);
      for (int t = 0; t < kTiles; t++) sums[t][q] = V::fma(keys[t], query, sums[t][q]);
    }
  }
  for (int t = 0; t < kTiles; t++) {
    F factor = V::set1(task.scale);
    if constexpr (kType == KVType::kI8)
      factor = V::mul(factor, V::load(pool.scales + pool.scales_at(places[t], task.kv_head)));
    for (int q = 0; q < kQueries; q++) {
      F score = V::mul(sums[t][q], factor);
      if (task.softcap > 0) score = V::mul(tanh_of<V>(V::div(score, V::set1(task.softcap))), V::set1(task.softcap));
      V::store(out[q] + t * kLanes, score);
    }
  }
}

template <class V, KVType kType, int kTiles>
inline void score_tiles(const AttentionTask& task, const float* queries, const int64_t* places, float* const* out) {
  constexpr int kTogether = V::kManyRegisters ? 8 : 4;  // queries
  for (int q = 0; q < task.num_queries; q += kTogether, queries += kTogether, out += kTogether) {
    const int rest = task.num_queries - q;
    switch (rest < kTogether ? rest : kTogether) {
      case 1: score_tiles<V, kType, kTiles, 1>(task, queries, places, out); break;
      case 2: score_tiles<V, kType, kTiles, 2>(task, queries, places, out); break;
      case 3: score_tiles<V, kType, kTiles, 3>(task, queries, places, out); break;
      case 4: score_tiles<V, kType, kTiles, 4>(task, queries, places, out); break;
      case 5: score_tiles<V, kType, kTiles, 5>(task, queries, places, out); break;
      case 6: score_tiles<V, kType, kTiles, 6>(task, queries, places, out); break;
      case 7: score_tiles<V, kType, kTiles, 7>(task, queries, places, out); break;
      default: score_tiles<V, kType, kTiles, 8>(task, queries, places, out); break;
    }
  }
}

// Scores [count] become weights that sum to 1; up to 15 floats behind them are overwritten.
template <class V>
inline void softmax(float* scores, int count) {
  using F = typename V::F;
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i = count; i < padded; i++) scores[i] = -1e30f;
  F best = V::load(scores);
  for (int i = kLanes; i < padded; i += kLanes) best = V::max(best, V::load(scores + i));
  const F largest = V::set1(V::largest(best));
  F total = V::zero();
  for (int i = 0; i < padded; i += kLanes) {
    const F weight = exp_of<V>(V::sub(V::load(scores + i), largest));
    V::store(scores + i, weight);
    total = V::add(total, weight);
  }
  const F inverse = V::set1(1.0f / V::sum(total));
  for (int i = 0; i < padded; i += kLanes) V::store(scores + i, V::mul(V::load(scores + i), inverse));
}

// The index of a key of the request in an array of whole tiles.
inline int64_t place_of(const AttentionTask& task, int key) {
  const int block = key >> task.pool.block_shift, offset = key & ((1 << task.pool.block_shift) - 1);
  return (static_cast<int64_t>(task.blocks[block]) << task.pool.place_shift) + offset;
}

// Adds weight * value of count keys that lie side by side in their tile, from the one at place on, to kVectors * 16
// dimensions of kQueries outputs, from dimension d on. weights[q] is indexed by key.
template <class V, KVType kType, int kQueries, int kVectors>
inline void add_run(const AttentionTask& task, int first_query, const float* const* weights, int key, int count,
                    int64_t place, int d) {
  using F = typename V::F;
  const KVPool& pool = task.pool;
  const size_t lane = place % kLanes, scales = pool.scales_at(place, task.kv_head) + kLanes + lane;
  size_t row = pool.tile_at(place, task.kv_head) + (kLanes + lane) * pool.dim + d;
  F sums[kQueries][kVectors];
  const float* own[kQueries];  // of each query: its weights of these keys
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; q++) {
    own[q] = weights[q] + key;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sums[q][v] = V::load(task.outputs[first_query + q] + d + v * kLanes);
  }
  for (int i = 0; i < count; i++, row += pool.dim) {
    F values[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) values[v] = load_kv<V, kType>(pool.data, row + v * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; q++) {
      F factor = V::set1(own[q][i]);
      if constexpr (kType == KVType::kI8) factor = V::mul(factor, V::set1(pool.scales[scales + i]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sums[q][v] = V::fma(factor, values[v], sums[q][v]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) V::store(task.outputs[first_query + q] + d + v * kLanes, sums[q][v]);
}

// Adds weight * value of the keys [begin, end) to kQueries outputs; path, if any, says which own keys of the pass a node's
// keys are.
template <class V, KVType kType, int kQueries>
inline void add_values(const AttentionTask& task, int first_query, const float* const* weights, int begin, int end,
                       const int32_t* path) {
  constexpr int kVectors = V::kManyRegisters || kQueries == 1 ? 4 : kQueries == 2 ? 2 : 1;  // at once
  for (int key = begin, count; key < end; key += count) {
    const int index = path != nullptr && key >= task.context ? task.context + path[key - task.context] : key;
    const int64_t place = place_of(task, index);
    const int rest = task.pool.tile_lanes() - static_cast<int>(place % kLanes);
    count = path != nullptr ? 1 : end - key < rest ? end - key : rest;
    int d = 0;
    for (; d + kVectors * kLanes <= task.pool.dim; d += kVectors * kLanes)
      add_run<V, kType, kQueries, kVectors>(task, first_query, weights, key, count, place, d);
    for (; d < task.pool.dim; d += kLanes) add_run<V, kType, kQueries, 1>(task, first_query, weights, key, count, place, d);
  }
}

constexpr int kTilesAhead = 2;  // how far before their scores keys and values are fetched

template <class V, KVType kType>
inline void prefetch_tile(const AttentionTask& task, int64_t place) {
  const size_t element = kType == KVType::kF16 ? 2 : 1, bytes = 2 * element * task.pool.dim * kLanes;
  const char* tile = static_cast<const char*>(task.pool.data) + task.pool.tile_at(place, task.kv_head) * element;
  for (size_t line = 0; line < bytes; line += 64) V::prefetch(tile + line);
}

// Scores of the keys [base, last) for all queries, into rows by key - base, which is the start of a tile.
template <class V, KVType kType>
inline void score(const AttentionTask& task, int base, int last, int lanes, float* const* rows) {
  float* queries = task.scratch + kMaxQueries * task.scratch_stride;
  for (int q = 0; q < task.num_queries; q++)
    for (int d = 0; d < task.pool.dim; d++) queries[d * kMaxQueries + q] = task.queries[q][d];
  for (int key = base; key < last; key += lanes) {  // ascending: what a short tile writes beyond its lanes is overwritten
    float* out[kMaxQueries];
    for (int q = 0; q < task.num_queries; q++) out[q] = rows[q] + (key - base);
    for (int ahead = key + kTilesAhead * lanes; ahead < last && ahead < key + (kTilesAhead + 2) * lanes; ahead += lanes)
      prefetch_tile<V, kType>(task, place_of(task, ahead));
    const bool two = V::kManyRegisters && lanes == kLanes && key + lanes < last;
    const int64_t places[] = {place_of(task, key), two ? place_of(task, key + lanes) : -1};
    if (two) {
      score_tiles<V, kType, 2>(task, queries, places, out);
      key += lanes;
    } else {
      score_tiles<V, kType, 1>(task, queries, places, out);
    }
  }
}

// Adds the values of all keys that each query sees, from zero: those that several queries see once for all of them.
template <class V, KVType kType>
inline void add_all_values(const AttentionTask& task, const float* const* weights) {
  constexpr int kShared = 4;  // queries that share the loads of values
  for (int q = 0; q < task.num_queries; q++)
    for (int d = 0; d < task.pool.dim; d += kLanes) V::store(task.outputs[q] + d, V::zero());
  for (int q = 0; q < task.num_queries; q += kShared) {
    const int size = task.num_queries - q < kShared ? task.num_queries - q : kShared;
    int begin = task.first[q], end = task.count[q];
    for (int i = q; i < q + size; i++) {
      if (task.first[i] > begin) begin = task.first[i];
      const int shared_end = task.path[i] != nullptr && task.context < task.count[i] ? task.context : task.count[i];
      if (shared_end < end) end = shared_end;
    }
    if (end < begin) end = begin;
    for (int i = q; i < q + size; i++)
      add_values<V, kType, 1>(task, i, weights + i, task.first[i], begin < task.count[i] ? begin : task.count[i],
                              task.path[i]);
    switch (size) {
      case 1: add_values<V, kType, 1>(task, q, weights + q, begin, end, nullptr); break;
      case 2: add_values<V, kType, 2>(task, q, weights + q, begin, end, nullptr); break;
      case 3: add_values<V, kType, 3>(task, q, weights + q, begin, end, nullptr); break;
      default: add_values<V, kType, 4>(task, q, weights + q, begin, end, nullptr); break;
    }
    for (int i = q; i < q + size; i++) add_values<V, kType, 1>(task, i, weights + i, end, task.count[i], task.path[i]);
  }
}

template <class V, KVType kType>
void attend(const AttentionTask& task) {
  int first = task.first[0], last = 0;
  for (int q = 0; q < task.num_queries; q++) {
    if (task.first[q] < first) first = task.first[q];
    const int own = task.count[q] - task.context;
    const int keys = task.path[q] != nullptr && own > 0 ? task.context + task.path[q][own - 1] + 1 : task.count[q];
    if (keys > last) last = keys;
  }
  const int lanes = task.pool.tile_lanes();
  const int base = first & ~(lanes - 1);
  float* rows[kMaxQueries];  // by key - base
  for (int q = 0; q < task.num_queries; q++) rows[q] = task.scratch + q * task.scratch_stride;
  score<V, kType>(task, base, last, lanes, rows);
  const float* weights[kMaxQueries];
  for (int q = 0; q < task.num_queries; q++) {
    if (task.path[q] != nullptr)  // ascending, so nothing is read after it was overwritten
      for (int i = base > task.context ? base - task.context : 0; i < task.count[q] - task.context; i++)
        rows[q][task.context + i - base] = rows[q][task.context + task.path[q][i] - base];
    softmax<V>(rows[q] + (task.first[q] - base), task.count[q] - task.first[q]);
    weights[q] = rows[q] - base;
  }
  add_all_values<V, kType>(task, weights);
}

// What float16 cannot hold becomes its largest number: with an infinity, the query's result would be NaN.
template <class V>
inline typename V::F within_f16(typename V::F x) {
  return V::min(V::set1(65504.0f), V::max(V::set1(-65504.0f), x));  // in this order NaN stays
}

template <class V, KVType kType>
void store_kv(const KVPool& pool, int64_t slot, int kv_head, const float* key, const float* value) {
  const int64_t place = pool.place(slot);
  const size_t lane = place % kLanes, tile = pool.tile_at(place, kv_head);
  const size_t row = tile + (kLanes + lane) * pool.dim;
  if constexpr (kType == KVType::kF16) {
    uint16_t* data = static_cast<uint16_t*>(pool.data);
    for (int d = 0; d < pool.dim; d += kLanes) {
      uint16_t halves[kLanes];
      V::store_f16(halves, within_f16<V>(V::load(key + d)));
      for (int i = 0; i < kLanes; i++) data[tile + (d + i) * kLanes + lane] = halves[i];
      V::store_f16(data + row + d, within_f16<V>(V::load(value + d)));
    }
  } else {
    int8_t* data = static_cast<int8_t*>(pool.data);
    const Int8Scale key_scale = int8_scale<V>(key, pool.dim), value_scale = int8_scale<V>(value, pool.dim);
    float* scales = pool.scales + pool.scales_at(place, kv_head);
    scales[lane] = key_scale.scale;
    scales[kLanes + lane] = value_scale.scale;
    for (int d = 0; d < pool.dim; d += kLanes) {
      int8_t bytes[kLanes];
      V::store_i8(bytes, to_int8<V>(key + d, key_scale));
      for (int i = 0; i < kLanes; i++) data[tile + (d + i) * kLanes + lane] = bytes[i];
      V::store_i8(data + row + d, to_int8<V>(value + d, value_scale));
    }
  }
}

}  // namespace
}  // namespace paceline
