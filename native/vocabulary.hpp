// The passes of vocabulary_kernels.hpp, for an instruction set V (vec_*.hpp).
#pragma once

#include <cmath>
#include <cstring>

#include "format.hpp"
#include "philox.hpp"
#include "vocabulary_kernels.hpp"

namespace paceline {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr double kLog2E = 0x1.71547652b82fep0;

// One block of logits; the short last one is filled up with -inf, so that it takes the same path as the others.
class Block {
 public:
  Block(const float* logits, int size, int index) {
    const int start = index * kVocabularyBlock, left = size - start;
    values_ = logits + start;
    if (left < kVocabularyBlock) {
      for (int i = 0; i < kVocabularyBlock; i++) filled_[i] = i < left ? values_[i] : -kInfinity;
      values_ = filled_;
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const float* part(int index) const { return values_ + index * kLanes; }
  static constexpr int kParts = kVocabularyBlock / kLanes;

 private:
  const float* values_;
  float filled_[kVocabularyBlock];
};

template <class V>
struct Vocabulary {
  using F = typename V::F;
  using I = typename V::I;

  static float scan(const float* logits, int size, float* block_max, bool* finite) {
    float largest = -kInfinity;
    uint32_t nan = 0;
    for (int b = 0; b < vocabulary_blocks(size); b++) {
      const Block block(logits, size, b);
      F max = V::load(block.part(0));
      nan |= V::is_nan(max);
      for (int i = 1; i < Block::kParts; i++) {
        const F z = V::load(block.part(i));
        nan |= V::is_nan(z);
        max = V::max(max, z);
      }
      block_max[b] = V::largest(max);
      largest = block_max[b] > largest ? block_max[b] : largest;
    }
    *finite = !nan && largest < kInfinity;
    return largest;
  }

  static VocabularyMass weigh(const VocabularyRow& row, float temperature, float floor) {
    constexpr int kTile = 4;  // blocks summed in float32, 16 logits a lane
    const Weight weight(row.max, temperature);
    const F floors = V::set1(floor);
    double lanes[kLanes] = {};
    int count = 0;
    for (int tile = 0; tile < vocabulary_blocks(row.size); tile += kTile) {
      F sum = V::zero();
      for (int b = tile; b < tile + kTile && b < vocabulary_blocks(row.size); b++) {
        if (!(row.block_max[b] >= floor)) continue;
        const Block block(row.logits, row.size, b);
        for (int i = 0; i < Block::kParts; i++) {
          const F z = V::load(block.part(i));
          sum = V::add(sum, V::zero_below(z, floors, weight(z)));
          count += __builtin_popcount(V::ge(z, floors));
        }
      }
      float summed[kLanes];
      V::store(summed, sum);
      for (int lane = 0; lane < kLanes; lane++) lanes[lane] += summed[lane];
    }
    double total = 0;
    for (const double lane : lanes) total += lane;
    return {total, count};
  }

  static int collect(const VocabularyRow& row, float floor, float ceiling, int32_t* ids) {
    int count = 0;
    const F floors = V::set1(floor), ceilings = V::set1(ceiling);
    for (int b = 0; b < vocabulary_blocks(row.size); b++) {
      if (!(row.block_max[b] >= floor)) continue;
      const Block block(row.logits, row.size, b);
      for (int i = 0; i < Block::kParts; i++) {
        const F z = V::load(block.part(i));
        const int first = b * kVocabularyBlock + i * kLanes;
        for (uint32_t mask = V::ge(z, floors) & ~V::ge(z, ceilings); mask; mask &= mask - 1) {
          const int id = first + __builtin_ctz(mask);
          if (id < row.size) ids[count++] = id;  // a floor of -inf would take in what fills the last block
        }
      }
    }
    return count;
  }

  static int count_above(const VocabularyRow& row, float value) {
    int count = 0;
    const F values = V::set1(value);
    for (int b = 0; b < vocabulary_blocks(row.size); b++) {
      if (!(row.block_max[b] > value)) continue;
      const Block block(row.logits, row.size, b);
      for (int i = 0; i < Block::kParts; i++) {
        count += __builtin_popcount(V::gt(V::load(block.part(i)), values));
      }
    }
    return count;
  }

  static int race(const VocabularyRow& row, const RaceParams& params, int count, Entrant* best) {
    Race state(row, params, count, best);
    const VectorPhilox<V> noise(state.noise);
    const Bound bound(row.max, params.temperature);
    for (int b = 0; b < vocabulary_blocks(row.size); b++) {
      if (!(row.block_max[b] >= state.cut)) continue;
      const Block block(row.logits, row.size, b);
      I words[Block::kParts];
      noise.draw(2 * b, words[0], words[1]);
      noise.draw(2 * b + 1, words[2], words[3]);
      uint64_t hopeful = 0;
      for (int i = 0; i < Block::kParts; i++) {
        const uint64_t mask = bound.can_win(V::load(block.part(i)), words[i], V::set1(state.offset));
        hopeful |= mask << i * kLanes;
      }
      if (!hopeful) continue;
      uint32_t drawn[kVocabularyBlock];
      for (int i = 0; i < Block::kParts; i++) V::store_words(drawn + i * kLanes, words[i]);
      for (; hopeful; hopeful &= hopeful - 1) {
        const int lane = __builtin_ctzll(hopeful);
        state.enter(block.part(0)[lane], b * kVocabularyBlock + lane, drawn[lane]);
      }
    }
    return state.filled;
  }

  static void words(const RaceParams& params, int count, uint32_t* out) {
    const VectorPhilox<V> noise(noise_of(params));
    for (int i = 0; i < count; i++) {
      I low, high;
      noise.draw(i, low, high);
      V::store_words(out + 32 * i, low);
      V::store_words(out + 32 * i + kLanes, high);
    }
  }

 private:
  static RowNoise noise_of(const RaceParams& params) {
    return {params.seed, params.stream, params.position, params.purpose};
  }

  // exp((z - max) / temperature), within 2e-7 of it, and 0 below 2^-60.
  class Weight {
   public:
    Weight(float max, float temperature) {
      const double scale = std::fmin(kLog2E / temperature, 1e30);
      const auto high = static_cast<float>(scale);
      max_ = V::set1(max);
      high_ = V::set1(high);
      low_ = V::set1(static_cast<float>(scale - high));
    }

    F operator()(F z) const {
      const F d = V::sub(z, max_), virtual_max = V::sub(z, d);  // d + lost is z - max exactly (Knuth's two-sum)
      const F lost = V::sub(V::sub(z, V::add(d, virtual_max)), V::sub(max_, virtual_max));
      const F exponent = V::mul(d, high_), lowest = V::set1(-60);
      const F whole = V::round(V::max(exponent, lowest));
      F rest = V::fma(d, high_, V::sub(V::zero(), whole));
      rest = V::fma(d, low_, rest);
      rest = V::fma(lost, high_, rest);
      return V::zero_below(exponent, lowest, V::scale_by_power(exp2_near_0(rest), whole));
    }

   private:
    static F exp2_near_0(F x) {  // for |x| <= 1/2: a minimax polynomial, 2e-9 apart but for rounding
      F y = V::set1(0x1.41fbbcp-13f);
      for (const float c : {0x1.5f3e52p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e43p-1f, 1.0f}) {
        y = V::fma(y, x, V::set1(c));
      }
      return y;
    }

    F max_, high_, low_;
  };

  // The cheap test that keeps nearly all tokens out of the exact race. To beat a score b a token of weight w must have
  // -log(u) <= w / b, and as 1 - u <= -log(u), also 1 - u <= w / b. w is bounded from above by reading exponent and
  // fraction of its logarithm as a float (2^f <= 1 + f), 1 - u from below by dropping the word's last bit.
  class Bound {
   public:
    Bound(float max, float temperature)
        : max_(V::set1(max)), scale_(V::set1(static_cast<float>(std::fmin(kLog2E / temperature, 1e30) * kFloatOne))) {}

    static float offset(double best) { return static_cast<float>((127 + 31 + std::log2(kMargin / best)) * kFloatOne); }

    uint32_t can_win(F z, I word, F offset) const {
      const F bits = V::fma(V::sub(z, max_), scale_, offset);
      const F weight = V::as_float(V::to_int(V::max(bits, V::zero())));  // times 2^31 * kMargin / b
      const I flipped = V::bit_xor(word, V::set1_word(~0u));
      return V::ge(weight, V::to_float(V::halved(flipped)));
    }

   private:
    static constexpr double kFloatOne = 1 << 23;  // one step of a float's exponent
    static constexpr double kMargin = 1.001;      // covers the rounding of the above
    F max_, scale_;
  };

  struct Race {
    Race(const VocabularyRow& row, const RaceParams& params, int count, Entrant* best)
        : params(params), noise(noise_of(params)), max(row.max), count(count), best(best) {
      place({1 / -std::log(to_uniform(noise.word(params.likeliest))), params.likeliest});
    }

    void enter(float z, int32_t id, uint32_t word) {
      if (z < params.border || (z == params.border && id > params.border_id)) return;
      if (id == params.likeliest) return;  // it was the first to enter
      const double weight = std::exp((static_cast<double>(z) - max) / params.temperature);
      const Entrant entrant{weight / -std::log(to_uniform(word)), id};
      if (entrant.score > kLeastScore && (filled < count || ahead(entrant, best[count - 1]))) place(entrant);
    }

    static bool ahead(const Entrant& a, const Entrant& b) {
      return a.score > b.score || (a.score == b.score && a.id < b.id);
    }

    void place(const Entrant& entrant) {
      filled += filled < count;
      int at = filled - 1;
      for (; at > 0 && ahead(entrant, best[at - 1]); at--) best[at] = best[at - 1];
      best[at] = entrant;
      const double least = filled < count ? kLeastScore : best[count - 1].score;
      offset = Bound::offset(least);
      // -log(u) is at least 2^-33: below this logit not even the luckiest word helps.
      const double hopeless = max + (std::log(least) - 33 * 0.6932) * params.temperature;
      cut = std::fmax(params.border, ::nextafterf(static_cast<float>(hopeless), -kInfinity));
    }

    const RaceParams& params;
    const RowNoise noise;
    const double max;
    const int count;
    Entrant* const best;  // [count], of which `filled` are there
    int filled = 0;
    float offset;  // of Bound, for the score to beat
    float cut;     // blocks without a logit of at least this cannot beat it
  };
};

template <class V>
constexpr VocabularyKernels vocabulary_kernels_of() {
  using K = Vocabulary<V>;
  return {K::scan, K::weigh, K::collect, K::count_above, K::race, K::words};
}

}  // namespace
}  // namespace paceline
