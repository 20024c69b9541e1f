// Ranks that compute a step together: where they wait for each other, and exchange what they have computed.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace penstock {

// A socket to a rank of another node has failed, or was closed.
struct LinkLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One rank's view of memory that all ranks of a group on this node map. A rank's place is its step and how many of the step's
// barriers it has come to: one number that only grows. A rank passes a barrier once no other's place is before its own, so that
// a rank whose step has failed holds up nobody once it has told so.
//
// Ranks of other nodes have places in this memory, too. Each of them is connected to one rank of this node, which it sends its
// part of what is gathered at a barrier, and its place. That rank writes both into the memory when it comes to the barrier
// itself. Buffers lie at the same offsets in the memory of every node.
class Group {
 public:
  static constexpr int64_t kRankBytes = 128;
  static constexpr int64_t kStepBits = 24;  // of a place, that count barriers

  // `memory`: kRankBytes of zeros for each rank, to begin with. `spins`: looks at another's place before sleeping.
  // `seconds`: that a rank is waited for.
  Group(void* memory, int rank, int size, int spins, double seconds)
      : ranks_(static_cast<Rank*>(memory)), rank_(rank), size_(size), spins_(spins), seconds_(seconds) {}

  // Connects to a rank of another node. `socket`: stays the caller's. `sends`, `receives`: whether that rank gets this one's
  // parts, and this one that rank's. `capacity`: bytes of the memory.
  void connect(int socket, int rank, bool sends, bool receives, int64_t capacity);

  // Begins a step. Steps have the same numbers on all ranks, from 1 on.
  void begin(uint64_t step) { arrive(own(), step << kStepBits); }

  // Waits until all ranks are here. Throws std::runtime_error, which names the rank, where one does not come in time, and
  // LinkLost. This rank's part of what is gathered: rows of so many bytes, the next one `stride` bytes after the one before.
  void gather(const void* part, int64_t row_bytes, int64_t stride, int64_t rows);

  // The same where this rank's rows are those whose id is one from `first` on and before `end`.
  void gather_rows(const void* all, int64_t row_bytes, const int64_t* ids, int64_t rows, int64_t first, int64_t end);

  void barrier() { gather(ranks_, 0, 0, 0); }

  // Ends a step that may have failed on this rank. Returns the first rank that it has failed on; -1: none. Throws as above.
  int end(uint64_t step, bool failed);

 private:
  struct alignas(kRankBytes) Rank {
    std::atomic<uint64_t> place;      // first: who watches the ranks reads it
    std::atomic<uint64_t> failed[2];  // the last even and the last odd step that did: others may look at the one before
    std::atomic<uint32_t> changes;    // of the place: what others sleep on
    std::atomic<uint32_t> sleepers;
  };

  // What is sent at a barrier or at the end of a step, before the rows. With `indexed`, these follow their numbers (int32).
  struct Header {
    uint64_t place;
    int64_t offset, row_bytes, stride, rows;
    int32_t indexed, failed;
  };

  struct Peer {
    int socket, rank;
    bool sends, receives;
    size_t sent;               // bytes of `outgoing_`
    Header header;             // of the message that is being received
    size_t received;           // bytes of it
    std::vector<char> rows;    // after its header
  };

  Rank& own() { return ranks_[rank_]; }
  uint64_t arrive(Rank& rank, uint64_t place);
  uint64_t next() { return own().place.load(std::memory_order_relaxed) + 1; }
  void meet(const Header& header);
  void exchange(uint64_t place);
  bool send_some(Peer& peer);
  bool receive_some(Peer& peer);
  void store(Peer& peer);
  bool behind(const Peer& peer, uint64_t place) {
    return peer.receives && ranks_[peer.rank].place.load(std::memory_order_relaxed) < place;
  }
  [[noreturn]] void lost(const Peer& peer, const char* why);
  void wait_for_others(uint64_t place);
  void sleep_until(Rank& other, int number, uint64_t place);

  Rank* ranks_;
  int rank_, size_, spins_;
  double seconds_;
  int64_t capacity_ = 0;
  std::vector<Peer> peers_;
  std::vector<char> outgoing_;
};

}  // namespace penstock
