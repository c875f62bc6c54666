// Scratch memory of a pass: grows, never shrinks, starts as zeros, aligned to cache lines.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace paceline {

template <class T>
class Array {
 public:
  // What was in it is lost where it has to grow.
  T* reserve(size_t count) {
    if (count > size_) {
      data_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})));
      std::memset(static_cast<void*>(data_.get()), 0, count * sizeof(T));
      size_ = count;
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

}  // namespace paceline
