#include "thread_pool.hpp"

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include <climits>
#include <utility>

namespace paceline {

namespace {

constexpr int kSpins = 300;  // some microseconds: longer ones keep those from a busy core who are waited for

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// std::atomic's own wait yields some times before it sleeps, and on a busy machine strangers then run for milliseconds
// each time; who sleeps is back as soon as it is woken.
#ifdef __linux__
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_sleepers(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) { word.wait(value); }
void wake_sleepers(std::atomic<uint32_t>& word) { word.notify_all(); }
#endif

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
    : wanted_(num_threads), spins_(num_threads <= usable_cores() ? kSpins : 0), shares_(num_threads) {
  start();
}

ThreadPool::~ThreadPool() { process_ == getpid() ? stop() : abandon(); }

void ThreadPool::start() {
  process_ = getpid();
  try {
    threads_.reserve(wanted_ - 1);
    for (int i = 1; i < wanted_; i++) threads_.emplace_back([this, i, seen = pass_.load()] { serve(i, seen); });
  } catch (...) {  // threads that nobody joins would end the process
    stop();
    throw;
  }
}

void ThreadPool::stop() {
  closing_.store(true);
  pass_.fetch_add(1);
  wake_sleepers(pass_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  closing_.store(false);
}

// The child of a fork has the team's memory but not its threads. Their handles can be neither joined nor dropped.
void ThreadPool::abandon() {
  new std::vector<std::thread>(std::move(threads_));
  threads_.clear();
  sleepers_.store(0);
}

void ThreadPool::run(const std::function<void(int)>& work) {
  if (process_ != getpid()) {
    abandon();
    start();
  }
  work_ = &work;
  pass_.fetch_add(1, std::memory_order_release);
  wake_all(pass_);
  work(0);
  each(0, 0, [](int) {});  // nobody may still be in work when it goes away
}

void ThreadPool::serve(int index, uint32_t seen) {
  for (;; seen++) {
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
  while (word.load() == value) sleep_while(word, value);
  sleepers_.fetch_sub(1);
}

void ThreadPool::wake_all(std::atomic<uint32_t>& word) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers_.load() > 0) wake_sleepers(word);
}

}  // namespace paceline
