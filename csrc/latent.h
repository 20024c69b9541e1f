// Attention over a latent cache (MLA; DeepSeek-AI, 2024): the vector of a position is the key of all heads, and its first
// elements are the value of all heads.
//
// The cache stores vectors contiguously. Products need keys as columns of positions, and values as rows. Therefore a task
// copies a span, transposed, into thread-local memory, and computes many rows with it (a single query has a row per head).
// All other parts are the same as for other caches (attention.h).

#pragma once

#include "attention.h"
#include "elementwise.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Vectors of a panel, and their scales if quantized.
template <class K>
struct LatentPanel {
  typename K::Element* vectors;
  float* scales;

  LatentPanel(const void* cache, int64_t number, int64_t dim, int64_t size) {
    const int64_t vector = dim * sizeof(typename K::Element) + (K::kQuantized ? sizeof(float) : 0);
    vectors = (typename K::Element*)((char*)cache + number * size * vector);
    scales = (float*)(vectors + size * dim);
  }
};

template <class T, class K>
void store_latent(const LatentStore& a, int64_t token) {
  const int64_t half = a.rope / 2, slot = a.slots[token], latent = a.dim - a.rope;
  const float *cos = a.table + a.positions[token] * a.rope, *sin = cos + half;
  for (int64_t head = 0; head < a.heads; head++)
    rotate_head<kMaxLatentKey>((const T*)a.q + token * a.q_stride + head * a.q_head, cos, sin,
                               (T*)a.out + token * a.out_stride + head * a.out_head, half, a.interleaved);
  T vector[kMaxLatentKey];
  memcpy(vector, (const T*)a.latent + token * a.latent_stride, latent * sizeof(T));
  rotate_head<kMaxLatentKey>((const T*)a.k + token * a.k_stride, cos, sin, vector + latent, half, a.interleaved);
  const int64_t row = a.dim + a.index_dim;
  const LatentPanel<K> panel(a.cache, slot / a.panel, row, a.panel);
  auto* to = panel.vectors + slot % a.panel * row;
  if constexpr (K::kQuantized)
    panel.scales[slot % a.panel] = quantize_vector(vector, a.dim, to).scale;
  else {
    memcpy(to, vector, a.dim * sizeof(T));
    if (a.index_keys) memcpy(to + a.dim, (const T*)a.index_keys + token * a.index_stride, a.index_dim * sizeof(T));
  }
}

// `transfer_tokens` for a latent cache.
template <class K, bool out>
void transfer_latent(const KVTransfer& a, int64_t task) {
  constexpr int64_t scale_bytes = K::kQuantized ? sizeof(float) : 0;
  const int64_t bytes = a.dim * sizeof(typename K::Element);
  const int64_t first = task * kRowsPerTask, end = first + kRowsPerTask < a.count ? first + kRowsPerTask : a.count;
  auto move = [](void* cached, void* sent, int64_t size) { out ? memcpy(sent, cached, size) : memcpy(cached, sent, size); };
  for (int64_t i = first; i < end; i++) {
    const int64_t slot = a.slots[a.tokens[i]], position = slot % a.panel, target = a.places[a.tokens[i]];
    const LatentPanel<K> panel(a.cache, slot / a.panel, a.dim, a.panel);
    char* vector = a.buffer + target / a.slot_tokens * a.slot_bytes + target % a.slot_tokens * (bytes + scale_bytes);
    move(panel.vectors + position * a.dim, vector, bytes);
    if constexpr (K::kQuantized) move(panel.scales + position, vector + bytes, scale_bytes);
  }
}

// Writes four vectors, `row` elements apart, to four columns of a span's keys, in which the elements of a step (32 bits) are
// adjacent.
template <class K>
inline void transpose_keys(const typename K::Element* vectors, int64_t row, int64_t dim, uint32_t* keys) {
  using Four = Vector<uint32_t, 4>;
  const int64_t bytes = dim * sizeof(typename K::Element);
  for (int64_t word = 0; word < bytes / 4; word += 4) {
    Four v[4];
    PENSTOCK_FOR (int i = 0; i < 4; i++) {
      v[i] = load_bits<Four>((const char*)(vectors + i * row) + word * 4);
      if constexpr (K::kQuantized) v[i] = v[i] ^ 0x80808080;  // keys have 128 added
    }
    const Four a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5), b = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
    const Four c = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7), d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
    store_bits(keys + word * kSpan, __builtin_shufflevector(a, b, 0, 1, 4, 5));
    store_bits(keys + (word + 1) * kSpan, __builtin_shufflevector(a, b, 2, 3, 6, 7));
    store_bits(keys + (word + 2) * kSpan, __builtin_shufflevector(c, d, 0, 1, 4, 5));
    store_bits(keys + (word + 3) * kSpan, __builtin_shufflevector(c, d, 2, 3, 6, 7));
  }
}

// Interleaves the elements of two vectors of 16 bytes.
inline void zip(const Vector<uint16_t, 8>& a, const Vector<uint16_t, 8>& b, Vector<uint16_t, 8> (&out)[2]) {
  out[0] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  out[1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
inline void zip(const Vector<uint8_t, 16>& a, const Vector<uint8_t, 16>& b, Vector<uint16_t, 8> (&out)[2]) {
  using Pairs = Vector<uint16_t, 8>;
  out[0] = bitcast<Pairs>(__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  out[1] = bitcast<Pairs>(__builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}

// Writes the values of `kInputs` vectors to a row of a span's values, interleaved: element d of all vectors is adjacent.
template <class K>
inline void interleave_values(const typename K::Element* vectors, int64_t dim, int64_t value_dim,
                              typename K::Element* values) {
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

// Copies `count` positions of a panel, a multiple of four, to position `at` of a span.
template <class K>
void load_span(const KVPanel<K>& span, int64_t at, const LatentPanel<K>& panel, int64_t count, int64_t dim,
               int64_t value_dim) {
  constexpr int n = K::ValueStep::kInputs;
  for (int64_t p = 0; p < count; p += 4) transpose_keys<K>(panel.vectors + p * dim, dim, dim, (uint32_t*)span.keys + at + p);
  for (int64_t p = 0; p < count; p += n)
    interleave_values<K>(panel.vectors + p * dim, dim, value_dim, span.values + (at + p) * value_dim);
  if constexpr (K::kQuantized) {
    memcpy(span.key_scales + at, panel.scales, count * sizeof(float));
    memcpy(span.value_scales + at, panel.scales, count * sizeof(float));
  }
}

// Partial result of a row for some positions.
struct PartialResult {
  float* out;  // sum of values times weights
  f32x16* weight_sum;  // lanes of the sum of weights
  float* max_score;  // maximum score, to which the weights are relative
};

// Merges the result of later positions into the result of earlier positions.
PENSTOCK_NOINLINE void merge_results(const PartialResult& result, const PartialResult& later, int64_t latent, float power) {
  if (*later.max_score == kNegInf) return;
  const float max_score = *later.max_score > *result.max_score ? *later.max_score : *result.max_score;
  const f32x16 factor = exp2<false>(broadcast((*result.max_score - max_score) * power)),
               later_factor = exp2<false>(broadcast((*later.max_score - max_score) * power));
  for (int64_t d = 0; d < latent; d += 16)
    store(result.out + d, fma(load(later.out + d), later_factor, load(result.out + d) * factor));
  *result.weight_sum = fma(*later.weight_sum, later_factor, *result.weight_sum * factor);
  *result.max_score = max_score;
}

inline float log2_scale(const Attention& a) { return a.scale * kLog2E; }

// `row`: number of the row in its sequence.
template <class T>
inline void write_row(const Attention& a, const PartialResult& result, T* out, int64_t row) {
  float weight_sum = sum(*result.weight_sum);
  if (a.sinks) {  // weight of the sink relative to the row's maximum
    const float sink = a.sinks[row % a.heads] * kLog2E - *result.max_score * log2_scale(a);
    weight_sum += exp2<false>(broadcast(sink < 100.0f ? sink : 100.0f))[0];
  }
  const f32x16 share = broadcast(1.0f / weight_sum);
  const int64_t latent = a.latent;
  for (int64_t d = 0; d < latent; d += 16) store(out + d, load(result.out + d) * share);
}

// Partial result of a row in a task's split.
inline PartialResult partial_result(const Attention& a, int64_t task, int64_t row) {
  float* to = a.partial + (task * a.task_rows + row) * (a.latent + 32);
  return {to, (f32x16*)(to + a.latent), to + a.latent + 16};
}

// Number of rows of a task; tile[1] is its first row.
inline int64_t rows_of_task(const Attention& a, const int32_t* tile) {
  const int64_t queries = a.query_starts[tile[0] + 1] - a.query_starts[tile[0]], remaining = queries * a.heads - tile[1];
  return remaining < a.task_rows ? remaining : a.task_rows;
}

template <class T>
void merge_splits(const Attention& a, int64_t task) {
  const int32_t* tile = a.tiles + 4 * task;
  if (tile[2] != 0) return;
  T* out = (T*)a.out + (a.query_starts[tile[0]] * a.heads + tile[1]) * a.latent;
  const int64_t count = rows_of_task(a, tile);
  for (int64_t row = 0; row < count; row++) {
    const PartialResult result = partial_result(a, task, row);
    for (int64_t split = 1; split < tile[3]; split++)
      merge_results(result, partial_result(a, task + split, row), a.latent, log2_scale(a));
    write_row(a, result, out + row * a.latent, tile[1] + row);
  }
}

// Scratch memory of a task, one per thread.
template <class K>
struct LatentScratch {
  static constexpr int64_t kRows = kMaxLatentGroups * kTaskRows;
  std::vector<CacheLine> q, out, span;
  std::vector<CacheLine> before;  // outputs of previous splits
  std::vector<CacheLine> gathered;  // vectors of the positions of a span, with sparse attention
  f32x16 weight_sum[kRows];
  float max_score[kRows];
  QueryRows<K> groups[kMaxLatentGroups];

  LatentScratch()
      : q(ceil_div(kRows * kMaxLatentKey * sizeof(typename K::KeyStep::In), sizeof(CacheLine))),
        out(ceil_div(kRows * kMaxLatent * sizeof(float), sizeof(CacheLine))),
        span(ceil_div(KVPanel<K>::bytes(kMaxLatentKey, kSpan), sizeof(CacheLine))),
        before(out.size()) {}

  QueryRows<K>& group(int64_t row) { return groups[row / kTaskRows]; }

  // Result of a row for the current split, and for all previous splits.
  PartialResult current(int64_t row, int64_t latent) {
    QueryRows<K>& rows = group(row);
    const int64_t r = row % kTaskRows;
    return {rows.out + r * latent, rows.weight_sum + r, rows.max_score + r};
  }
  PartialResult previous(int64_t row, int64_t latent) {
    return {(float*)before.data() + row * latent, weight_sum + row, max_score + row};
  }
};

inline void copy_result(const PartialResult& to, const PartialResult& from, int64_t latent) {
  memcpy(to.out, from.out, latent * sizeof(float));
  memcpy(to.weight_sum, from.weight_sum, sizeof(f32x16));
  *to.max_score = *from.max_score;
}

// Copies the vectors of `count` slots to position 0 of a span.
template <class K>
void gather_span(const Attention& a, LatentScratch<K>& memory, const KVPanel<K>& span, const int32_t* slots, int64_t count) {
  const int64_t dim = a.dim, size = panel_positions(a.block_size), vector = dim * sizeof(typename K::Element);
  memory.gathered.resize(ceil_div(kMaxLatentKey * kSpan * sizeof(typename K::Element), sizeof(CacheLine)));
  const LatentPanel<K> gathered(memory.gathered.data(), 0, dim, kSpan);
  auto cached = [&](int64_t number) {
    const int64_t slot = number / a.parts;
    return LatentPanel<K>(a.cache, slot / size, a.row, size).vectors + slot % size * a.row + number % a.parts * dim;
  };
  for (int64_t p = 0; p < count; p++) memcpy(gathered.vectors + p * dim, cached(slots[p]), vector);
  const int64_t whole = ceil_div(count, 4) * 4;
  memset(gathered.vectors + count * dim, 0, (whole - count) * vector);
  load_span(span, 0, gathered, whole, dim, a.latent);
}

// Computes attention to positions `begin` to `last`, which are within a split.
template <class T, class K>
void attend_split(const Attention& a, LatentScratch<K>& memory, int64_t sequence, int64_t count, int64_t begin,
                  int64_t last) {
  const int64_t dim = a.dim, latent = a.latent, groups = ceil_div(count, kTaskRows);
  const int64_t size = panel_positions(a.block_size), block_panels = a.block_size / size;
  auto rows_of = [&](int64_t group) { return int(group + 1 < groups ? kTaskRows : count - group * kTaskRows); };
  for (int64_t group = 0; group < groups; group++) {
    QueryRows<K>& rows = memory.groups[group];
    rows.clear(rows_of(group), latent);
  }
  KVPanel<K> span(memory.span.data(), 0, dim, kSpan);
  for (int64_t at = begin; at <= last; at += kSpan) {
    if (a.row)
      gather_span<K>(a, memory, span, a.block_tables + sequence * a.table_width + at, std::min(kSpan, last + 1 - at));
    for (int64_t position = at; !a.row && position <= last && position < at + kSpan; position += size) {
      const int64_t panel = position / size, block = a.block_tables[sequence * a.table_width + panel / block_panels];
      const int64_t positions = last + 1 - position < size ? ceil_div(last + 1 - position, 4) * 4 : size;
      load_span(span, position - at, LatentPanel<K>(a.cache, block * block_panels + panel % block_panels, dim, size),
                positions, dim, latent);
    }
    constexpr int at_once = kUsesAmx<K> ? kMaxRowsAtOnce : kTileRows;
    for (int64_t group = 0; group < groups; group++)
      for (int first = 0, rows = rows_of(group); first < rows; first += at_once)
        attend<K>(memory.groups[group], first, rows - first < at_once ? rows - first : at_once, span, span, dim, latent, at,
                  log2_scale(a));
  }
}

template <class T, class K>
void latent_task(const Attention& a, int64_t task) {
  thread_local LatentScratch<K> memory;
  const int32_t* tile = a.tiles + 4 * task;
  const int64_t sequence = tile[0], first_row = tile[1], split = tile[2], dim = a.dim, latent = a.latent;
  const int64_t start = a.query_starts[sequence], queries = a.query_starts[sequence + 1] - start;
  const int64_t before = a.lengths[sequence] - queries, count = rows_of_task(a, tile);
  for (int64_t row = 0; row < count; row++) {
    QueryRows<K>& rows = memory.group(row);
    const int64_t r = row % kTaskRows, group = row / kTaskRows;
    rows.q = (typename K::KeyStep::In*)memory.q.data() + group * kTaskRows * kMaxLatentKey;
    rows.out = (float*)memory.out.data() + group * kTaskRows * kMaxLatent;
    const T* q = (const T*)a.q + (start * a.heads + first_row + row) * dim;
    rows.last_key[r] = before + (first_row + row) / a.heads;
    rows.first_key[r] = 0;
    rows.set_query(r, q, dim);
  }
  const int64_t last = before + (first_row + count - 1) / a.heads;
  auto end_of = [&](int64_t number) {
    return last < (number + 1) * kSplitPositions ? last : (number + 1) * kSplitPositions - 1;
  };
  if (split >= 0) {  // other tasks compute the other splits
    attend_split<T, K>(a, memory, sequence, count, split * kSplitPositions, end_of(split));
    for (int64_t row = 0; row < count; row++) copy_result(partial_result(a, task, row), memory.current(row, latent), latent);
    return;
  }
  T* out = (T*)a.out + (start * a.heads + first_row) * latent;
  for (int64_t number = 0; number * kSplitPositions <= last; number++) {
    attend_split<T, K>(a, memory, sequence, count, number * kSplitPositions, end_of(number));
    const bool is_last = (number + 1) * kSplitPositions > last;
    for (int64_t row = 0; row < count; row++) {
      const PartialResult current = memory.current(row, latent), result = memory.previous(row, latent);
      if (number)
        merge_results(result, current, latent, log2_scale(a));
      else if (!is_last)
        copy_result(result, current, latent);
      if (is_last) write_row(a, number ? result : current, out + row * latent, first_row + row);
    }
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
