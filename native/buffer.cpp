#include "buffer.hpp"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace paceline {

Buffer::Buffer(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const bool huge = bytes >= 2 * kHugePage;
  mapped_ = huge ? bytes + kHugePage : bytes + 64;  // room to align; what is never touched takes no memory
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  const uintptr_t alignment = huge ? kHugePage : 64;
  data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(mapping_) + alignment - 1) / alignment * alignment);
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: refused where huge pages are off
#endif
}

Buffer::~Buffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)),
      data_(std::exchange(other.data_, nullptr)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  return *this;
}

}  // namespace paceline
