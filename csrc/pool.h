// Threads that share out the tasks of one call: each begins with a run of its own, and then helps the others with theirs.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

// In a loop that waits for another thread.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The caller works, too. A worker that finds nothing to do spins for a while, since the next op of a step follows
// within microseconds, and then sleeps.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();

  int threads() const { return int(workers_.size()) + 1; }

  // Calls `work(task)` for every task below `tasks`; returns when all are done.
  template <class F>
  void run(int64_t tasks, F&& work) {
    std::lock_guard one_call_at_a_time(mutex_);
    if (tasks <= 1 || workers_.empty()) {
      for (int64_t task = 0; task < tasks; task++) work(task);
      return;
    }
    job_ = std::ref(work);
    run_shared(tasks);
  }

 private:
  // A thread's run of tasks. What follows each other is read from memory in the order it lies there.
  struct alignas(64) Run {
    std::atomic<int64_t> left{0};
    int64_t end = 0;
  };

  void run_shared(int64_t tasks);
  int64_t take_tasks(int thread);
  void serve(int thread);

  std::mutex mutex_;
  std::vector<std::thread> workers_;
  std::function<void(int64_t)> job_;
  // Tasks that nobody has taken yet. Only who takes one reads `job_` and its run's end, which stay as they are until it is
  // done, so that a call need not wait for a worker that is late, as all are where others use the same cores.
  std::vector<Run> runs_;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> round_{0};  // a new one is work to do
  std::atomic<bool> stopping_{false};
};

}  // namespace penstock
