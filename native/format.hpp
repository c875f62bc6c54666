// Packed weight formats: how a matrix lies in memory for the kernels.
//
// W [outputs, inputs] is cut into panels of 16 outputs, the lanes of a vector. A panel is a row of units, each the scales
// of some groups (32 inputs) and then their quants; in float formats a unit is one input. The units of two panels take
// turns, so that a kernel reads both as one stream, and every load of quants lies in one cache line. Outputs are padded
// with zeros to whole pairs of panels, inputs to whole units. docs/native.md draws the layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace paceline {

constexpr int kLanes = 16;          // outputs of a panel
constexpr int kGroup = 32;          // inputs of a group
constexpr int kSuperGroups = 8;     // groups that share f16 factors in the Super and Super16 scales

enum class Format : uint8_t { kF32, kF16, kBF16, kQ4_1, kQ4_K, kQ5_1, kQ5_K, kQ6_K, kQ8_0, kI8 };
constexpr int kNumFormats = 10;

enum class Quants : uint8_t { kNone, kU4, kU6, kU8 };
enum class Scales : uint8_t { kNone, kHalf, kHalfMin, kSuper, kSuper16, kChannel };

struct FormatTraits {
  std::string_view name;
  Quants quants;
  Scales scales;
  int zero;               // what is subtracted from a quant
  int element_bytes;      // of float formats
  int inputs_multiple;    // inputs are padded to this
};

constexpr FormatTraits kTraits[kNumFormats] = {
    {"f32", Quants::kNone, Scales::kNone, 0, 4, 1},       {"f16", Quants::kNone, Scales::kNone, 0, 2, 1},
    {"bf16", Quants::kNone, Scales::kNone, 0, 2, 1},      {"q4_1", Quants::kU4, Scales::kHalfMin, 0, 0, 32},
    {"q4_k", Quants::kU4, Scales::kSuper, 0, 0, 256},     {"q5_1", Quants::kU6, Scales::kHalfMin, 0, 0, 32},
    {"q5_k", Quants::kU6, Scales::kSuper, 0, 0, 256},     {"q6_k", Quants::kU6, Scales::kSuper16, 32, 0, 256},
    {"q8_0", Quants::kU8, Scales::kHalf, 128, 0, 64},     {"i8", Quants::kU8, Scales::kChannel, 128, 0, 32},
};

constexpr const FormatTraits& traits(Format format) { return kTraits[static_cast<int>(format)]; }
constexpr bool is_quantised(Format format) { return traits(format).quants != Quants::kNone; }

constexpr size_t quant_bytes(Quants quants) {  // of a group
  return quants == Quants::kU4 ? 256 : quants == Quants::kU6 ? 384 : quants == Quants::kU8 ? 512 : 0;
}

// Groups of a unit; 0 = all that a panel has.
constexpr size_t unit_groups(Scales scales) {
  switch (scales) {
    case Scales::kHalf: return 2;
    case Scales::kHalfMin: return 1;
    case Scales::kSuper:
    case Scales::kSuper16: return kSuperGroups;
    default: return 0;
  }
}

constexpr size_t scale_bytes(Scales scales) {  // of a unit
  switch (scales) {
    case Scales::kHalf: return 64;      // a group: f16 scale[16]
    case Scales::kHalfMin: return 64;   // f16 scale[16], f16 min[16]
    case Scales::kSuper: return 320;    // f16 d[16], f16 dmin[16], then a group: u8 sc[16], u8 mn[16]
    case Scales::kSuper16: return 320;  // f16 d[16], then for 16 inputs: i8 sc[16], and 32 bytes of nothing
    case Scales::kChannel: return 64;   // f32 scale[16]
    case Scales::kNone: break;
  }
  return 0;
}

// A packed matrix; owns nothing. What kernels call of it is always inlined: the linker could keep a copy that was compiled
// for newer machines.
struct Matrix {
  Format format = Format::kF32;
  int outputs = 0;
  int inputs = 0;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [outputs padded to whole panels], or none

  [[gnu::always_inline]] size_t padded_inputs() const {
    const size_t multiple = traits(format).inputs_multiple;
    return (inputs + multiple - 1) / multiple * multiple;
  }
  [[gnu::always_inline]] size_t groups() const { return padded_inputs() / kGroup; }
  int panels() const { return (outputs + kLanes - 1) / kLanes; }
  [[gnu::always_inline]] size_t unit_size() const {  // groups
    const size_t size = unit_groups(traits(format).scales);
    return size == 0 ? groups() : size;
  }
  [[gnu::always_inline]] size_t unit_bytes() const {
    const FormatTraits& trait = traits(format);
    if (!is_quantised(format)) return static_cast<size_t>(kLanes) * trait.element_bytes;
    return scale_bytes(trait.scales) + unit_size() * quant_bytes(trait.quants);
  }
  [[gnu::always_inline]] size_t panel_bytes() const {
    return unit_bytes() * (is_quantised(format) ? groups() / unit_size() : inputs);
  }
  size_t bytes() const { return panel_bytes() * ((panels() + 1) / 2 * 2); }

  // Where a panel's first unit lies in data.
  [[gnu::always_inline]] size_t panel_at(int panel) const {
    return panel / 2 * 2 * panel_bytes() + panel % 2 * unit_bytes();
  }
  // From there: the scales of the unit that a group belongs to, a group's quants, an input's elements.
  size_t scales_at(size_t group) const { return group / unit_size() * 2 * unit_bytes(); }
  size_t quants_at(size_t group) const {
    const FormatTraits& trait = traits(format);
    return scales_at(group) + scale_bytes(trait.scales) + group % unit_size() * quant_bytes(trait.quants);
  }
  size_t input_at(int input) const { return input * 2 * unit_bytes(); }
};

}  // namespace paceline
