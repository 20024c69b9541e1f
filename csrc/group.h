// Synchronization of the ranks of a group, and exchange of their results across nodes.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace penstock {

// The connection to a rank of another node has failed, or was closed.
struct LinkLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One rank's view of shared memory, which all ranks of a group on this node map. A rank's progress is the step, and the
// number of the step's barriers that it has reached, in one increasing number. A rank passes a barrier when no other rank's
// progress is less than its own, so that a rank whose step has failed does not block the others once it has ended the step.
//
// Ranks of other nodes have progress in this memory, too. Each of them is connected to one rank of this node, and sends it
// its rows and its progress at a barrier. That rank writes both into the memory when it reaches the barrier itself. Buffers
// have the same offsets in the memory of all nodes.
class Group {
 public:
  static constexpr int64_t kRankBytes = 128;
  static constexpr int64_t kStepBits = 24;  // low bits of the progress, which count the barriers of a step

  // `memory`: kRankBytes per rank, initially zeros. `spins`: number of polls before sleeping. `seconds`: timeout.
  Group(void* memory, int rank, int size, int spins, double seconds)
      : ranks_(static_cast<Rank*>(memory)), rank_(rank), size_(size), spins_(spins), seconds_(seconds) {}

  // Adds a connection to a rank of another node. `socket`: owned by the caller. `sends`, `receives`: whether this rank sends
  // its rows to that one, and receives those of that one. `capacity`: bytes of the memory.
  void connect(int socket, int rank, bool sends, bool receives, int64_t capacity);

  // Begins a step. All ranks use the same step numbers, from 1.
  void begin(uint64_t step) { advance(self(), step << kStepBits); }

  // Barrier with an all-gather between nodes. `data`: this rank's rows of `row_bytes` bytes, `stride` bytes apart. Throws
  // std::runtime_error if a rank does not arrive in time, and LinkLost.
  void gather(const void* data, int64_t row_bytes, int64_t stride, int64_t rows);

  // Like `gather`, where this rank's rows are those of `data` whose id is in [first, end).
  void gather_rows(const void* data, int64_t row_bytes, const int64_t* ids, int64_t rows, int64_t first, int64_t end);

  void barrier() { gather(ranks_, 0, 0, 0); }

  // Ends a step, which may have failed on this rank. Returns the first rank that it failed on, or -1. Throws like `gather`.
  int end(uint64_t step, bool failed);

 private:
  struct alignas(kRankBytes) Rank {
    std::atomic<uint64_t> progress;  // first, as monitors of the ranks read it
    std::atomic<uint64_t> failed[2];  // last failed even and odd step, as others may still read that of the previous step
    std::atomic<uint32_t> changes;  // counts changes of `progress`; a futex
    std::atomic<uint32_t> sleepers;
  };

  // Message at a barrier or at the end of a step, before the rows. With `indexed`, the row numbers (int32) come first.
  struct Header {
    uint64_t progress;
    int64_t offset, row_bytes, stride, rows;
    int32_t indexed, failed;
  };

  struct Peer {
    int socket, rank;
    bool sends, receives;
    size_t sent;  // bytes sent of `outgoing_`
    Header header;  // header of the message that is being received
    size_t received;  // bytes received of the message
    std::vector<char> rows;  // payload
  };

  Rank& self() { return ranks_[rank_]; }
  uint64_t advance(Rank& rank, uint64_t progress);
  uint64_t next() { return self().progress.load(std::memory_order_relaxed) + 1; }
  void synchronize(const Header& header);
  void exchange(uint64_t progress);
  bool try_send(Peer& peer);
  bool try_receive(Peer& peer);
  void store(Peer& peer);
  bool is_behind(const Peer& peer, uint64_t progress) {
    return peer.receives && ranks_[peer.rank].progress.load(std::memory_order_relaxed) < progress;
  }
  [[noreturn]] void throw_link_lost(const Peer& peer, const char* why);
  void wait_for_others(uint64_t progress);
  void sleep_until(Rank& other, int number, uint64_t progress);

  Rank* ranks_;
  int rank_, size_, spins_;
  double seconds_;
  int64_t capacity_ = 0;
  std::vector<Peer> peers_;
  std::vector<char> outgoing_;
};

}  // namespace penstock
