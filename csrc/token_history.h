// Earlier occurrences of the end of a text: the drafts of suffix decoding.
//
// The structure is that of LZ77 compressors such as deflate: hash tables of the last position of each sequence of n tokens, and
// chains of the positions before it. Adding a token takes constant time, a search visits a bounded number of positions, and the
// memory is bounded: beyond its capacity, the history forgets its oldest tokens.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace penstock {

class TokenHistory {
 public:
  static constexpr int32_t kSeparator = -1;  // between texts; equal to no token of a search
  static constexpr int kMaxLength = 32;  // longest match that is told apart from longer ones

  // An earlier occurrence of the last tokens of a text.
  struct Match {
    int64_t next = -1;  // position of the token after the occurrence; -1: none was found
    int32_t length = 0;  // number of equal tokens, up to kMaxLength
    int32_t token = kSeparator;  // token at position `next`
    int32_t occurrences = 0;  // number of occurrences found with at least half of the length
    int32_t agreeing = 0;  // number of those that are followed by the same token
  };

  explicit TokenHistory(int64_t capacity) {
    if (capacity < 2) throw std::invalid_argument("the capacity must be at least 2 tokens, is " + std::to_string(capacity));
    capacity_ = 1;
    while (capacity_ < capacity) capacity_ *= 2;
    resize(64);
  }

  int64_t size() const { return size_; }
  int64_t bytes() const {
    int64_t all = int64_t(tokens_.capacity());
    for (const Level& level : levels_) all += int64_t(level.heads.capacity() + level.previous.capacity());
    return all * 4;
  }

  void append(const int32_t* tokens, int64_t count) {
    if (size_ + count > int64_t(INT32_MAX) / 2) clear();
    int64_t room = int64_t(tokens_.size());
    while (room < size_ + count && room < capacity_) room *= 2;
    room = std::min(room, capacity_);
    if (room > int64_t(tokens_.size())) resize(room);
    for (int64_t i = 0; i < count; ++i) {
      tokens_[size_ & mask_] = tokens[i];
      size_ += 1;
      index(size_ - 1);
    }
  }

  // The most recent of the longest matches of the end of `text` in this history, which may be the text itself. Matches of more
  // than `longest` tokens count as equally long.
  Match find(const TokenHistory& text, int64_t longest) const {
    longest = std::min<int64_t>(longest, kMaxLength);
    Match best;
    std::array<Candidate, kVisits> found;
    int count = 0;
    for (const Level& level : levels_) {
      if (level.n > longest || text.size_ < level.n || text.size_ - level.n < text.begin()) continue;
      int64_t at = level.heads[text.hash(text.size_ - 1, level.n) & (level.heads.size() - 1)];
      for (int visits = 0; at >= begin() && visits < level.visits; at = level.previous[at & mask_], ++visits) {
        if (at + 1 >= size_) continue;  // the end of this text itself
        const int32_t next = tokens_[(at + 1) & mask_];
        const int32_t length = common(text, at, longest);
        if (length < level.n || next == kSeparator) continue;
        if (count < kVisits) found[count++] = {length, next};
        if (length > best.length) best.next = at + 1, best.length = length, best.token = next;
      }
      if (best.length) break;
    }
    for (int i = 0; i < count; ++i) {
      if (2 * found[i].length < best.length) continue;
      best.occurrences += 1;
      best.agreeing += found[i].next == best.token;
    }
    return best;
  }

  // Up to `count` tokens from position `next`. After the last token, they continue with the returned tokens themselves.
  std::vector<int32_t> tokens(int64_t next, int64_t count) const {
    std::vector<int32_t> result;
    for (int64_t at = next; at < next + count; ++at) {
      const int32_t token = at < size_ ? tokens_[at & mask_] : result[at - size_];
      if (token == kSeparator) break;
      result.push_back(token);
    }
    return result;
  }

 private:
  static constexpr int kVisits = 32;

  struct Candidate {
    int32_t length, next;
  };

  // Positions by their last `n` tokens.
  struct Level {
    int n, visits;
    std::vector<int32_t> heads, previous;  // -1: none
  };

  int64_t begin() const { return std::max<int64_t>(0, size_ - int64_t(tokens_.size())); }

  uint64_t hash(int64_t end, int n) const {
    uint64_t value = 0;
    for (int64_t i = end - n + 1; i <= end; ++i) value = (value ^ uint32_t(tokens_[i & mask_])) * 0x9E3779B97F4A7C15u;
    return value >> 20;
  }

  // Number of equal tokens before and at position `at`, compared with the end of `text`; at most `longest`.
  int32_t common(const TokenHistory& text, int64_t at, int64_t longest) const {
    const int64_t most = std::min({longest, at + 1 - begin(), text.size_ - text.begin()});
    int64_t length = 0;
    while (length < most && tokens_[(at - length) & mask_] == text.tokens_[(text.size_ - 1 - length) & text.mask_]) ++length;
    return int32_t(length);
  }

  void index(int64_t at) {
    for (Level& level : levels_) {
      if (at + 1 - level.n < begin()) continue;
      int32_t& head = level.heads[hash(at, level.n) & (level.heads.size() - 1)];
      level.previous[at & mask_] = head;
      head = int32_t(at);
    }
  }

  // Sets the number of tokens to `room`, a power of two. No token was forgotten before, so that positions are indices.
  void resize(int64_t room) {
    tokens_.resize(room, kSeparator);
    mask_ = room - 1;
    for (Level& level : levels_) {
      level.heads.assign(2 * room, -1);
      level.previous.assign(room, -1);
    }
    for (int64_t at = 0; at < size_; ++at) index(at);
  }

  void clear() {
    size_ = 0;
    for (Level& level : levels_) std::fill(level.heads.begin(), level.heads.end(), -1);
  }

  int64_t capacity_, size_ = 0, mask_ = 0;
  std::vector<int32_t> tokens_;
  std::array<Level, 3> levels_{Level{4, 32, {}, {}}, Level{2, 16, {}, {}}, Level{1, 4, {}, {}}};
};

}  // namespace penstock
