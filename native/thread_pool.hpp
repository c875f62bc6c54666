// A team of threads that walk through a pass together: the only state that passes share.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace paceline {

// Between passes the threads sleep; within one they spin for a moment at each barrier before they sleep. The pieces of
// a stage are claimed one by one, so that a thread whose core is busy elsewhere holds up no more than its last piece.
class ThreadPool {
 public:
  // The team counts the caller of run. Threads beyond the process's cores never spin.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Every thread calls work(thread index) once; returns when all have. Not for two callers at once.
  void run(const std::function<void(int)>& work);

  // To be called by all threads within run alike: body(i) for each i in 0..pieces-1, by whichever thread comes first,
  // then last() by one of them; returns when both are done.
  template <class Body, class Last>
  void each(int pieces, const Body& body, const Last& last) {
    for (int i = next_.fetch_add(1, std::memory_order_relaxed); i < pieces;
         i = next_.fetch_add(1, std::memory_order_relaxed))
      body(i);
    const uint32_t stage = stage_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads()) {
      last();
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      stage_.store(stage + 1, std::memory_order_release);
      wake_all(stage_);
    } else {
      wait_while(stage_, stage);
    }
  }
  template <class Body>
  void each(int pieces, const Body& body) {
    each(pieces, body, [] {});
  }

 private:
  void serve(int index);
  void wait_while(const std::atomic<uint32_t>& word, uint32_t value) const;
  void wake_all(std::atomic<uint32_t>& word) const;

  int spins_;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> stage_{0};
  alignas(64) std::atomic<uint32_t> pass_{0};
  mutable std::atomic<int> sleepers_{0};
  std::atomic<bool> closing_{false};
  const std::function<void(int)>* work_ = nullptr;
  std::vector<std::thread> threads_;
};

// Cores that this process may use.
int usable_cores();

}  // namespace paceline
