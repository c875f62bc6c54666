// Attention over the paged cache.
//
// Scores and sums of values are integer products: queries are rounded by their norm, weights in blocks of 16 keys by the
// largest of each, keys and values lie rounded in the cache. A query's result is fixed by its own keys in the order of
// their positions: the softmax sums lanes counted from the first key seen, and values are added block by block, exactly
// within each. Slots, chunks, other queries and other branches of a tree only decide which scores are computed along the
// way and dropped.
#pragma once

#include <type_traits>

#include "elementwise.hpp"

namespace paceline {
namespace {

// Integers that no sum of products overflows: keys and queries have norms up to 2^15, 16 products of weights and values
// stay below 2^31.
constexpr float kNormLimit = 32767, kWeightLimit = 32767, kWideValueLimit = 4095, kByteLimit = 127;
constexpr int kSpan = kLanes;  // keys whose values are added as integers

template <KVType kType>
using Element = std::conditional_t<kType == KVType::kI16, int16_t, int8_t>;

template <class V, KVType kType>
inline typename V::I load_pairs(const KVPool& pool, size_t index) {
  return V::load_pairs(static_cast<const Element<kType>*>(pool.data) + index);
}

template <class V>
inline typename V::I set1_pair(const int16_t* pair) {
  return V::set1_bytes(reinterpret_cast<const int8_t*>(pair));
}

template <class V>
inline Rounding round_norm(const float* x, int n) {
  typename V::F squares = V::zero();
  for (int i = 0; i < n; i += kLanes) squares = V::fma(V::load(x + i), V::load(x + i), squares);
  return rounding(std::sqrt(V::sum(squares)), kNormLimit);
}

// Rounded: pairs of dimensions [dim / 2, kMaxQueries, 2], and what makes scores of their products with keys.
struct Queries {
  int16_t* pairs;
  float factors[kMaxQueries];
};

template <class V>
inline void round_queries(const AttentionTask& task, Queries& queries) {
  for (int q = 0; q < task.num_queries; q++)  // together: they lie far from each other
    for (int d = 0; d < task.pool.dim; d += kLanes) {
      V::prefetch(task.queries[q] + d);
      V::prefetch(task.outputs[q] + d);
    }
  for (int q = 0; q < task.num_queries; q++) {
    const Rounding by = round_norm<V>(task.queries[q], task.pool.dim);
    queries.factors[q] = by.scale * task.scale;
    for (int d = 0; d < task.pool.dim; d += kLanes) {
      int16_t words[kLanes];
      V::store_i16(words, to_integers<V>(V::load(task.queries[q] + d), by));
      for (int i = 0; i < kLanes; i++) queries.pairs[((d + i) / 2 * kMaxQueries + q) * 2 + i % 2] = words[i];
    }
  }
}

// Scores of one or two tiles of 16 keys for kQueries queries from the first on: out[q][0..15] and on. Not inlined, as
// add_pairs: among what else attend keeps in registers, GCC 12 leaves sums in memory.
template <class V, KVType kType, int kTiles, int kQueries>
[[gnu::noinline]] void score_tiles(const AttentionTask& task, const Queries& queries, int first, const int64_t* places,
                                   float* const* out) {
  using F = typename V::F;
  using I = typename V::I;
  const KVPool& pool = task.pool;
  size_t start[kTiles];
  I sums[kTiles][kQueries];
  for (int t = 0; t < kTiles; t++) {
    start[t] = pool.tile_at(places[t], task.kv_head);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; q++) sums[t][q] = V::zero_i();
  }
  const int16_t* pairs = queries.pairs + 2 * first;
  for (int d = 0; d < pool.dim; d += 2, pairs += 2 * kMaxQueries) {
    I keys[kTiles];
    for (int t = 0; t < kTiles; t++) keys[t] = load_pairs<V, kType>(pool, start[t] + static_cast<size_t>(d) * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; q++) {
      const I query = set1_pair<V>(pairs + 2 * q);
      for (int t = 0; t < kTiles; t++) sums[t][q] = V::dot_pairs(sums[t][q], keys[t], query);
    }
  }
#pragma GCC unroll 2
  for (int t = 0; t < kTiles; t++) {
    const F scales = V::load(pool.scales + pool.scales_at(places[t], task.kv_head));
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; q++) {
      const F factor = V::mul(scales, V::set1(queries.factors[first + q]));
      V::store(out[first + q] + t * kLanes, V::mul(V::to_float(sums[t][q]), factor));
    }
  }
}

template <class V, KVType kType, int kTiles>
inline void score_tiles(const AttentionTask& task, const Queries& queries, const int64_t* places, float* const* out) {
  constexpr int kTogether = V::kManyRegisters ? 8 : 4;  // queries
  for (int q = 0; q < task.num_queries; q += kTogether) {
    const int rest = task.num_queries - q;
    switch (rest < kTogether ? rest : kTogether) {
      case 1: score_tiles<V, kType, kTiles, 1>(task, queries, q, places, out); break;
      case 2: score_tiles<V, kType, kTiles, 2>(task, queries, q, places, out); break;
      case 3: score_tiles<V, kType, kTiles, 3>(task, queries, q, places, out); break;
      case 4: score_tiles<V, kType, kTiles, 4>(task, queries, q, places, out); break;
      case 5: score_tiles<V, kType, kTiles, 5>(task, queries, q, places, out); break;
      case 6: score_tiles<V, kType, kTiles, 6>(task, queries, q, places, out); break;
      case 7: score_tiles<V, kType, kTiles, 7>(task, queries, q, places, out); break;
      default: score_tiles<V, kType, kTiles, 8>(task, queries, q, places, out); break;
    }
  }
}

constexpr int kTilesAhead = 2;  // how far before they are used keys and values are fetched

// The index of a key of the request in an array of whole tiles.
inline int64_t place_of(const AttentionTask& task, int key) {
  const int block = key >> task.pool.block_shift, offset = key & ((1 << task.pool.block_shift) - 1);
  return (static_cast<int64_t>(task.blocks[block]) << task.pool.place_shift) + offset;
}

// Fetches the part of a tile of keys, or values, that starts at an index of the pool.
template <class V, KVType kType>
inline void prefetch_half(const KVPool& pool, size_t index) {
  const auto* half = static_cast<const Element<kType>*>(pool.data) + index;
  for (int i = 0; i < pool.dim * kLanes; i += 64 / sizeof(Element<kType>)) V::prefetch(half + i);
}

// Scores of the keys [base, last) for all queries, and scales of their values, by key - base; base is the start of a tile.
template <class V, KVType kType>
inline void score(const AttentionTask& task, const Queries& queries, int base, int last, float* const* rows,
                  float* value_scales) {
  const int lanes = task.pool.tile_lanes();
  const auto scale_values = [&](int key, int64_t place) {
    const float* scales = task.pool.scales + task.pool.scales_at(place, task.kv_head) + kLanes;
    V::store(value_scales + (key - base), V::load(scales));
  };
  for (int key = base; key < last; key += lanes) {  // ascending: what a short tile writes beyond its lanes is overwritten
    float* out[kMaxQueries];
    for (int q = 0; q < task.num_queries; q++) out[q] = rows[q] + (key - base);
    for (int ahead = key + kTilesAhead * lanes; ahead < last && ahead < key + (kTilesAhead + 2) * lanes; ahead += lanes)
      prefetch_half<V, kType>(task.pool, task.pool.key_at(place_of(task, ahead), task.kv_head, 0));
    const bool two = V::kManyRegisters && lanes == kLanes && key + lanes < last;
    const int64_t places[] = {place_of(task, key), two ? place_of(task, key + lanes) : -1};
    scale_values(key, places[0]);
    if (two) {
      score_tiles<V, kType, 2>(task, queries, places, out);
      key += lanes;
      scale_values(key, places[1]);
    } else {
      score_tiles<V, kType, 1>(task, queries, places, out);
    }
  }
}

// Scores [count] become weights times scales; up to 15 floats behind them are overwritten. Returns the sum of the weights,
// of which the best is 1.
template <class V>
inline float softmax(float* scores, const float* scales, int count) {
  using F = typename V::F;
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i = count; i < padded; i++) scores[i] = -1e30f;
  F best = V::load(scores);
  for (int i = kLanes; i < padded; i += kLanes) best = V::max(best, V::load(scores + i));
  const F largest = V::set1(V::largest(best));
  F total = V::zero();
  for (int i = 0; i < padded; i += kLanes) {
    const F weight = exp_of<V>(V::sub(V::load(scores + i), largest));
    V::store(scores + i, V::mul(weight, V::load(scales + i)));
    total = V::add(total, weight);
  }
  return V::sum(total);
}

// Weights of the keys [first, count) of a row are rounded block by block: they become words, in place, and a factor for
// each block, times inverse. What belongs to no key of them is zeros.
template <class V>
inline void round_weights(float* row, int first, int count, float inverse, int blocks, float* factors) {
  const int begin = first / kSpan, end = (count + kSpan - 1) / kSpan;
  for (int i = begin * kSpan; i < first; i++) row[i] = 0;
  for (int i = count; i < end * kSpan; i++) row[i] = 0;
  auto* words = reinterpret_cast<int16_t*>(row);
  for (int b = 0; b < blocks; b++) {  // ascending: a block's words take the place of floats that were read
    const bool seen = begin <= b && b < end;
    const typename V::F weights = seen ? V::load(row + b * kSpan) : V::zero();
    const Rounding by = rounding(V::largest_magnitude(weights), kWeightLimit);
    factors[b] = by.scale * inverse;
    V::store_i16(words + b * kSpan, to_integers<V>(weights, by));
  }
}

// Adds the values of count pairs of keys, those that lie at rows[i] in the pool, times weights[q][i] to kVectors * 16
// dimensions of kQueries outputs, from dimension d on.
template <class V, KVType kType, int kQueries, int kVectors>
[[gnu::noinline]] void add_pairs(const AttentionTask& task, const size_t* rows, int count,
                                 const int16_t* const* weights, const float* factors, float* const* outputs, int d) {
  using I = typename V::I;
  I sums[kQueries][kVectors];
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sums[q][v] = V::zero_i();
  for (int i = 0; i < count; i++) {
    I values[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) values[v] = load_pairs<V, kType>(task.pool, rows[i] + 2 * (d + v * kLanes));
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; q++) {
      const I weight = set1_pair<V>(weights[q] + 2 * i);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sums[q][v] = V::dot_pairs(sums[q][v], values[v], weight);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; q++)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      float* at = outputs[q] + d + v * kLanes;
      V::store(at, V::fma(V::to_float(sums[q][v]), V::set1(factors[q]), V::load(at)));
    }
}

template <class V, KVType kType, int kQueries>
inline void add_block(const AttentionTask& task, const size_t* rows, int count, const int16_t* const* weights,
                      const float* factors, float* const* outputs) {
  constexpr int kVectors = V::kManyRegisters || kQueries == 1 ? 4 : kQueries == 2 ? 2 : 1;  // at once
  int d = 0;
  for (; d + kVectors * kLanes <= task.pool.dim; d += kVectors * kLanes)
    add_pairs<V, kType, kQueries, kVectors>(task, rows, count, weights, factors, outputs, d);
  for (; d < task.pool.dim; d += kLanes)
    add_pairs<V, kType, kQueries, 1>(task, rows, count, weights, factors, outputs, d);
}

// The values of the keys from base on, times each query's words and factors [blocks].
template <class V, KVType kType>
inline void add_values(const AttentionTask& task, int base, int blocks, float* const* rows, const float* factors) {
  constexpr int kShared = 4;  // queries that share the loads of values
  for (int q = 0; q < task.num_queries; q++)
    for (int d = 0; d < task.pool.dim; d += kLanes) V::store(task.outputs[q] + d, V::zero());
  const int lanes = task.pool.tile_lanes();
  // Blocks from this key on are added key by key: what a tree's node sees does not lie side by side.
  const int single = lanes == 1 ? base : task.path[0] != nullptr ? task.context / kSpan * kSpan : INT32_MAX;
  size_t places[kSpan];
  for (int b = 0; b < blocks; b++) {
    const int key = base + b * kSpan;
    const int16_t* words[kMaxQueries];
    float own[kMaxQueries];
    int last = key;
    for (int q = 0; q < task.num_queries; q++) {
      words[q] = reinterpret_cast<const int16_t*>(rows[q]) + b * kSpan;
      own[q] = factors[q * blocks + b];
      if (task.count[q] > last) last = task.count[q];
    }
    const int size = last - key < kSpan ? last - key : kSpan;
    if (key < single) {
      for (int ahead = key + kTilesAhead * kLanes; ahead < last && ahead < key + 2 * kTilesAhead * kLanes; ahead += lanes)
        prefetch_half<V, kType>(task.pool, task.pool.value_at(place_of(task, ahead), task.kv_head, 0));
      for (int i = 0; i < size; i += lanes) {
        size_t at = task.pool.value_at(place_of(task, key + i), task.kv_head, 0);
        for (int j = i; j < i + lanes && j < size; j += 2, at += 2 * task.pool.dim) places[j / 2] = at;
      }
      for (int q = 0; q < task.num_queries; q += kShared) {
        const int pairs = (size + 1) / 2;
        switch (task.num_queries - q) {
          case 1: add_block<V, kType, 1>(task, places, pairs, words + q, own + q, task.outputs + q); break;
          case 2: add_block<V, kType, 2>(task, places, pairs, words + q, own + q, task.outputs + q); break;
          case 3: add_block<V, kType, 3>(task, places, pairs, words + q, own + q, task.outputs + q); break;
          default: add_block<V, kType, 4>(task, places, pairs, words + q, own + q, task.outputs + q); break;
        }
      }
      continue;
    }
    for (int q = 0; q < task.num_queries; q++) {
      int16_t pairs[2 * kSpan] = {};
      int count = 0;
      for (int i = task.first[q] > key ? task.first[q] - key : 0; i < kSpan && key + i < task.count[q]; i++, count++) {
        const int own_key = key + i - task.context;
        const int64_t place =
            place_of(task, task.path[q] != nullptr && own_key >= 0 ? task.context + task.path[q][own_key] : key + i);
        places[count] = task.pool.value_at(place, task.kv_head, 0) & ~size_t{1};
        pairs[2 * count + place % 2] = words[q][i];
      }
      const int16_t* weights = pairs;
      add_block<V, kType, 1>(task, places, count, &weights, own + q, task.outputs + q);
    }
  }
}

template <class V, KVType kType>
void attend(const AttentionTask& task) {
  int first = task.first[0], last = 0, most = 0;
  for (int q = 0; q < task.num_queries; q++) {
    if (task.first[q] < first) first = task.first[q];
    if (task.count[q] > most) most = task.count[q];
    const int own = task.count[q] - task.context;
    const int keys = task.path[q] != nullptr && own > 0 ? task.context + task.path[q][own - 1] + 1 : task.count[q];
    if (keys > last) last = keys;
  }
  const int base = first / kSpan * kSpan, blocks = (most - base + kSpan - 1) / kSpan;
  const size_t stride = task.scratch_stride;
  static_assert(kMaxQueries <= kSpan);  // or factors would not fit into a stride
  float* rows[kMaxQueries];  // by key - base
  for (int q = 0; q < task.num_queries; q++) rows[q] = task.scratch + q * stride;
  float *lying = task.scratch + kMaxQueries * stride, *seen = lying + stride, *factors = seen + stride;
  Queries queries{reinterpret_cast<int16_t*>(factors + stride), {}};
  round_queries<V>(task, queries);
  score<V, kType>(task, queries, base, last, rows, lying);
  for (int q = 0; q < task.num_queries; q++) {
    const int begin = task.first[q] - base, count = task.count[q] - base;
    const float* scales = lying;
    if (task.path[q] != nullptr) {
      const int own = task.context > base ? task.context - base : 0;
      for (int i = 0; i < own; i++) seen[i] = lying[i];
      for (int i = own; i < count; i++) {  // ascending, so nothing is read after it was overwritten
        const int at = task.context + task.path[q][base + i - task.context] - base;
        rows[q][i] = rows[q][at];
        seen[i] = lying[at];
      }
      scales = seen;
    }
    if (task.softcap > 0) softcap<V>(rows[q] + begin, count - begin, task.softcap);
    const float total = softmax<V>(rows[q] + begin, scales + begin, count - begin);
    round_weights<V>(rows[q], begin, count, 1.0f / total, blocks, factors + q * blocks);
  }
  add_values<V, kType>(task, base, blocks, rows, factors);
}

template <class V, KVType kType>
void store_kv(const KVPool& pool, int64_t slot, int kv_head, const float* key, const float* value) {
  constexpr bool kWide = kType == KVType::kI16;
  const Rounding key_by = kWide ? round_norm<V>(key, pool.dim) : round_largest<V>(key, pool.dim, kByteLimit);
  const Rounding value_by = round_largest<V>(value, pool.dim, kWide ? kWideValueLimit : kByteLimit);
  const int64_t place = pool.place(slot);
  float* scales = pool.scales + pool.scales_at(place, kv_head) + place % kLanes;
  scales[0] = key_by.scale;
  scales[kLanes] = value_by.scale;
  auto* data = static_cast<Element<kType>*>(pool.data);
  for (int d = 0; d < pool.dim; d += kLanes) {
    int16_t keys[kLanes], values[kLanes];
    V::store_i16(keys, to_integers<V>(V::load(key + d), key_by));
    V::store_i16(values, to_integers<V>(V::load(value + d), value_by));
    for (int i = 0; i < kLanes; i++) {
      data[pool.key_at(place, kv_head, d + i)] = static_cast<Element<kType>>(keys[i]);
      data[pool.value_at(place, kv_head, d + i)] = static_cast<Element<kType>>(values[i]);
    }
  }
}

}  // namespace
}  // namespace paceline
