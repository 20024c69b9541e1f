#include "group.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Sleeps until the word changes from what it was, or for at most so long; may return early. The words are shared between
// processes, which those that std::atomic waits on need not be.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
#if defined(__linux__)
  const timespec limit{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  (void)word, (void)seen, (void)seconds;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

}  // namespace

// Tells the others where this rank is. Who sleeps has first said so and then looked at `changes`; this changes it first and
// then looks for sleepers. Both in one order for all, so that one of the two sees the other.
uint64_t Group::arrive(uint64_t place) {
  Rank& mine = own();
  mine.place.store(place, std::memory_order_release);
  mine.changes.fetch_add(1);
  if (mine.sleepers.load()) wake_all(mine.changes);
  return place;
}

void Group::wait_for_others(uint64_t place) {
  for (int number = 0; number < size_; number++) {
    if (number == rank_) continue;
    Rank& other = ranks_[number];
    int spins = 0;
    while (other.place.load(std::memory_order_acquire) < place) {
      if (spins++ < spins_)
        relax();
      else
        sleep_until(other, number, place);
    }
  }
}

void Group::sleep_until(Rank& other, int number, uint64_t place) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds_);
  while (true) {
    other.sleepers.fetch_add(1);
    const uint32_t seen = other.changes.load();
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    const bool there = other.place.load(std::memory_order_acquire) >= place;
    if (!there && left > 0) sleep_on(other.changes, seen, left);
    other.sleepers.fetch_sub(1);
    if (there) return;
    if (left <= 0)
      throw std::runtime_error("rank " + std::to_string(number) + " has not come to where the others are in " +
                               std::to_string(int(seconds_)) + " seconds");
  }
}

int Group::end(uint64_t step, bool failed) {
  if (failed) own().failed[step % 2].store(step, std::memory_order_relaxed);
  wait_for_others(arrive((step + 1) << kStepBits));
  for (int number = 0; number < size_; number++)
    if (ranks_[number].failed[step % 2].load(std::memory_order_relaxed) == step) return number;
  return -1;
}

}  // namespace penstock
