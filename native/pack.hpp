// From a file's tensors or floats to packed matrices, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "buffer.hpp"
#include "format.hpp"

namespace paceline {

// Owns a matrix's memory, which starts as zeros.
class PackedMatrix {
 public:
  PackedMatrix(Format format, int outputs, int inputs);  // throws std::invalid_argument, std::bad_alloc

  Matrix view() const { return matrix_; }
  uint8_t* data() const { return buffer_.data(); }

 private:
  Matrix matrix_;
  Buffer buffer_;
};

// Throws std::invalid_argument for a name that no format or type has.
Format format_named(std::string_view name);
Format packed_format(std::string_view ggml_type);  // the one that holds the type's values

// Rows of blocks, one after another as GGUF stores them. Output i is row row_order[i] of them; empty = in their order.
// Throws std::invalid_argument for sizes that do not fit, std::domain_error for values that are not finite.
PackedMatrix pack_ggml(std::string_view type, std::span<const uint8_t> blocks, int outputs, int inputs,
                       std::span<const int32_t> row_order);

// values [outputs, inputs], rounded to f32, f16, bf16, i8 (symmetric, a scale for each output) or q4_1 (scale and
// minimum of 32 inputs, fitted). Throws as pack_ggml does.
PackedMatrix pack_floats(const float* values, int outputs, int inputs, Format format);

void unpack(const Matrix& matrix, float* values);             // [outputs, inputs]
void unpack_row(const Matrix& matrix, int row, float* values);  // [inputs]

}  // namespace paceline
