#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

constexpr int kSpins = 2000;  // some 30 microseconds

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
  stopping_ = true;
  round_++;
  round_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_shared(int64_t tasks) {
  tasks_ = tasks;
  done_.store(0, std::memory_order_relaxed);
  left_.store(tasks, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  const int64_t others = tasks - take_tasks();
  for (int spins = 0; done_.load(std::memory_order_acquire) < others; spins++) {
    if (spins < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
}

// Returns how many it has done.
int64_t Pool::take_tasks() {
  int64_t count = 0;
  for (int64_t left; (left = left_.fetch_sub(1, std::memory_order_acquire)) > 0; count++) job_(tasks_ - left);
  return count;
}

void Pool::serve() {
  uint32_t seen = 0;
  while (true) {
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen; spins++) {
      if (spins < kSpins)
        relax();
      else
        round_.wait(seen, std::memory_order_acquire);
    }
    seen = round_.load(std::memory_order_acquire);
    if (stopping_) return;
    for (int64_t count; (count = take_tasks());) done_.fetch_add(count, std::memory_order_release);
  }
}

}  // namespace penstock
