#include "thread_pool.hpp"

#ifdef __linux__
#include <sched.h>
#endif

namespace paceline {

namespace {

constexpr int kSpins = 3000;  // some ten microseconds of pauses: longer ones keep others from the cores

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int usable_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

ThreadPool::ThreadPool(int num_threads)
    : spins_(num_threads <= usable_cores() ? kSpins : 0), shares_(num_threads) {
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { serve(i); });
}

ThreadPool::~ThreadPool() {
  closing_.store(true);
  pass_.fetch_add(1);
  pass_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(int)>& work) {
  work_ = &work;
  pass_.fetch_add(1, std::memory_order_release);
  wake_all(pass_);
  work(0);
  each(0, 0, [](int) {});  // nobody may still be in work when it goes away
}

void ThreadPool::serve(int index) {
  for (uint32_t seen = 0;; seen++) {
    wait_while(pass_, seen);
    if (closing_.load()) return;
    (*work_)(index);
    each(index, 0, [](int) {});
  }
}

void ThreadPool::wait_while(const std::atomic<uint32_t>& word, uint32_t value) const {
  for (int i = 0; i < spins_; i++) {
    if (word.load(std::memory_order_acquire) != value) return;
    pause();
  }
  sleepers_.fetch_add(1);
  while (word.load() == value) word.wait(value);
  sleepers_.fetch_sub(1);
}

void ThreadPool::wake_all(std::atomic<uint32_t>& word) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers_.load() > 0) word.notify_all();
}

}  // namespace paceline
