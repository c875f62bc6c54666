// A team of threads that walk through a pass together: the only state that passes share.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace paceline {

// Between passes the threads sleep; within one they spin for a moment at each barrier before they sleep. Of the pieces of
// a stage each thread has a share that it takes one by one, undisturbed, and then what is left of the others': a thread
// whose core is busy elsewhere holds up no more than its last piece.
class ThreadPool {
 public:
  // The team counts the caller of run. Threads beyond the process's cores never spin. Throws std::system_error where the
  // system refuses so many.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Every thread calls work(thread index) once; returns when all have. Not for two callers at once; work may not throw.
  void run(const std::function<void(int)>& work);

  // To be called by all threads within run alike, each with its index: body(i) for each i in 0..pieces-1, by whichever
  // thread comes first, then last() by one of them; returns when both are done.
  template <class Body, class Last>
  void each(int thread, int pieces, const Body& body, const Last& last) {
    const uint32_t stage = stage_.load(std::memory_order_relaxed);
    for (int i = 0; i < num_threads(); i++) {
      const int owner = (thread + i) % num_threads();
      for (int piece = claim(owner, stage, pieces); piece >= 0; piece = claim(owner, stage, pieces)) body(piece);
    }
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads()) {
      last();
      arrived_.store(0, std::memory_order_relaxed);
      stage_.store(stage + 1, std::memory_order_release);
      wake_all(stage_);
    } else {
      wait_while(stage_, stage);
    }
  }
  template <class Body>
  void each(int thread, int pieces, const Body& body) {
    each(thread, pieces, body, [] {});
  }

 private:
  // The next piece of a thread's share, or -1. The word holds the stage it is about, since the owner may come last.
  int claim(int owner, uint32_t stage, int pieces) {
    const auto begin = static_cast<uint32_t>(static_cast<int64_t>(pieces) * owner / num_threads());
    const auto end = static_cast<uint32_t>(static_cast<int64_t>(pieces) * (owner + 1) / num_threads());
    std::atomic<uint64_t>& word = shares_[owner].word;
    for (uint64_t seen = word.load(std::memory_order_relaxed);;) {
      const uint32_t next = seen >> 32 == stage ? static_cast<uint32_t>(seen) : begin;
      if (next >= end) return -1;
      const uint64_t taken = static_cast<uint64_t>(stage) << 32 | (next + 1);
      if (word.compare_exchange_weak(seen, taken, std::memory_order_relaxed)) return static_cast<int>(next);
    }
  }

  void start();
  void stop();
  void abandon();
  void serve(int index, uint32_t seen);
  void wait_while(const std::atomic<uint32_t>& word, uint32_t value) const;
  void wake_all(std::atomic<uint32_t>& word) const;

  struct alignas(128) Share {  // neighbouring lines are fetched together
    std::atomic<uint64_t> word{~uint64_t{0}};
  };

  const int wanted_;  // threads; there are fewer where they could not be started again after a fork
  const int spins_;
  std::vector<Share> shares_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> stage_{0};
  alignas(64) std::atomic<uint32_t> pass_{0};
  mutable std::atomic<int> sleepers_{0};
  std::atomic<bool> closing_{false};
  const std::function<void(int)>* work_ = nullptr;
  std::vector<std::thread> threads_;
  int process_ = 0;  // that the threads live in
};

// Cores that this process may use.
int usable_cores();

}  // namespace paceline
