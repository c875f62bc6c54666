// Memory for weights: zeroed, 64-byte aligned, on huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // throws std::bad_alloc
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  uint8_t* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* data_ = nullptr;
};

}  // namespace paceline
