#include "pool.h"

namespace penstock {

constexpr int kSpins = 2000;  // number of polls before a thread sleeps or yields: about 30 microseconds

Pool::Pool(int threads) : runs_(threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work_loop(i); });
}

Pool::~Pool() {
  stopping_ = true;
  generation_++;
  generation_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_shared(int64_t tasks) {
  const int64_t count = runs_.size();
  done_.store(0, std::memory_order_relaxed);
  for (int64_t i = 0; i < count; i++) {
    runs_[i].end = tasks * (i + 1) / count;
    runs_[i].left.store(runs_[i].end - tasks * i / count, std::memory_order_release);
  }
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  const int64_t others = tasks - run_tasks(0);
  for (int spins = 0; done_.load(std::memory_order_acquire) < others; spins++) {
    if (spins < kSpins)
      cpu_relax();
    else
      std::this_thread::yield();
  }
}

// Returns the number of tasks that this thread has run.
int64_t Pool::run_tasks(int thread) {
  int64_t count = 0;
  for (size_t i = 0; i < runs_.size(); i++) {
    Run& run = runs_[(thread + i) % runs_.size()];
    for (int64_t left; (left = run.left.fetch_sub(1, std::memory_order_acquire)) > 0; count++) job_(run.end - left);
  }
  return count;
}

void Pool::work_loop(int thread) {
  uint32_t seen = 0;
  while (true) {
    for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; spins++) {
      if (spins < kSpins)
        cpu_relax();
      else
        generation_.wait(seen, std::memory_order_acquire);
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_) return;
    for (int64_t count; (count = run_tasks(thread));) done_.fetch_add(count, std::memory_order_release);
  }
}

}  // namespace penstock
