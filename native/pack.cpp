#include "pack.hpp"

#include <array>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fit_q4_1.hpp"
#include "ggml_blocks.hpp"
#include "pack_panels.hpp"
#include "thread_pool.hpp"

namespace paceline {
namespace {

struct GgmlType {
  std::string_view name;
  Format format;
  int block_inputs, block_bytes;
  PanelFunction pack;
};

template <class Block>
constexpr GgmlType block_type(std::string_view name) {
  return {name, Block::kFormat, Block::kInputs, Block::kBytes, pack_blocks<Block>};
}

constexpr std::array kGgmlTypes = {
    GgmlType{"F32", Format::kF32, 1, 4, pack_elements<uint32_t, 0x7f800000>},
    GgmlType{"F16", Format::kF16, 1, 2, pack_elements<uint16_t, 0x7c00>},
    GgmlType{"BF16", Format::kBF16, 1, 2, pack_elements<uint16_t, 0x7f80>},
    block_type<ggml::Q4_0>("Q4_0"),
    block_type<ggml::Q4_1>("Q4_1"),
    block_type<ggml::Q5_0>("Q5_0"),
    block_type<ggml::Q5_1>("Q5_1"),
    block_type<ggml::Q8_0>("Q8_0"),
    GgmlType{"Q2_K", ggml::Q2_K::kFormat, ggml::Q2_K::kInputs, ggml::Q2_K::kBytes, pack_q2_k},
    block_type<ggml::Q3_K>("Q3_K"),
    block_type<ggml::Q4_K>("Q4_K"),
    block_type<ggml::Q5_K>("Q5_K"),
    block_type<ggml::Q6_K>("Q6_K"),
};

const GgmlType& ggml_type(std::string_view name) {
  for (const GgmlType& type : kGgmlTypes) {
    if (type.name == name) return type;
  }
  throw std::invalid_argument("no tensor type " + std::string(name) + " can be packed");
}

PanelFunction from_floats(Format format) {
  switch (format) {
    case Format::kF32: return pack_elements<uint32_t, 0x7f800000>;
    case Format::kF16: return pack_rounded<float_to_half>;
    case Format::kBF16: return pack_rounded<float_to_bfloat16>;
    case Format::kQ4_1: return pack_q4_1;
    case Format::kI8: return pack_i8;
    default: throw std::invalid_argument("floats cannot be packed as " + std::string(traits(format).name));
  }
}

// Calls work(i) for each i below count, on the cores of this process where there are bytes enough to fill them.
template <class Work>
void in_parallel(int count, size_t bytes, const Work& work) {
  std::atomic<int> next = 0;
  const auto run = [&] {
    for (int i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> helpers;
  try {
    const size_t threads = bytes < (size_t{1} << 18) ? 1 : usable_cores();
    while (helpers.size() + 1 < threads) helpers.emplace_back(run);
  } catch (const std::exception&) {  // the system refuses more threads: those that there are do it all
  }
  run();
  for (std::thread& helper : helpers) helper.join();
}

// row(i) gives the bytes of source row i.
template <class Row>
PackedMatrix pack(Format format, int outputs, int inputs, PanelFunction pack_panel, const Row& row) {
  PackedMatrix packed(format, outputs, inputs);
  const Matrix matrix = packed.view();
  std::atomic<bool> finite = true;
  in_parallel(matrix.panels(), matrix.bytes(), [&](int panel) {
    const uint8_t* rows[kLanes];
    const int first = panel * kLanes, lanes = std::min(kLanes, outputs - first);
    for (int lane = 0; lane < lanes; lane++) rows[lane] = row(first + lane);
    if (!pack_panel(rows, lanes, matrix, packed.data() + matrix.panel_at(panel))) finite = false;
  });
  if (!finite) throw std::domain_error("NaN or infinite values");
  return packed;
}

// The quants of one output in one group, as write_quants wrote them.
void read_quants(Quants quants, const uint8_t* group, int lane, uint8_t* q) {
  const auto byte = [&](int chunk, int j) { return group[64 * chunk + 4 * lane + j]; };
  for (int i = 0; i < kGroup; i++) {
    if (quants == Quants::kU8) {
      q[i] = byte(i / 4, i % 4);
      continue;
    }
    q[i] = byte(i / 8, i % 4) >> (i % 8 / 4 * 4) & 15;
    if (quants == Quants::kU6) q[i] |= (byte(4 + i / 16, i % 4) >> (i % 16 / 4 * 2) & 3) << 4;
  }
}

// w = scale * (q - zero) + min, for 16 inputs.
struct Affine {
  float scale, min;
};

Affine read_scale(const Matrix& matrix, const uint8_t* panel, size_t group, int half, int lane) {
  const uint8_t* unit = panel + matrix.scales_at(group);
  const auto half_float = [&](size_t offset) { return half_to_float(ggml::half_at(unit + offset + 2 * lane)); };
  const size_t within = group % kSuperGroups;
  switch (traits(matrix.format).scales) {
    case Scales::kHalf: return {half_float(32 * (group % 2)), 0};
    case Scales::kHalfMin: return {half_float(0), half_float(32)};
    case Scales::kSuper: {
      const uint8_t* bytes = unit + 64 + 32 * within + lane;
      return {half_float(0) * bytes[0], -half_float(32) * bytes[16]};
    }
    case Scales::kSuper16: {
      const uint8_t byte = unit[32 + 16 * (2 * within + half) + lane];
      return {half_float(0) * static_cast<int8_t>(byte), 0};
    }
    case Scales::kChannel: {
      float scale;
      std::memcpy(&scale, unit + sizeof(float) * lane, sizeof(float));
      return {scale, 0};
    }
    case Scales::kNone: break;
  }
  return {};
}

template <class Bits, class ToFloat>
void unpack_elements(const Matrix& matrix, const uint8_t* panel, int lane, float* values, const ToFloat& to_float) {
  for (int k = 0; k < matrix.inputs; k++) {
    Bits bits;
    std::memcpy(&bits, panel + matrix.input_at(k) + lane * sizeof(Bits), sizeof(Bits));
    values[k] = to_float(bits);
  }
}

}  // namespace

PackedMatrix::PackedMatrix(Format format, int outputs, int inputs) {
  if (outputs <= 0 || inputs <= 0) throw std::invalid_argument("a matrix has at least one output and one input");
  matrix_ = {.format = format, .outputs = outputs, .inputs = inputs};
  buffer_ = Buffer(matrix_.bytes());
  matrix_.data = buffer_.data();
}

Format format_named(std::string_view name) {
  for (int i = 0; i < kNumFormats; i++) {
    if (kTraits[i].name == name) return static_cast<Format>(i);
  }
  throw std::invalid_argument("no packed format is called " + std::string(name));
}

Format packed_format(std::string_view type) { return ggml_type(type).format; }

PackedMatrix pack_ggml(std::string_view type_name, std::span<const uint8_t> blocks, int outputs, int inputs,
                       std::span<const int32_t> row_order) {
  const GgmlType& type = ggml_type(type_name);
  if (outputs <= 0 || inputs <= 0 || inputs % type.block_inputs != 0) {
    throw std::invalid_argument(std::string(type_name) + " has no rows of " + std::to_string(inputs) + " values");
  }
  const size_t row_bytes = static_cast<size_t>(inputs / type.block_inputs) * type.block_bytes;
  const size_t rows = blocks.size() / row_bytes;
  if (blocks.size() % row_bytes != 0) throw std::invalid_argument("the blocks end in the middle of a row");
  if (row_order.empty() ? rows != static_cast<size_t>(outputs) : row_order.size() != static_cast<size_t>(outputs)) {
    throw std::invalid_argument("the rows are not as many as the outputs");
  }
  for (const int32_t row : row_order) {
    if (row < 0 || static_cast<size_t>(row) >= rows) throw std::invalid_argument("the row order leaves the tensor");
  }
  return pack(type.format, outputs, inputs, type.pack, [&](int output) {
    return blocks.data() + row_bytes * (row_order.empty() ? output : row_order[output]);
  });
}

PackedMatrix pack_floats(const float* values, int outputs, int inputs, Format format) {
  return pack(format, outputs, inputs, from_floats(format), [&](int output) {
    return reinterpret_cast<const uint8_t*>(values + static_cast<size_t>(output) * inputs);
  });
}

void unpack_row(const Matrix& matrix, int row, float* values) {
  const uint8_t* panel = matrix.data + matrix.panel_at(row / kLanes);
  const int lane = row % kLanes;
  switch (matrix.format) {
    case Format::kF32:
      return unpack_elements<float>(matrix, panel, lane, values, [](float value) { return value; });
    case Format::kF16: return unpack_elements<uint16_t>(matrix, panel, lane, values, half_to_float);
    case Format::kBF16: return unpack_elements<uint16_t>(matrix, panel, lane, values, bfloat16_to_float);
    default: break;
  }
  const FormatTraits& format = traits(matrix.format);
  for (int k = 0; k < matrix.inputs; k += kGroup) {
    const size_t group = k / kGroup;
    uint8_t q[kGroup];
    read_quants(format.quants, panel + matrix.quants_at(group), lane, q);
    for (int half = 0; half < 2; half++) {
      const auto [scale, min] = read_scale(matrix, panel, group, half, lane);
      const int end = std::min(matrix.inputs - k, 16 * half + 16);
      for (int i = 16 * half; i < end; i++) values[k + i] = scale * static_cast<float>(q[i] - format.zero) + min;
    }
  }
}

void unpack(const Matrix& matrix, float* values) {
  in_parallel(matrix.outputs, matrix.bytes(), [&](int row) {
    unpack_row(matrix, row, values + static_cast<size_t>(row) * matrix.inputs);
  });
}

}  // namespace paceline
