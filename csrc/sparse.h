// Selection of the positions to which queries attend: DeepSeek Sparse Attention (DeepSeek-AI, 2025).

#pragma once

#include "latent.h"

namespace penstock {
namespace PENSTOCK_ISA {

inline int64_t slot_of_position(const SelectKeys& a, const int32_t* table, int64_t position) {
  return table[position / a.block_size] * a.block_size + position % a.block_size;
}

// Slot of the last position of an entry.
inline int64_t entry_slot(const SelectKeys& a, const int32_t* table, int64_t entry) {
  return slot_of_position(a, table, (entry + 1) * a.rate - 1);
}

// Computes the scores of one query and at most kSplitPositions positions. A score is summed over the heads in order.
template <class T>
void score_positions(const SelectKeys& a, int64_t task) {
  using K = UnquantizedKV<T>;
  using Step = typename K::KeyStep;
  const int64_t token = a.tiles[2 * task], begin = a.tiles[2 * task + 1], dim = a.dim;
  const int64_t end = std::min<int64_t>(begin + kSplitPositions, a.ends[token]);
  const int64_t size = panel_positions(a.block_size), block_panels = a.block_size / size;
  const int32_t* table = a.block_tables + a.sequences[token] * a.table_width;
  const float* weights = a.weights + token * a.heads;
  float* scores = a.scores + a.offsets[token];

  thread_local std::vector<CacheLine> query_memory, key_memory;
  query_memory.resize(ceil_div(a.heads * dim * sizeof(typename Step::In), sizeof(CacheLine)));
  key_memory.resize(ceil_div(kSpan * dim * sizeof(T), sizeof(CacheLine)));
  auto* const q = (typename Step::In*)query_memory.data();
  auto* const keys = (T*)key_memory.data();
  prepare<Step>((const T*)a.q + token * a.heads * dim, a.heads * dim, q);

  alignas(64) float products[kTileRows * kSpan], sums[kSpan];
  for (int64_t at = begin; at < end; at += kSpan) {
    const int64_t filled = std::min(kSpan, end - at), columns = ceil_div(filled, 16) * 16;
    if (a.rate) {
      T entries[4 * kMaxIndexDim];
      for (int64_t i = 0; i < filled; i += 4) {
        memset(entries, 0, 4 * dim * sizeof(T));
        for (int64_t j = 0; j < std::min<int64_t>(4, filled - i); j++)
          memcpy(entries + j * dim, (const T*)a.cache + (entry_slot(a, table, at + i + j) + 1) * a.row - dim,
                 dim * sizeof(T));
        transpose_keys<K>(entries, dim, dim, (uint32_t*)keys + i);
      }
    }
    for (int64_t position = at; !a.rate && position < at + filled; position += size) {
      const int64_t panel = position / size, block = table[panel / block_panels];
      const T* vectors = LatentPanel<K>(a.cache, block * block_panels + panel % block_panels, a.row, size).vectors;
      for (int64_t p = 0; p < size; p += 4)
        transpose_keys<K>(vectors + p * a.row + a.row - dim, a.row, dim, (uint32_t*)keys + position - at + p);
    }
    memset(sums, 0, sizeof(sums));
    for (int64_t head = 0; head < a.heads; head += kTileRows) {
      const int64_t count = std::min(kTileRows, a.heads - head);
      with_rows(count, [&]<int R>() {
        multiply_columns<Step, R>(
            q + head * dim, dim, keys, kSpan, columns, dim, {}, [](int, int64_t) { return f32xw{}; },
            [&](int r, int64_t c, const auto& values) { store_bits(products + r * kSpan + c, values); });
      });
      for (int64_t r = 0; r < count; r++) {
        const f32x16 weight = broadcast(weights[head + r] * a.scale);
        for (int64_t c = 0; c < columns; c += 16) {
          const f32x16 product = load(products + r * kSpan + c);
          store(sums + c, fma(select(product > 0.0f, product, f32x16{}), weight, load(sums + c)));
        }
      }
    }
    memcpy(scores + at, sums, filled * sizeof(float));
  }
}

// Integer with the order of a score. Both zeros are equal.
inline uint32_t order_of(float score) {
  const uint32_t bits = bitcast<uint32_t>(score + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

// Writes the slots of the positions to which a query attends. Finds the lowest selected score digit by digit (radix select).
inline void select_positions(const SelectKeys& a, int64_t token) {
  const int64_t end = a.ends[token], offset = a.offsets[token];
  const int32_t* table = a.block_tables + a.sequences[token] * a.table_width;
  int32_t* slots = a.slots + token * (a.window + a.top_k);
  for (int64_t i = std::max<int64_t>(a.window ? a.lasts[token] - a.window : 0, 0); a.window && i < a.lasts[token]; i++)
    *slots++ = int32_t(slot_of_position(a, table, i) * a.parts);
  auto slot_of = [&](int64_t i) {
    return int32_t(a.rate ? (entry_slot(a, table, i) + 1) * a.parts - 1 : slot_of_position(a, table, i));
  };
  if (offset < 0) {
    for (int64_t position = 0; position < end; position++) slots[position] = slot_of(position);
    return;
  }
  constexpr int kDigitBits = 8;
  const float* scores = a.scores + offset;
  uint32_t threshold = 0;
  int64_t remaining = a.top_k;  // number of positions to select among those whose higher digits are those of the threshold
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    int64_t counts[1 << kDigitBits] = {};
    const uint64_t higher = uint64_t(threshold) >> (shift + kDigitBits);
    for (int64_t position = 0; position < end; position++) {
      const uint64_t order = order_of(scores[position]);
      if (order >> (shift + kDigitBits) == higher) counts[order >> shift & ((1 << kDigitBits) - 1)]++;
    }
    uint32_t digit = (1 << kDigitBits) - 1;
    for (; counts[digit] < remaining; digit--) remaining -= counts[digit];
    threshold |= digit << shift;
  }
  for (int64_t position = 0; position < end; position++) {
    const uint32_t order = order_of(scores[position]);
    if (order > threshold || (order == threshold && remaining-- > 0)) *slots++ = slot_of(position);
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
