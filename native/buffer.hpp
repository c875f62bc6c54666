// Memory for weights and K/V: zeroed, 64-byte aligned, on huge pages where the system has them. Small buffers made one
// after another lie side by side, so that they fill such pages together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace paceline {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // throws std::bad_alloc

  uint8_t* data() const { return data_.get(); }

 private:
  std::shared_ptr<uint8_t> data_;  // keeps the mapping that it points into
};

}  // namespace paceline
