#include "bandwidth.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace paceline {
namespace {

constexpr int kGroups = 3, kPassesPerGroup = 5;
constexpr std::size_t kLine = 64 / sizeof(std::uint64_t);  // words of a cache line

struct Unmap {
  std::size_t num_bytes;
  void operator()(std::uint64_t* words) const { munmap(words, num_bytes); }
};

// Zero pages, huge ones where the system grants them: small pages would measure the address translation.
std::unique_ptr<std::uint64_t[], Unmap> map_words(std::size_t num_bytes) {
  void* pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(pages, num_bytes, MADV_HUGEPAGE);
#endif
  return {static_cast<std::uint64_t*>(pages), Unmap{num_bytes}};
}

// The sum of count words, a multiple of kLine: independent sums, so that loads and not additions are what is waited for.
std::uint64_t sum(const std::uint64_t* words, std::size_t count) {
  std::array<std::uint64_t, kLine> sums{};
  for (std::size_t i = 0; i < count; i += kLine) {
    for (std::size_t j = 0; j < kLine; ++j) sums[j] += words[i + j];
  }
  std::uint64_t total = 0;
  for (std::uint64_t part : sums) total += part;
  return total;
}

}  // namespace

double read_bandwidth(int num_threads, std::size_t num_bytes) {
  const std::size_t threads = std::max(num_threads, 1);
  const std::size_t words_each = std::max<std::size_t>(num_bytes / sizeof(std::uint64_t) / threads / kLine, 1) * kLine;
  const std::size_t used_bytes = threads * words_each * sizeof(std::uint64_t);
  const auto words = map_words(used_bytes);
  std::vector<std::uint64_t> sums(threads);
  std::barrier<> line_up(static_cast<std::ptrdiff_t>(threads));
  std::array<double, kGroups * kPassesPerGroup> seconds{};

  const auto work = [&](std::size_t index) {
    std::uint64_t* own = words.get() + index * words_each;
    std::fill_n(own, words_each, index + 1);  // takes the pages, close to the core that will read them
    std::uint64_t total = sum(own, words_each);
    for (double& pass : seconds) {
      line_up.arrive_and_wait();
      const auto start = std::chrono::steady_clock::now();
      total += sum(own, words_each);
      line_up.arrive_and_wait();
      if (index == 0) pass = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    sums[index] = total;
  };
  {
    std::vector<std::jthread> team;
    for (std::size_t index = 1; index < threads; ++index) team.emplace_back(work, index);
    work(0);
  }

  std::uint64_t expected = 0, total = 0;  // comparing them keeps the compiler from dropping the reads
  for (std::size_t index = 0; index < threads; ++index) {
    expected += (index + 1) * words_each * (seconds.size() + 1);
    total += sums[index];
  }
  if (total != expected) return 0.0;

  double best = seconds[0];
  for (int group = 0; group < kGroups; ++group) {  // the median of a group leaves out outliers, the best group other work
    const auto first = seconds.begin() + group * kPassesPerGroup, middle = first + kPassesPerGroup / 2;
    std::nth_element(first, middle, first + kPassesPerGroup);
    best = group == 0 ? *middle : std::min(best, *middle);
  }
  return static_cast<double>(used_bytes) / best * 1e-9;
}

}  // namespace paceline
