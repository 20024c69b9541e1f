// Attention over a latent cache (DeepSeek-AI, 2024): a position has one vector, which is the key of all heads, and its
// beginning their value.
//
// Vectors are kept once, one after the other. Products want keys as columns of positions, and values as rows of them: so a
// task lays out a span both ways in its own memory, and takes many rows, of which there are as many as heads for a single
// query. From there on it is the attention of other caches (attention.h).

#pragma once

#include "attention.h"
#include "elementwise.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The vectors of a panel, and their scales where they are rounded.
template <class K>
struct LatentPanel {
  typename K::Element* vectors;
  float* scales;

  LatentPanel(const void* cache, int64_t number, int64_t dim, int64_t size) {
    const int64_t vector = dim * sizeof(typename K::Element) + (K::kRounds ? sizeof(float) : 0);
    vectors = (typename K::Element*)((char*)cache + number * size * vector);
    scales = (float*)(vectors + size * dim);
  }
};

template <class T, class K>
void store_latent(const LatentStore& a, int64_t token) {
  const int64_t half = a.rope / 2, slot = a.slots[token], latent = a.dim - a.rope;
  const float *cos = a.table + a.positions[token] * a.rope, *sin = cos + half;
  for (int64_t head = 0; head < a.heads; head++)
    turn<kMaxLatentKey>((const T*)a.q + token * a.q_stride + head * a.q_head, cos, sin,
                        (T*)a.out + token * a.out_stride + head * a.out_head, half, a.pairs);
  T vector[kMaxLatentKey];
  memcpy(vector, (const T*)a.latent + token * a.latent_stride, latent * sizeof(T));
  turn<kMaxLatentKey>((const T*)a.k + token * a.k_stride, cos, sin, vector + latent, half, a.pairs);
  const LatentPanel<K> panel(a.cache, slot / a.panel, a.dim, a.panel);
  auto* to = panel.vectors + slot % a.panel * a.dim;
  if constexpr (K::kRounds)
    panel.scales[slot % a.panel] = round_row(vector, a.dim, to).scale;
  else
    memcpy(to, vector, a.dim * sizeof(T));
}

// As exchange_tokens.
template <class K, bool out>
void exchange_latent(const Exchange& a, int64_t task) {
  constexpr int64_t scale_bytes = K::kRounds ? sizeof(float) : 0;
  const int64_t bytes = a.dim * sizeof(typename K::Element);
  const int64_t first = task * kRowsTogether, end = first + kRowsTogether < a.count ? first + kRowsTogether : a.count;
  auto move = [](void* cached, void* sent, int64_t size) { out ? memcpy(sent, cached, size) : memcpy(cached, sent, size); };
  for (int64_t i = first; i < end; i++) {
    const int64_t slot = a.slots[a.chosen[i]], position = slot % a.panel, place = a.places[a.chosen[i]];
    const LatentPanel<K> panel(a.cache, slot / a.panel, a.dim, a.panel);
    char* vector = a.buffer + place / a.slot_tokens * a.slot_bytes + place % a.slot_tokens * (bytes + scale_bytes);
    move(panel.vectors + position * a.dim, vector, bytes);
    if constexpr (K::kRounds) move(panel.scales + position, vector + bytes, scale_bytes);
  }
}

// Four vectors as four columns of a span's keys, whose elements lie some together in 32 bits.
template <class K>
inline void lay_out_keys(const typename K::Element* vectors, int64_t dim, uint32_t* keys) {
  using Four = Vector<uint32_t, 4>;
  const int64_t bytes = dim * sizeof(typename K::Element);
  for (int64_t word = 0; word < bytes / 4; word += 4) {
    Four v[4];
    PENSTOCK_FOR (int i = 0; i < 4; i++) {
      v[i] = load_bits<Four>((const char*)vectors + i * bytes + word * 4);
      if constexpr (K::kRounds) v[i] = v[i] ^ 0x80808080;  // keys have 128 added
    }
    const Four a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5), b = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
    const Four c = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7), d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
    store_bits(keys + word * kSpan, __builtin_shufflevector(a, b, 0, 1, 4, 5));
    store_bits(keys + (word + 1) * kSpan, __builtin_shufflevector(a, b, 2, 3, 6, 7));
    store_bits(keys + (word + 2) * kSpan, __builtin_shufflevector(c, d, 0, 1, 4, 5));
    store_bits(keys + (word + 3) * kSpan, __builtin_shufflevector(c, d, 2, 3, 6, 7));
  }
}

// Two vectors of 16 bytes, element by element in turn.
inline void zip(const Vector<uint16_t, 8>& a, const Vector<uint16_t, 8>& b, Vector<uint16_t, 8> (&out)[2]) {
  out[0] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  out[1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
inline void zip(const Vector<uint8_t, 16>& a, const Vector<uint8_t, 16>& b, Vector<uint16_t, 8> (&out)[2]) {
  using Pairs = Vector<uint16_t, 8>;
  out[0] = as<Pairs>(__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  out[1] = as<Pairs>(__builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}

// The beginnings of some vectors as a row of a span's values, in which elements of the same number lie together.
template <class K>
inline void lay_out_values(const typename K::Element* vectors, int64_t dim, int64_t value_dim, typename K::Element* values) {
  constexpr int n = K::ValueStep::kInputs;
  using Pairs = Vector<uint16_t, 8>;
  if constexpr (n == 1) {
    memcpy(values, vectors, value_dim * sizeof(*values));
  } else if constexpr (n == 2) {
    for (int64_t d = 0; d < value_dim; d += 8) {
      Pairs zipped[2];
      zip(load_bits<Pairs>(vectors + d), load_bits<Pairs>(vectors + dim + d), zipped);
      store_bits(values + d * 2, zipped[0]);
      store_bits(values + d * 2 + 8, zipped[1]);
    }
  } else {
    using Bytes = Vector<uint8_t, 16>;
    for (int64_t d = 0; d < value_dim; d += 16) {
      Pairs first[2], second[2], zipped[2];
      zip(load_bits<Bytes>(vectors + d), load_bits<Bytes>(vectors + dim + d), first);
      zip(load_bits<Bytes>(vectors + 2 * dim + d), load_bits<Bytes>(vectors + 3 * dim + d), second);
      PENSTOCK_FOR (int half = 0; half < 2; half++) {
        zip(first[half], second[half], zipped);
        store_bits(values + d * 4 + half * 32, zipped[0]);
        store_bits(values + d * 4 + half * 32 + 16, zipped[1]);
      }
    }
  }
}

// Some positions of a panel, a multiple of four, to those from `at` on of a span.
template <class K>
void lay_out(const Panel<K>& span, int64_t at, const LatentPanel<K>& panel, int64_t count, int64_t dim, int64_t value_dim) {
  constexpr int n = K::ValueStep::kInputs;
  for (int64_t p = 0; p < count; p += 4) lay_out_keys<K>(panel.vectors + p * dim, dim, (uint32_t*)span.keys + at + p);
  for (int64_t p = 0; p < count; p += n)
    lay_out_values<K>(panel.vectors + p * dim, dim, value_dim, span.values + (at + p) * value_dim);
  if constexpr (K::kRounds) {
    memcpy(span.key_scales + at, panel.scales, count * sizeof(float));
    memcpy(span.value_scales + at, panel.scales, count * sizeof(float));
  }
}

// What a row of queries has come to at some positions.
struct Sums {
  float* out;  // of values, times their weights
  f32x16* total;  // of weights
  float* top;     // the score that these are relative to
};

// Sums over later positions join those over earlier ones.
PENSTOCK_APART void join_sums(const Sums& sums, const Sums& later, int64_t latent, float power) {
  if (*later.top == kNever) return;
  const float top = *later.top > *sums.top ? *later.top : *sums.top;
  const f32x16 keep = exp2<false>(all((*sums.top - top) * power)), join = exp2<false>(all((*later.top - top) * power));
  for (int64_t d = 0; d < latent; d += 16) store(sums.out + d, fma(load(later.out + d), join, load(sums.out + d) * keep));
  *sums.total = fma(*later.total, join, *sums.total * keep);
  *sums.top = top;
}

template <class T>
inline void finish_row(const Sums& sums, T* out, int64_t latent) {
  const f32x16 share = all(1.0f / sum(*sums.total));
  for (int64_t d = 0; d < latent; d += 16) store(out + d, load(sums.out + d) * share);
}

inline float power_of(const Attention& a) { return a.scale * kLog2E; }

// A row's sums in a task's part.
inline Sums partial_sums(const Attention& a, int64_t task, int64_t row) {
  float* to = a.partial + (task * a.task_rows + row) * (a.latent + 32);
  return {to, (f32x16*)(to + a.latent), to + a.latent + 16};
}

// The rows that a task takes, of which its tile names the first.
inline int64_t rows_of_task(const Attention& a, const int32_t* tile) {
  const int64_t queries = a.query_starts[tile[0] + 1] - a.query_starts[tile[0]], left = queries * a.heads - tile[1];
  return left < a.task_rows ? left : a.task_rows;
}

template <class T>
void join_parts(const Attention& a, int64_t task) {
  const int32_t* tile = a.tiles + 4 * task;
  if (tile[2] != 0) return;
  T* out = (T*)a.out + (a.query_starts[tile[0]] * a.heads + tile[1]) * a.latent;
  const int64_t count = rows_of_task(a, tile);
  for (int64_t row = 0; row < count; row++) {
    const Sums sums = partial_sums(a, task, row);
    for (int64_t part = 1; part < tile[3]; part++) join_sums(sums, partial_sums(a, task + part, row), a.latent, power_of(a));
    finish_row(sums, out + row * a.latent, a.latent);
  }
}

// The memory of a task, which is this thread's.
template <class K>
struct LatentMemory {
  static constexpr int64_t kRows = kLatentGroups * kTaskRows;
  std::vector<Line> q, out, span;
  std::vector<Line> before;  // as `out`: of the parts before
  f32x16 total[kRows];
  float top[kRows];
  Rows<K> groups[kLatentGroups];

  LatentMemory()
      : q(ceil_div(kRows * kMaxLatentKey * sizeof(typename K::KeyStep::In), sizeof(Line))),
        out(ceil_div(kRows * kMaxLatent * sizeof(float), sizeof(Line))),
        span(ceil_div(Panel<K>::bytes(kMaxLatentKey, kSpan), sizeof(Line))),
        before(out.size()) {}

  Rows<K>& group(int64_t row) { return groups[row / kTaskRows]; }

  // Sums of the part at work, and of those before it.
  Sums now(int64_t row, int64_t latent) {
    Rows<K>& rows = group(row);
    const int64_t r = row % kTaskRows;
    return {rows.out + r * latent, rows.total + r, rows.top + r};
  }
  Sums sums(int64_t row, int64_t latent) { return {(float*)before.data() + row * latent, total + row, top + row}; }
};

inline void copy_sums(const Sums& to, const Sums& from, int64_t latent) {
  memcpy(to.out, from.out, latent * sizeof(float));
  memcpy(to.total, from.total, sizeof(f32x16));
  *to.top = *from.top;
}

// Attends to the positions from `begin` to `last`, which are at most a part.
template <class T, class K>
void attend_part(const Attention& a, LatentMemory<K>& memory, int64_t sequence, int64_t count, int64_t begin, int64_t last) {
  const int64_t dim = a.dim, latent = a.latent, groups = ceil_div(count, kTaskRows);
  const int64_t size = panel_of(a.block_size), of_block = a.block_size / size;
  auto rows_of = [&](int64_t group) { return int(group + 1 < groups ? kTaskRows : count - group * kTaskRows); };
  for (int64_t group = 0; group < groups; group++) {
    Rows<K>& rows = memory.groups[group];
    rows.clear(rows_of(group), latent);
  }
  Panel<K> span(memory.span.data(), 0, dim, kSpan);
  for (int64_t at = begin; at <= last; at += kSpan) {
    for (int64_t position = at; position <= last && position < at + kSpan; position += size) {
      const int64_t panel = position / size, block = a.block_tables[sequence * a.table_width + panel / of_block];
      const int64_t some = last + 1 - position < size ? ceil_div(last + 1 - position, 4) * 4 : size;
      lay_out(span, position - at, LatentPanel<K>(a.cache, block * of_block + panel % of_block, dim, size), some, dim,
              latent);
    }
    constexpr int together = kByTiles<K> ? kTogether : kTileRows;
    for (int64_t group = 0; group < groups; group++)
      for (int first = 0, rows = rows_of(group); first < rows; first += together)
        attend<K>(memory.groups[group], first, rows - first < together ? rows - first : together, span, span, dim, latent,
                  at, power_of(a));
  }
}

template <class T, class K>
void latent_task(const Attention& a, int64_t task) {
  thread_local LatentMemory<K> memory;
  const int32_t* tile = a.tiles + 4 * task;
  const int64_t sequence = tile[0], first_row = tile[1], part = tile[2], dim = a.dim, latent = a.latent;
  const int64_t start = a.query_starts[sequence], queries = a.query_starts[sequence + 1] - start;
  const int64_t before = a.lengths[sequence] - queries, count = rows_of_task(a, tile);
  for (int64_t row = 0; row < count; row++) {
    Rows<K>& rows = memory.group(row);
    const int64_t r = row % kTaskRows, group = row / kTaskRows;
    rows.q = (typename K::KeyStep::In*)memory.q.data() + group * kTaskRows * kMaxLatentKey;
    rows.out = (float*)memory.out.data() + group * kTaskRows * kMaxLatent;
    const T* q = (const T*)a.q + (start * a.heads + first_row + row) * dim;
    rows.seen[r] = before + (first_row + row) / a.heads;
    rows.from[r] = 0;
    rows.set_query(r, q, dim);
  }
  const int64_t last = before + (first_row + count - 1) / a.heads;
  auto end_of = [&](int64_t number) { return last < (number + 1) * kPart ? last : (number + 1) * kPart - 1; };
  if (part >= 0) {  // others take the other parts
    attend_part<T, K>(a, memory, sequence, count, part * kPart, end_of(part));
    for (int64_t row = 0; row < count; row++) copy_sums(partial_sums(a, task, row), memory.now(row, latent), latent);
    return;
  }
  T* out = (T*)a.out + (start * a.heads + first_row) * latent;
  for (int64_t number = 0; number * kPart <= last; number++) {
    attend_part<T, K>(a, memory, sequence, count, number * kPart, end_of(number));
    const bool ends = (number + 1) * kPart > last;
    for (int64_t row = 0; row < count; row++) {
      const Sums now = memory.now(row, latent), sums = memory.sums(row, latent);
      if (number)
        join_sums(sums, now, latent, power_of(a));
      else if (!ends)
        copy_sums(sums, now, latent);
      if (ends) finish_row(number ? sums : now, out + row * latent, latent);
    }
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
