// Ranks on one host that compute a step together: where they wait for each other.

#pragma once

#include <atomic>
#include <cstdint>

namespace penstock {

// One rank's view of memory that all ranks of a group map. A rank's place is its step and how many of the step's barriers it
// has come to: one number that only grows. A rank passes a barrier once no other's place is before its own, so that a rank
// whose step has failed holds up nobody once it has told so.
class Group {
 public:
  static constexpr int64_t kRankBytes = 128;
  static constexpr int64_t kStepBits = 24;  // of a place, that count barriers

  // `memory`: kRankBytes of zeros for each rank, to begin with. `spins`: looks at another's place before sleeping.
  // `seconds`: that a rank is waited for.
  Group(void* memory, int rank, int size, int spins, double seconds)
      : ranks_(static_cast<Rank*>(memory)), rank_(rank), size_(size), spins_(spins), seconds_(seconds) {}

  // Begins a step. Steps have the same numbers on all ranks, from 1 on.
  void begin(uint64_t step) { arrive(step << kStepBits); }

  // Waits until all ranks are here. Throws std::runtime_error, which names the rank, where one does not come in time.
  void barrier() { wait_for_others(arrive(own().place.load(std::memory_order_relaxed) + 1)); }

  // Ends a step that may have failed on this rank. Returns the first rank that it has failed on; -1: none.
  int end(uint64_t step, bool failed);

 private:
  struct alignas(kRankBytes) Rank {
    std::atomic<uint64_t> place;      // first: who watches the ranks reads it
    std::atomic<uint64_t> failed[2];  // the last even and the last odd step that did: others may still look at the one before
    std::atomic<uint32_t> changes;    // of the place: what others sleep on
    std::atomic<uint32_t> sleepers;
  };

  Rank& own() { return ranks_[rank_]; }
  uint64_t arrive(uint64_t place);
  void wait_for_others(uint64_t place);
  void sleep_until(Rank& other, int number, uint64_t place);

  Rank* ranks_;
  int rank_, size_, spins_;
  double seconds_;
};

}  // namespace penstock
