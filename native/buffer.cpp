#include "buffer.hpp"

#include <sys/mman.h>

#include <cstring>
#include <mutex>
#include <new>

namespace paceline {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSlabBytes = 4 * kHugePage;
constexpr size_t kAlignment = 64;

size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Whole huge pages, given back when nobody holds them any more. What is never touched takes no memory.
std::shared_ptr<uint8_t> map(size_t bytes) {
  const size_t length = bytes + kHugePage;  // room to align
  void* start = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  const std::shared_ptr<void> mapping(start, [length](void* at) { munmap(at, length); });
  auto* aligned = reinterpret_cast<uint8_t*>(whole(reinterpret_cast<uintptr_t>(start), kHugePage));
#ifdef MADV_HUGEPAGE
  madvise(aligned, bytes, MADV_HUGEPAGE);  // a hint: refused where huge pages are off
#endif
  return {mapping, aligned};
}

// The slab that small buffers are cut from, as long as one of them lives, and how much of it is taken.
std::recursive_mutex slab_lock;  // a buffer that there is no memory to keep track of is given back while it is held
std::weak_ptr<uint8_t> last_slab;
size_t slab_used;

// Only the last buffer's place can be taken again: that of a matrix that was unpacked and packed anew.
void give_back(const std::shared_ptr<uint8_t>& slab, uint8_t* at, size_t taken) {
  const std::scoped_lock held(slab_lock);
  if (last_slab.lock() != slab || at + taken != slab.get() + slab_used) return;
  std::memset(at, 0, taken);
  slab_used -= taken;
}

}  // namespace

Buffer::Buffer(size_t bytes) {
  const size_t taken = whole(bytes, kAlignment);
  if (taken < bytes) throw std::bad_alloc();
  if (taken > kSlabBytes / 2) {
    data_ = map(whole(taken, kHugePage));
    return;
  }
  const std::scoped_lock held(slab_lock);
  std::shared_ptr<uint8_t> slab = last_slab.lock();
  if (slab == nullptr || slab_used + taken > kSlabBytes) {
    slab = map(kSlabBytes);
    last_slab = slab;
    slab_used = 0;
  }
  data_ = std::shared_ptr<uint8_t>(slab.get() + slab_used, [slab, taken](uint8_t* at) { give_back(slab, at, taken); });
  slab_used += taken;
}

}  // namespace paceline
