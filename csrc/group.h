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

// One rank's view of the memory that all ranks of a group on this node share. A rank's progress is one increasing number:
// the step, and the number of barriers of the step that the rank has reached. A rank passes a barrier when no other rank has
// less progress. Therefore a rank with a failed step does not block the other ranks once it has ended the step.
//
// The memory also has the progress of the ranks of other nodes. Each of these ranks is connected to one rank of this node,
// and sends its rows and its progress to this rank at a barrier. The receiving rank writes both into the memory when it
// reaches the barrier. Buffers have the same offsets in the memory of all nodes.
class Group {
 public:
  static constexpr int64_t kRankBytes = 128;
  static constexpr int64_t kStepBits = 24;  // number of low bits of the progress that count the barriers of a step

  // `memory`: kRankBytes per rank, initially zeros. `spins`: number of polls before sleeping. `seconds`: timeout.
  Group(void* memory, int rank, int size, int spins, double seconds)
      : ranks_(static_cast<Rank*>(memory)), rank_(rank), size_(size), spins_(spins), seconds_(seconds) {}

  // Adds a connection to a rank of another node. `socket`: owned by the caller. `sends`: this rank sends its rows to the
  // peer. `receives`: this rank receives the peer's rows. `capacity`: bytes of the memory.
  void connect(int socket, int rank, bool sends, bool receives, int64_t capacity);

  // Begins a step. All ranks use the same step numbers, from 1.
  void begin(uint64_t step) { advance(self(), step << kStepBits); }

  // Barrier with an all-gather between nodes. `data`: this rank's rows of `row_bytes` bytes, `stride` bytes apart. Throws
  // std::runtime_error if a rank does not arrive in time, and LinkLost.
  void gather(const void* data, int64_t row_bytes, int64_t stride, int64_t rows);

  // `gather`, where this rank's rows are the rows of `data` with an id in [first, end).
  void gather_rows(const void* data, int64_t row_bytes, const int64_t* ids, int64_t rows, int64_t first, int64_t end);

  void barrier() { gather(ranks_, 0, 0, 0); }

  // Ends a step, which may have failed on this rank. Returns the first rank on which the step failed; -1 if it failed on
  // none. Throws the exceptions of `gather`.
  int end(uint64_t step, bool failed);

 private:
  struct alignas(kRankBytes) Rank {
    std::atomic<uint64_t> progress;  // the first field, since monitoring processes read it
    std::atomic<uint64_t> failed[2];  // last failed even step and last failed odd step, which other ranks may read later
    std::atomic<uint32_t> changes;  // futex that counts changes of `progress`
    std::atomic<uint32_t> sleepers;  // number of ranks that sleep on `changes`
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
    std::vector<char> rows;  // data of the message after its header
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
