#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

constexpr int kSpins = 20000;  // some 100 microseconds

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
  next_ = 0;
  working_ = int(workers_.size());
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  take_tasks();
  while (working_.load(std::memory_order_acquire)) relax();
}

void Pool::take_tasks() {
  for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) job_(task);
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
    take_tasks();
    working_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace penstock
