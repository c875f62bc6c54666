#include "bandwidth.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "buffer.hpp"
#include "thread_pool.hpp"

namespace paceline {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kGroups = 3, kPassesPerGroup = 5;
constexpr size_t kLineWords = 8;                  // of a cache line
constexpr size_t kPieceWords = size_t{64} << 10;  // 512 KiB: threads take pieces as they come, as in a model's pass

// Independent sums, so that loads and not additions are what is waited for.
uint64_t sum(const uint64_t* words, size_t count) {
  std::array<uint64_t, kLineWords> sums{};
  for (size_t i = 0; i < count; i += kLineWords) {
    for (size_t j = 0; j < kLineWords; j++) sums[j] += words[i + j];
  }
  uint64_t total = 0;
  for (uint64_t part : sums) total += part;
  return total;
}

}  // namespace

double read_bandwidth(int num_threads, size_t num_bytes) {
  const size_t pieces = std::max(num_bytes / sizeof(uint64_t) / kPieceWords, size_t{1});
  const size_t used_bytes = pieces * kPieceWords * sizeof(uint64_t);
  const Buffer buffer(used_bytes);
  uint64_t* words = reinterpret_cast<uint64_t*>(buffer.data());
  ThreadPool team(std::max(num_threads, 1));
  std::atomic<uint64_t> total{0};
  std::array<Clock::time_point, kGroups * kPassesPerGroup + 1> ends;

  team.run([&](int thread) {
    const auto write = [&](int piece) { std::fill_n(words + piece * kPieceWords, kPieceWords, uint64_t{1}); };
    const auto read = [&](int piece) {
      total.fetch_add(sum(words + piece * kPieceWords, kPieceWords), std::memory_order_relaxed);
    };
    team.each(thread, static_cast<int>(pieces), write);  // takes the pages
    for (Clock::time_point& end : ends) team.each(thread, static_cast<int>(pieces), read, [&] { end = Clock::now(); });
  });
  // Also what keeps the compiler from dropping the reads.
  if (total != pieces * kPieceWords * ends.size()) return 0.0;

  std::array<double, ends.size() - 1> seconds;  // without the first pass, which warmed up
  for (size_t i = 0; i < seconds.size(); i++) seconds[i] = std::chrono::duration<double>(ends[i + 1] - ends[i]).count();
  double best = 0.0;  // the median of a group leaves out outliers, the best group what other work took
  for (int group = 0; group < kGroups; group++) {
    const auto first = seconds.begin() + group * kPassesPerGroup, middle = first + kPassesPerGroup / 2;
    std::nth_element(first, middle, first + kPassesPerGroup);
    best = std::max(best, static_cast<double>(used_bytes) / *middle * 1e-9);
  }
  return best;
}

}  // namespace paceline
