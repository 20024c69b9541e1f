#include "group.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include <cerrno>
#include <poll.h>
#include <sys/socket.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "pool.h"

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

// Sleeps until `value` differs from `seen`, for at most `seconds`; may return early. Uses a futex, which works across
// processes, unlike std::atomic::wait.
void sleep_on(std::atomic<uint32_t>& value, uint32_t seen, double seconds) {
#if defined(__linux__)
  const timespec limit{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  (void)value, (void)seen, (void)seconds;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& value) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
#else
  (void)value;
#endif
}

}  // namespace

// Publishes a rank's progress. A sleeper first increments `sleepers`, then reads `changes`; this function first increments
// `changes`, then reads `sleepers`. All these operations are sequentially consistent. Therefore the sleeper sees the new
// `changes`, or this function sees the sleeper.
uint64_t Group::advance(Rank& rank, uint64_t progress) {
  rank.progress.store(progress, std::memory_order_release);
  rank.changes.fetch_add(1);
  if (rank.sleepers.load()) wake_all(rank.changes);
  return progress;
}

void Group::wait_for_others(uint64_t progress) {
  for (int number = 0; number < size_; number++) {
    if (number == rank_) continue;
    Rank& other = ranks_[number];
    int spins = 0;
    while (other.progress.load(std::memory_order_acquire) < progress) {
      if (spins++ < spins_)
        cpu_relax();
      else
        sleep_until(other, number, progress);
    }
  }
}

void Group::sleep_until(Rank& other, int number, uint64_t progress) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds_);
  while (true) {
    other.sleepers.fetch_add(1);
    const uint32_t seen = other.changes.load();
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    const bool arrived = other.progress.load(std::memory_order_acquire) >= progress;
    if (!arrived && left > 0) sleep_on(other.changes, seen, left);
    other.sleepers.fetch_sub(1);
    if (arrived) return;
    if (left <= 0)
      throw std::runtime_error("rank " + std::to_string(number) + " did not reach the barrier within " +
                               std::to_string(int(seconds_)) + " seconds");
  }
}

int Group::end(uint64_t step, bool failed) {
  if (failed) self().failed[step % 2].store(step, std::memory_order_relaxed);
  synchronize({(step + 1) << kStepBits, 0, 0, 0, 0, 0, failed});
  for (int number = 0; number < size_; number++)
    if (ranks_[number].failed[step % 2].load(std::memory_order_relaxed) == step) return number;
  return -1;
}

// --- Other nodes ------------------------------------------------------------------------------------------------------

void Group::connect(int socket, int rank, bool sends, bool receives, int64_t capacity) {
  peers_.push_back({socket, rank, sends, receives, 0, {}, 0, {}});
  capacity_ = capacity;
}

void Group::gather(const void* data, int64_t row_bytes, int64_t stride, int64_t rows) {
  if (!peers_.empty()) {
    outgoing_.resize(sizeof(Header) + rows * row_bytes);
    for (int64_t row = 0; row < rows; row++)
      memcpy(&outgoing_[sizeof(Header) + row * row_bytes], static_cast<const char*>(data) + row * stride, row_bytes);
  }
  const int64_t offset = static_cast<const char*>(data) - reinterpret_cast<const char*>(ranks_);
  synchronize({next(), offset, row_bytes, stride, rows, 0, 0});
}

void Group::gather_rows(const void* data, int64_t row_bytes, const int64_t* ids, int64_t rows, int64_t first, int64_t end) {
  int64_t count = 0;
  if (!peers_.empty()) {
    const auto is_local = [=](int64_t id) { return id >= first && id < end; };
    count = std::count_if(ids, ids + rows, is_local);
    outgoing_.resize(sizeof(Header) + count * (4 + row_bytes));
    char *index = &outgoing_[0] + sizeof(Header), *row = index + count * 4;
    for (int32_t number = 0; number < rows; number++)
      if (is_local(ids[number])) {
        memcpy(index, &number, 4);
        memcpy(row, static_cast<const char*>(data) + number * row_bytes, row_bytes);
        index += 4;
        row += row_bytes;
      }
  }
  const int64_t offset = static_cast<const char*>(data) - reinterpret_cast<const char*>(ranks_);
  synchronize({next(), offset, row_bytes, row_bytes, count, 1, 0});
}

// Reaches a barrier, and waits for the other ranks. This rank's rows are in `outgoing_`, after space for the header.
void Group::synchronize(const Header& header) {
  advance(self(), header.progress);
  if (!peers_.empty()) {
    if (!header.rows) outgoing_.resize(sizeof(Header));
    memcpy(&outgoing_[0], &header, sizeof(Header));
    exchange(header.progress);
  }
  wait_for_others(header.progress);
}

// Sends this rank's message to peers, and receives messages until all peers have reached `progress`. Sending and receiving
// alternate: peers also send before they receive, and their socket buffers may be full.
void Group::exchange(uint64_t progress) {
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds_);
  for (Peer& peer : peers_) peer.sent = peer.sends ? 0 : outgoing_.size();
  std::vector<pollfd> waiting;
  for (int spins = 0;;) {
    bool moved = false;
    waiting.clear();
    for (Peer& peer : peers_) {
      while (peer.sent < outgoing_.size() && try_send(peer)) moved = true;
      while (is_behind(peer, progress) && try_receive(peer)) moved = true;
      const bool sending = peer.sent < outgoing_.size(), receiving = is_behind(peer, progress);
      if (sending || receiving)
        waiting.push_back({peer.socket, short((sending ? POLLOUT : 0) | (receiving ? POLLIN : 0)), 0});
    }
    if (waiting.empty()) return;
    if (moved)
      spins = 0;
    else if (spins++ < spins_ / 16)  // polling a socket takes about 16 times as long as polling memory
      cpu_relax();
    else if (Clock::now() > deadline)
      throw std::runtime_error("a rank of another node did not reach the barrier within " + std::to_string(int(seconds_)) +
                               " seconds");
    else
      poll(waiting.data(), waiting.size(), 1000);
  }
}

// Sends to a peer without waiting. Returns true if any bytes were sent.
bool Group::try_send(Peer& peer) {
  const ssize_t count = send(peer.socket, &outgoing_[peer.sent], outgoing_.size() - peer.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count < 0) throw_link_lost(peer, strerror(errno));
  peer.sent += count;
  return true;
}

// Receives from a peer without waiting. Returns true if any bytes were received.
bool Group::try_receive(Peer& peer) {
  const bool head = peer.received < sizeof(Header);
  char* to = head ? reinterpret_cast<char*>(&peer.header) + peer.received : &peer.rows[peer.received - sizeof(Header)];
  const size_t size = sizeof(Header) + (head ? 0 : peer.rows.size());
  const ssize_t count = recv(peer.socket, to, size - peer.received, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count <= 0) throw_link_lost(peer, count ? strerror(errno) : "closed by the peer");
  peer.received += count;
  if (peer.received < size) return true;
  if (head) {
    const Header& h = peer.header;
    const bool fits = h.offset >= 0 && h.row_bytes >= 0 && h.stride >= 0 && h.rows >= 0 && h.row_bytes <= capacity_ &&
                      h.rows <= capacity_ / (h.row_bytes + 4);
    if (!fits) throw_link_lost(peer, "it sent an unexpected message");
    peer.rows.resize(h.rows * (h.row_bytes + (h.indexed ? 4 : 0)));
    if (!peer.rows.empty()) return true;
  }
  store(peer);
  return true;
}

// Writes the rows of a complete message into the shared memory, then the peer's progress.
void Group::store(Peer& peer) {
  const Header& h = peer.header;
  const char *index = peer.rows.data(), *row = index + (h.indexed ? h.rows * 4 : 0);
  for (int64_t i = 0; i < h.rows; i++, row += h.row_bytes) {
    int32_t number = int32_t(i);
    if (h.indexed) memcpy(&number, index + i * 4, 4);
    const bool fits = h.offset >= kRankBytes * size_ && h.offset <= capacity_ && number >= 0 &&
                      number <= (capacity_ - h.offset) / std::max<int64_t>(h.stride, 1);
    const int64_t first = fits ? h.offset + number * h.stride : capacity_;
    if (first + h.row_bytes > capacity_) throw_link_lost(peer, "it sent an unexpected message");
    memcpy(reinterpret_cast<char*>(ranks_) + first, row, h.row_bytes);
  }
  const uint64_t step = (h.progress >> kStepBits) - 1;
  if (h.failed) ranks_[peer.rank].failed[step % 2].store(step, std::memory_order_relaxed);
  peer.received = 0;
  advance(ranks_[peer.rank], h.progress);
}

void Group::throw_link_lost(const Peer& peer, const char* why) {
  throw LinkLost("lost the connection to rank " + std::to_string(peer.rank) + " of the group: " + why);
}

}  // namespace penstock
