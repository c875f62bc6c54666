// Philox-4x32-10 (Salmon et al., SC 2011): the words of docs/noise.md, for one block of 4 tokens or 32 tokens at once.
#pragma once

#include <cstdint>

namespace paceline {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

struct Words {
  uint32_t word[4];
};

// The scalar reference: one counter under one key (low word first).
inline Words philox4x32(Words counter, uint64_t key) {
  auto [c0, c1, c2, c3] = counter.word;
  auto key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; round++) {
    const uint64_t product0 = uint64_t{c0} * kMultiplier0, product1 = uint64_t{c2} * kMultiplier1;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kWeyl0, key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// A word x as u = (x + 0.5) / 2^32, exact in float64 and strictly between 0 and 1.
inline double to_uniform(uint32_t word) { return (word + 0.5) * 0x1p-32; }

// The noise of one row: all of a word's counter but token / 4.
struct RowNoise {
  uint64_t seed;
  uint32_t stream, position, purpose;

  uint32_t word(uint32_t token) const {
    return philox4x32({{token / 4, position, stream, purpose}}, seed).word[token % 4];
  }
};

// Words of 32 consecutive tokens of a row. Only token / 4 varies, so most of the first two rounds is the same for the
// whole row: the constructor computes it.
template <class V>
class VectorPhilox {
  using I = typename V::I;

 public:
  explicit VectorPhilox(const RowNoise& noise) {
    auto key0 = static_cast<uint32_t>(noise.seed), key1 = static_cast<uint32_t>(noise.seed >> 32);
    const uint64_t product1 = uint64_t{noise.stream} * kMultiplier1;
    first_ = noise.purpose ^ key1;
    const uint32_t c0 = static_cast<uint32_t>(product1 >> 32) ^ noise.position ^ key0;
    key0 += kWeyl0, key1 += kWeyl1;
    const uint64_t product0 = uint64_t{c0} * kMultiplier0;
    second0_ = static_cast<uint32_t>(product1) ^ key0;
    second2_ = static_cast<uint32_t>(product0 >> 32) ^ key1;
    second3_ = static_cast<uint32_t>(product0);
    for (int round = 2; round < kRounds; round++) {
      key0 += kWeyl0, key1 += kWeyl1;
      keys_[round - 2][0] = key0, keys_[round - 2][1] = key1;
    }
  }

  // Words of the tokens 32 * index .. 32 * index + 31, in order.
  void draw(uint32_t index, I& low, I& high) const {
    // Eight counters in lanes of 64 bits, whose upper halves are ignored: a product needs no shift to serve as the next
    // counter. Their order makes the unpacking at the end yield consecutive tokens.
    static constexpr uint32_t kOrder[16] = {0, 0, 4, 0, 1, 0, 5, 0, 2, 0, 6, 0, 3, 0, 7, 0};
    const I multiplier0 = V::set1_word(kMultiplier0), multiplier1 = V::set1_word(kMultiplier1);
    I c3 = V::multiply_low_halves(V::add_i(V::load_words(kOrder), V::set1_word(index * 8)), multiplier0);
    I c2 = V::bit_xor(V::high_halves(c3), V::set1_word(first_));
    I c1 = V::multiply_low_halves(c2, multiplier1);
    I c0 = V::bit_xor(V::high_halves(c1), V::set1_word(second0_));
    c2 = V::bit_xor(c3, V::set1_word(second2_));
    c3 = V::set1_word(second3_);
    for (const auto& key : keys_) {
      const I product0 = V::multiply_low_halves(c0, multiplier0), product1 = V::multiply_low_halves(c2, multiplier1);
      c0 = V::bit_xor(V::high_halves(product1), c1, V::set1_word(key[0]));
      c1 = product1;
      c2 = V::bit_xor(V::high_halves(product0), c3, V::set1_word(key[1]));
      c3 = product0;
    }
    const I first = V::join_low_halves(c0, c1), second = V::join_low_halves(c2, c3);
    low = V::even_lanes(first, second);
    high = V::odd_lanes(first, second);
  }

 private:
  uint32_t first_, second0_, second2_, second3_;  // what rounds 1 and 2 mix in
  uint32_t keys_[kRounds - 2][2];
};

}  // namespace
}  // namespace paceline
