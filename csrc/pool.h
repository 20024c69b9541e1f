// A thread pool for the tasks of one call at a time. Each thread first runs a separate range of tasks, then tasks that other
// threads have not started.

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

// Pauses in a spin loop.
inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A pool of threads, one of which is the calling thread. An idle worker first spins, since the next op of a step usually
// follows within microseconds, and then sleeps.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();

  int threads() const { return int(workers_.size()) + 1; }

  // Calls `work(task)` for all tasks from 0 to `tasks` - 1. Returns when all tasks are done.
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
  // A thread's range of tasks. Consecutive tasks read consecutive memory.
  struct alignas(64) Run {
    std::atomic<int64_t> left{0};
    int64_t end = 0;
  };

  void run_shared(int64_t tasks);
  int64_t run_tasks(int thread);
  void work_loop(int thread);

  std::mutex mutex_;
  std::vector<std::thread> workers_;
  std::function<void(int64_t)> job_;
  // Tasks that are not started. Only threads that have taken a task read `job_` and the ends of ranges, which do not change
  // until that task is done. Therefore a call need not wait for workers that wake up late, as they often do if other
  // processes use the same cores.
  std::vector<Run> runs_;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // incremented for each call
  std::atomic<bool> stopping_{false};
};

}  // namespace penstock
