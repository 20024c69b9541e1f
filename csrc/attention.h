// Paged attention for prefill and decode.
//
// A task computes some rows (queries times heads that share a KV head). It processes the sequence's positions in order, in
// spans of 64 absolute positions, with online softmax (Milakov and Gimelshein, 2018). Therefore the result of a row does not
// depend on the other rows of its task, on chunked prefill, or on the block size, if keys and values are finite. Products
// take six rows at a time. All rows of a task process a span before the next span, while it is in the processor's cache.

#pragma once

#include <algorithm>

#include "formats.h"
#include "rounding.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kRescaleThreshold = 8.0f;  // log2 of the largest softmax weight before accumulators are rescaled: 256

// --- Cache layout ----------------------------------------------------------------------------------------------------

// Unquantized keys and values.
template <class T>
struct UnquantizedKV {
  using Element = T;
  using KeyStep = typename StepOf<T>::Step;
  using ValueStep = KeyStep;
  static constexpr bool kQuantized = false;
};

// Keys and values in 8 bits with one scale per vector; keys are stored with 128 added. Queries are also quantized, and so
// are the softmax weights within a span of positions.
struct Int8KV {
  using Element = int8_t;
  using KeyStep = Int8Step;
  using ValueStep = UInt8Step;
  static constexpr bool kQuantized = true;
};

// Keys and values of a panel and KV head.
template <class K>
struct KVPanel {
  typename K::Element *keys, *values;
  float *key_scales, *value_scales;  // only if quantized

  static int64_t bytes(int64_t dim, int64_t size) {
    return 2 * size * (dim * sizeof(typename K::Element) + (K::kQuantized ? sizeof(float) : 0));
  }

  // `number`: panel * KV heads + head.
  KVPanel(const void* cache, int64_t number, int64_t dim, int64_t size) {
    keys = (typename K::Element*)((char*)cache + number * bytes(dim, size));
    values = keys + dim * size;
    key_scales = (float*)(values + dim * size);
    value_scales = key_scales + size;
  }
};

// Writes a key to its column of a panel: groups of `kInputs` elements, one group per row.
template <class K>
inline void write_key(typename K::Element* panel, int64_t position, int64_t size, const typename K::Element* key,
                      int64_t dim) {
  constexpr int n = K::KeyStep::kInputs;
  for (int64_t d = 0; d < dim; d += n) memcpy(panel + d * size + position * n, key + d, n * sizeof(typename K::Element));
}

// Writes a value to its row of a panel, in which `kInputs` positions of each element are adjacent.
template <class K>
inline void write_value(typename K::Element* panel, int64_t position, const typename K::Element* value, int64_t dim) {
  constexpr int n = K::ValueStep::kInputs;
  typename K::Element* to = panel + position / n * n * dim;
#if defined(__AVX512BW__)
  if constexpr (n > 1) {  // writes 16 elements at a time, with masks, since other threads may write other positions
    const int part = int(position % n * sizeof(*to));
    const uint64_t bytes = (sizeof(*to) == 1 ? 0x1111111111111111 : 0x3333333333333333) << part;
    for (; dim >= 16; dim -= 16, value += 16, to += 16 * n) {
      using Narrow = std::conditional_t<sizeof(*to) == 1, u8x16, u16x16>;
      const u32x16 wide = convert<u32x16>(load_bits<Narrow>(value)) << (8 * part);
      _mm512_mask_storeu_epi8(to, bytes, (__m512i)wide);
    }
  }
#endif
  for (int64_t d = 0; d < dim; d++) to[d * n + position % n] = value[d];
}

// Reads a key that `write_key` has written.
template <class K>
inline void read_key(const typename K::Element* panel, int64_t position, int64_t size, typename K::Element* key,
                     int64_t dim) {
  constexpr int n = K::KeyStep::kInputs;
  for (int64_t d = 0; d < dim; d += n) memcpy(key + d, panel + d * size + position * n, n * sizeof(typename K::Element));
}

// Reads a value that `write_value` has written.
template <class K>
inline void read_value(const typename K::Element* panel, int64_t position, typename K::Element* value, int64_t dim) {
  constexpr int n = K::ValueStep::kInputs;
  const typename K::Element* from = panel + position / n * n * dim;
  for (int64_t d = 0; d < dim; d++) value[d] = from[d * n + position % n];
}

// Prefetches the scattered memory that write_key and write_value access.
template <class K>
inline void prefetch_slot(const KVPanel<K>& panel, int64_t position, int64_t size, int64_t dim) {
  using Element = typename K::Element;
  constexpr int n = K::KeyStep::kInputs, m = K::ValueStep::kInputs;
  for (int64_t d = 0; d < dim; d += n) __builtin_prefetch(panel.keys + d * size + position * n, 1);
  for (int64_t i = 0; i < dim * m; i += 64 / sizeof(Element))
    __builtin_prefetch(panel.values + position / m * m * dim + i, 1);
}

template <class T, class K>
void store_token(const Store& a, int64_t token) {
  const int64_t slot = a.slots[token], position = slot % a.panel;
  auto panel_at = [&](int64_t head) { return KVPanel<K>(a.cache, slot / a.panel * a.kv_heads + head, a.dim, a.panel); };
  prefetch_slot(panel_at(0), position, a.panel, a.dim);
  for (int64_t head = 0; head < a.kv_heads; head++) {
    const KVPanel<K> panel = panel_at(head);
    if (head + 1 < a.kv_heads) prefetch_slot(panel_at(head + 1), position, a.panel, a.dim);
    const T* k = (const T*)a.k + token * a.stride_k + head * a.dim;
    const T* v = (const T*)a.v + token * a.stride_v + head * a.dim;
    if constexpr (K::kQuantized) {
      int8_t key[kMaxHead], value[kMaxHead];
      panel.key_scales[position] = quantize_vector(k, a.dim, key).scale;
      for (int64_t d = 0; d < a.dim; d++) key[d] = int8_t(key[d] ^ 0x80);
      panel.value_scales[position] = quantize_vector(v, a.dim, value).scale;
      write_key<K>(panel.keys, position, a.panel, key, a.dim);
      write_value<K>(panel.values, position, value, a.dim);
    } else {
      write_key<K>(panel.keys, position, a.panel, k, a.dim);
      write_value<K>(panel.values, position, v, a.dim);
    }
  }
}

// Copies the tokens of a task from the cache to the buffer (`out`), or from the buffer to the cache.
template <class K, bool out>
void transfer_tokens(const KVTransfer& a, int64_t task) {
  using Element = typename K::Element;
  constexpr int64_t scale_bytes = K::kQuantized ? sizeof(float) : 0;
  const int64_t vector = a.dim * sizeof(Element) + scale_bytes;
  const int64_t first = task * kRowsPerTask, end = first + kRowsPerTask < a.count ? first + kRowsPerTask : a.count;
  for (int64_t i = first; i < end; i++) {
    const int64_t slot = a.slots[a.tokens[i]], position = slot % a.panel, target = a.places[a.tokens[i]];
    char* keys =
        a.buffer + target / a.slot_tokens * a.slot_bytes + (target % a.slot_tokens * a.all_heads + a.first_head) * vector;
    char* values = keys + a.slot_tokens * a.all_heads * vector;
    for (int64_t head = 0; head < a.kv_heads; head++, keys += vector, values += vector) {
      const KVPanel<K> panel(a.cache, slot / a.panel * a.kv_heads + head, a.dim, a.panel);
      Element key[kMaxHead], value[kMaxHead];
      const int64_t bytes = a.dim * sizeof(Element);
      auto shift = [&] {  // keys are stored in the cache with 128 added
        if constexpr (K::kQuantized)
          for (int64_t d = 0; d < a.dim; d++) key[d] = int8_t(key[d] ^ 0x80);
      };
      if constexpr (out) {
        read_key<K>(panel.keys, position, a.panel, key, a.dim);
        read_value<K>(panel.values, position, value, a.dim);
        shift();
        memcpy(keys, key, bytes);
        memcpy(values, value, bytes);
        memcpy(keys + bytes, panel.key_scales + position, scale_bytes);
        memcpy(values + bytes, panel.value_scales + position, scale_bytes);
      } else {
        memcpy(key, keys, bytes);
        memcpy(value, values, bytes);
        shift();
        write_key<K>(panel.keys, position, a.panel, key, a.dim);
        write_value<K>(panel.values, position, value, a.dim);
        memcpy(panel.key_scales + position, keys + bytes, scale_bytes);
        memcpy(panel.value_scales + position, values + bytes, scale_bytes);
      }
    }
  }
}

// --- Products --------------------------------------------------------------------------------------------------------

// Multiplies x[R][inputs] by `columns` of the `width` columns of a panel, as many columns at a time as registers hold. The
// sums of a vector start with `begin(row, column)` and are passed to `finish(row, column, sums)`. Prefetches `ahead`.
template <class Step, int R, class Begin, class Finish>
PENSTOCK_INLINE inline void multiply_columns(const typename Step::In* x, int64_t ldx, const void* panel, int64_t width,
                                             int64_t columns, int64_t inputs, Prefetch ahead, Begin&& begin,
                                             Finish&& finish) {
  auto columns_at_once = [&]<int G>(int64_t c) PENSTOCK_INLINE {
    typename Step::Sum sums[R][G];
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] = begin(r, c + g * kWidth);
    multiply<Step, R, G>(x, ldx, (const char*)panel + c / kWidth * Step::kBytes, width / kWidth * Step::kBytes, inputs, sums,
                         ahead);
    ahead.at += inputs / Step::kInputs * ahead.lines * 64;
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) finish(r, c + g * kWidth, sums[r][g]);
  };
  constexpr int maximum = column_vectors(R), fewest = 16 / kWidth < maximum ? 16 / kWidth : maximum;
  int64_t c = 0;
  for (; c + maximum * kWidth <= columns; c += maximum * kWidth) columns_at_once.template operator()<maximum>(c);
  for (; c < columns; c += fewest * kWidth) columns_at_once.template operator()<fewest>(c);
}

// --- Attention -------------------------------------------------------------------------------------------------------

template <class K>
constexpr bool kUsesAmx = UsesAmx<typename K::KeyStep>::value;
constexpr int64_t kMaxRowsAtOnce = kHasAmx ? kTaskRows : kTileRows;  // maximum number of rows that process a span together

// State of a task's rows. Queries are `dim` elements apart, outputs as many elements as a value has.
template <class K>
struct QueryRows {
  typename K::KeyStep::In* q;  // cache-line aligned, like `out`
  float* out;
  f32x16 weight_sum[kTaskRows];
  float max_score[kTaskRows + 16];
  int64_t last_key[kTaskRows], first_key[kTaskRows];  // a row attends to positions first_key..last_key
  Quantization quantization[kTaskRows];  // scale and sum of each quantized query
  float slopes[kTaskRows];  // ALiBi: increase of a row's scores per position
  // Scores and weights of the rows in progress; rows are kSpan elements apart.
  alignas(64) float scores[kMaxRowsAtOnce * kSpan];
  alignas(64) typename K::ValueStep::In weights[kMaxRowsAtOnce * kSpan];
  float scales[kMaxRowsAtOnce];  // scales of quantized weights

  template <class T>
  void set_query(int64_t row, const T* from, int64_t dim) {
    if constexpr (K::kQuantized) {
      int8_t rounded[kMaxLatentKey];
      quantization[row] = quantize_vector(from, dim, rounded);
      prepare<typename K::KeyStep>(rounded, dim, q + row * dim);
    } else {
      prepare<typename K::KeyStep>(from, dim, q + row * dim);
    }
  }
  // Resets the first `count` rows. `value_dim`: elements of a value.
  void clear(int count, int64_t value_dim) {
    memset(out, 0, count * value_dim * sizeof(float));
    for (int r = 0; r < count; r++) {
      max_score[r] = kNegInf;
      weight_sum[r] = f32x16{};
    }
  }
};

// Attention of some rows of a task to a span of positions, which starts at position `begin`.
template <class K>
struct AttentionTile {
  QueryRows<K>& rows;
  int first;
  const KVPanel<K>& span;
  const KVPanel<K>& next;
  int64_t dim, value_dim, begin;  // elements of a key and of a value
  int64_t filled, columns;  // number of positions that are visible to any row; the same rounded up to whole vectors

  // Prefetches the next span while the first rows process this span.
  Prefetch prefetch_span(const void* next, int rows) const {
    return {(const char*)next, first ? 0 : ceil_div(column_vectors(rows) * kWidth, 16)};
  }
  Prefetch prefetch_span_amx(const void* next, int count) const {
    return {(const char*)next, first ? 0 : count > kAmxTileRows ? 2 * kAmxTileRows : 4 * kAmxTileRows};
  }
};

// The three parts of attention are not inlined, so that each has all registers.
#define PENSTOCK_NOINLINE __attribute__((noinline))

// Scores: queries times keys.
template <class K, int R>
PENSTOCK_NOINLINE void score(AttentionTile<K>& m) {
  const Quantization* quantization = m.rows.quantization + m.first;
  multiply_columns<typename K::KeyStep, R>(
      m.rows.q + m.first * m.dim, m.dim, m.span.keys, kSpan, m.columns, m.dim, m.prefetch_span(m.next.keys, R),
      [&](int r, int64_t) {
        if constexpr (K::kQuantized)
          return i32xw{} - 128 * quantization[r].sum;
        else
          return f32xw{};
      },
      [&](int r, int64_t c, const auto& sums) {
        float* to = m.rows.scores + r * kSpan + c;
        if constexpr (K::kQuantized)
          store_bits(to, to_float(sums) * load_bits<f32xw>(m.span.key_scales + c) * quantization[r].scale);
        else
          store_bits(to, sums);
      });
}

template <class K>
PENSTOCK_NOINLINE void score_amx(AttentionTile<K>& m, int count) {
  using Step = typename K::KeyStep;
  using Sum = typename UsesAmx<Step>::Sum;
  multiply_amx<Step>(m.rows.q + m.first * m.dim, m.dim, count, m.span.keys, kSpan / 16 * Step::kBytes, m.columns, m.dim,
                     (Sum*)m.rows.scores, kSpan, true, m.prefetch_span_amx(m.next.keys, count));
  if constexpr (K::kQuantized)
    for (int r = 0; r < count; r++) {
      const Quantization& quantization = m.rows.quantization[m.first + r];
      for (int64_t c = 0; c < m.columns; c += 16) {
        float* score = m.rows.scores + r * kSpan + c;
        const i32x16 sums = load_bits<i32x16>(score) - 128 * quantization.sum;
        store(score, to_float(sums) * load(m.span.key_scales + c) * quantization.scale);
      }
    }
}

// Computes the scales of the visible positions' values, divided by the largest of these scales, and times 255 (the quantized
// weight for 1). Returns the largest scale.
inline float relative_scales(const float* scales, int64_t columns, f32x16* relative, auto&& visible) {
  f32x16 maximum = {};
  for (int64_t p = 0; p < columns; p += 16) {
    relative[p / 16] = select(visible(p), load(scales + p), f32x16{});
    maximum = max(relative[p / 16], maximum);
  }
  const float largest_scale = reduce_max(maximum);
  const f32x16 inverse = broadcast(largest_scale > kMinMagnitude ? 255.0f / largest_scale : 0.0f);
  for (int64_t p = 0; p < columns; p += 16) relative[p / 16] *= inverse;
  return largest_scale;
}

// Converts scores to softmax weights, e^(scale * x) = 2^(power * x), relative to `max_score`. This is the maximum so far, or
// an earlier maximum that is lower by at most kRescaleThreshold, so that not every new maximum rescales the accumulators.
template <class K, int R>
PENSTOCK_NOINLINE void update_softmax(AttentionTile<K>& m, int at, float power) {
  const int64_t first = m.first + at;  // index of the first query row of this call
  constexpr bool coarse = !std::is_same_v<K, UnquantizedKV<float>>;
  auto all_visible = [&](int64_t row) {
    return m.begin >= m.rows.first_key[row] && m.begin + m.columns - 1 <= m.rows.last_key[row];
  };
  auto visible = [&](int64_t row, int64_t p) {
    const i32x16 position = iota() + int32_t(m.begin + p);
    return (position >= int32_t(m.rows.first_key[row])) & (position <= int32_t(m.rows.last_key[row]));
  };
  float row_max[16], bases[16], shares[16];  // values of each row
  store(row_max, broadcast(kNegInf));
  for (int r = 0; r < R; r++) {
    float* scores = m.rows.scores + (at + r) * kSpan;
    f32x16 maximum = broadcast(kNegInf);
    for (int64_t p = 0; p < m.columns; p += 16) {
      f32x16 masked = load(scores + p);
      if (!all_visible(first + r)) store(scores + p, masked = select(visible(first + r, p), masked, broadcast(kNegInf)));
      maximum = max(maximum, masked);
    }
    row_max[r] = reduce_max(maximum);
  }
  const f32x16 now = load(row_max), before = load(m.rows.max_score + first);
  const i32x16 rescale = (now - before) * power > kRescaleThreshold;
  const f32x16 max_score = select(rescale, now, before);
  store(m.rows.max_score + first, max_score);
  // Without a visible position, all weights are zero.
  store(bases, select(now == kNegInf, f32x16{}, (K::kQuantized ? now : max_score) * -power));
  store(shares, select(now == kNegInf, f32x16{}, exp2<false>((now - max_score) * power)));
  const f32x16 keep = exp2<false>((before - max_score) * power);
  for (int r = 0; r < R; r++)
    if (rescale[r]) {
      float* out = m.rows.out + (first + r) * m.value_dim;
      for (int64_t d = 0; d < m.value_dim; d += 16) store(out + d, load(out + d) * keep[r]);
      m.rows.weight_sum[first + r] *= keep[r];
    }
  f32x16 relative[kSpan / 16];
  float value_scale = -1.0f;  // scale of the whole span, once computed
  for (int r = 0; r < R; r++) {
    const int64_t row = first + r;
    const float* scores = m.rows.scores + (at + r) * kSpan;
    auto* weights = m.rows.weights + (at + r) * kSpan;
    f32x16 sums = {};
    if constexpr (K::kQuantized) {  // quantized weights are at most about 255
      float row_scale = value_scale;
      if (!all_visible(row)) {
        row_scale = relative_scales(m.span.value_scales, m.columns, relative, [&](int64_t p) { return visible(row, p); });
        value_scale = -1.0f;
      } else if (value_scale < 0) {
        row_scale = value_scale =
            relative_scales(m.span.value_scales, m.columns, relative, [](int64_t) { return iota() >= 0; });
      }
      for (int64_t p = 0; p < m.columns; p += 16) {
        const f32x16 w = exp2<coarse>(fma(load(scores + p), broadcast(power), broadcast(bases[r])));
        sums += w;
        const u8x16 bytes = convert<u8x16>(round_to_int(w * relative[p / 16]));
        prepare<typename K::ValueStep>((const uint8_t*)&bytes, 16, weights + p);
      }
      sums *= shares[r];
      m.rows.scales[at + r] = row_scale / 255.0f * shares[r];
    } else {
      for (int64_t p = 0; p < m.columns; p += 16) {
        const f32x16 w = exp2<coarse>(fma(load(scores + p), broadcast(power), broadcast(bases[r])));
        sums += w;
        store(weights + p, w);
      }
    }
    m.rows.weight_sum[row] += sums;
  }
}

// Adds weights times values to the rows' outputs.
template <class K, int R>
PENSTOCK_NOINLINE void accumulate_values(AttentionTile<K>& m) {
  float* out = m.rows.out + m.first * m.value_dim;
  multiply_columns<typename K::ValueStep, R>(
      m.rows.weights, kSpan, m.span.values, m.value_dim, m.value_dim, K::kQuantized ? (m.filled + 3) / 4 * 4 : m.filled,
      m.prefetch_span(m.next.values, R),
      [&](int r, int64_t c) {
        if constexpr (K::kQuantized)
          return i32xw{};
        else
          return load_bits<f32xw>(out + r * m.value_dim + c);
      },
      [&](int r, int64_t c, const auto& sums) {
        float* to = out + r * m.value_dim + c;
        if constexpr (K::kQuantized)
          store_bits(to, fma(to_float(sums), broadcast<f32xw>(m.rows.scales[r]), load_bits<f32xw>(to)));
        else
          store_bits(to, sums);
      });
}

template <class K>
PENSTOCK_NOINLINE void accumulate_values_amx(AttentionTile<K>& m, int count) {
  using Step = typename K::ValueStep;
  const int64_t dim = m.value_dim, stride = dim / 16 * Step::kBytes;
  const Prefetch ahead = m.prefetch_span_amx(m.next.values, count);
  float* out = m.rows.out + m.first * m.value_dim;
  if constexpr (K::kQuantized) {
    alignas(64) int32_t sums[kMaxRowsAtOnce * kMaxLatent];
    multiply_amx<Step>(m.rows.weights, kSpan, count, m.span.values, stride, dim, m.filled, sums, dim, true, ahead);
    for (int r = 0; r < count; r++)
      for (int64_t d = r * dim; d < (r + 1) * dim; d += 16)
        store(out + d, fma(to_float(load_bits<i32x16>(sums + d)), broadcast(m.rows.scales[r]), load(out + d)));
  } else {
    multiply_amx<Step>(m.rows.weights, kSpan, count, m.span.values, stride, dim, m.filled, out, dim, false, ahead);
  }
}

// Replaces scores by tanh(cap_scale * score). `power` includes the factor of the soft cap.
template <class K>
PENSTOCK_NOINLINE void cap_scores(AttentionTile<K>& m, int count, float cap_scale) {
  for (int r = 0; r < count; r++)
    for (int64_t p = 0; p < m.columns; p += 16) {
      float* score = m.rows.scores + r * kSpan + p;
      store(score, tanh(load(score) * cap_scale));
    }
}

// Adds ALiBi (Press et al., 2022): a row's slope times the distance of each position from its last position, which is zero
// for the query's own position.
template <class K>
PENSTOCK_NOINLINE void add_alibi(AttentionTile<K>& m, int count) {
  for (int r = 0; r < count; r++) {
    const f32x16 slope = broadcast(m.rows.slopes[m.first + r]);
    const i32x16 first = iota() + int32_t(m.begin - m.rows.last_key[m.first + r]);
    for (int64_t p = 0; p < m.columns; p += 16) {
      float* score = m.rows.scores + r * kSpan + p;
      store(score, fma(to_float(first + int32_t(p)), slope, load(score)));
    }
  }
}

template <class K>
void attend(QueryRows<K>& rows, int first, int count, const KVPanel<K>& span, const KVPanel<K>& next, int64_t dim,
            int64_t value_dim, int64_t begin, float power, float cap_scale = 0, bool alibi = false) {
  int64_t last = 0;
  for (int r = 0; r < count; r++) last = rows.last_key[first + r] > last ? rows.last_key[first + r] : last;
  if (last < begin) return;
  // Number of visible positions of the span. Later positions hold arbitrary data of other sequences.
  const int64_t filled = last + 1 - begin < kSpan ? last + 1 - begin : kSpan;
  AttentionTile<K> m{rows, first, span, next, dim, value_dim, begin, filled, (filled + 15) / 16 * 16};
  if constexpr (kUsesAmx<K>) {
    score_amx(m, count);
    if (cap_scale) cap_scores(m, count, cap_scale);
    if (alibi) add_alibi(m, count);
    for (int at = 0; at < count; at += kTileRows)
      with_rows(count - at, [&]<int R>() { update_softmax<K, R>(m, at, power); });
    accumulate_values_amx(m, count);
  } else {
    with_rows(count, [&]<int R>() {
      score<K, R>(m);
      if (cap_scale) cap_scores(m, R, cap_scale);
      if (alibi) add_alibi(m, R);
      update_softmax<K, R>(m, 0, power);
      accumulate_values<K, R>(m);
    });
  }
}

// Copies a panel of `size` positions to position `at` of a span.
template <class K>
void copy_panel(const KVPanel<K>& span, int64_t at, const KVPanel<K>& panel, int64_t dim, int64_t size) {
  constexpr int n = K::KeyStep::kInputs;
  for (int64_t d = 0; d < dim; d += n)
    for (int64_t p = 0; p < size; p += 16)  // 16 positions fill 64 bytes
      memcpy(span.keys + d * kSpan + (at + p) * n, panel.keys + d * size + p * n, 16 * n * sizeof(typename K::Element));
  memcpy(span.values + at * dim, panel.values, size * dim * sizeof(typename K::Element));
  if constexpr (K::kQuantized) {
    memcpy(span.key_scales + at, panel.key_scales, size * sizeof(float));
    memcpy(span.value_scales + at, panel.value_scales, size * sizeof(float));
  }
}

template <class K>
void prefetch(const KVPanel<K>& panel, int64_t dim, int64_t size) {
  const int64_t bytes = KVPanel<K>::bytes(dim, size);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)panel.keys + i, 0, kHasAmx ? 3 : 2);
}

// Computes a task. Consecutive tasks have the same KV head, so that its keys and values stay in the processor's cache.
template <class T, class K>
void attention_task(const Attention& a, int64_t task) {
  const int64_t tiles = a.tasks / a.kv_heads, tile = task % tiles, kv_head = task / tiles;
  const int64_t sequence = a.tiles[2 * tile], first_row = a.tiles[2 * tile + 1];
  const int64_t heads_per_kv = a.heads / a.kv_heads, dim = a.dim, size = panel_positions(a.block_size);
  const int64_t start = a.query_starts[sequence], queries = a.query_starts[sequence + 1] - start;
  const int64_t before = a.lengths[sequence] - queries, remaining = queries * heads_per_kv - first_row;
  const int count = int(remaining < kTaskRows ? remaining : kTaskRows);
  alignas(64) typename K::KeyStep::In query_memory[kTaskRows * kMaxHead];
  alignas(64) float out_memory[kTaskRows * kMaxHead];
  QueryRows<K> rows;
  rows.q = query_memory;
  rows.out = out_memory;
  int64_t offsets[kTaskRows], out_offsets[kTaskRows], last = 0, earliest = a.lengths[sequence];
  for (int r = 0; r < count; r++) {
    const int64_t query = (first_row + r) / heads_per_kv, head = kv_head * heads_per_kv + (first_row + r) % heads_per_kv;
    const int64_t position = before + query, visible = a.chunked ? position % std::max<int64_t>(a.window, 1) + 1 : a.window;
    const int64_t from = a.window && position >= visible ? position - visible + 1 : 0;
    const int64_t end = a.lengths[sequence] - 1, last_visible = a.causal   ? position
                                                                : a.window ? position + a.window - 1
                                                                           : end;
    const int64_t last_key = std::min<int64_t>(a.key_ends ? a.key_ends[start + query] - 1 : last_visible, end);
    offsets[r] = ((start + query) * a.heads + head) * dim;
    out_offsets[r] = (start + query) * a.out_stride + head * dim;
    const T* q = (const T*)a.q + offsets[r];  // prefetched here, since hardware prefetchers do not cross pages
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(q + d);
    rows.last_key[r] = last_key;
    rows.first_key[r] = from;
    rows.slopes[r] = a.alibi ? a.alibi[head] / (a.cap ? a.cap : a.scale) : 0;  // `power` multiplies scores and slopes
    last = last_key > last ? last_key : last;
    earliest = from < earliest ? from : earliest;
  }
  rows.clear(count, dim);
  for (int r = 0; r < count; r++) rows.set_query(r, (const T*)a.q + offsets[r], dim);
  const uint32_t block_panels = uint32_t(a.block_size / size);
  auto panel_at = [&](int64_t sequence, int64_t position, int64_t kv_head) {
    const uint32_t panel = uint32_t(position) / uint32_t(size);
    const int64_t block = a.block_tables[sequence * a.table_width + panel / block_panels];
    return KVPanel<K>(a.cache, (block * block_panels + panel % block_panels) * a.kv_heads + kv_head, dim, size);
  };
  const float power = (a.cap ? a.cap : a.scale) * kLog2E, cap_scale = a.cap ? a.scale / a.cap : 0.0f;
  auto attend_rows = [&](const KVPanel<K>& span, const KVPanel<K>& next, int64_t begin) {
    constexpr int at_once = kUsesAmx<K> ? kMaxRowsAtOnce : kTileRows;
    for (int first = 0; first < count; first += at_once)
      attend<K>(rows, first, count - first < at_once ? count - first : at_once, span, next, dim, dim, begin, power,
                cap_scale, a.alibi);
  };
  const int64_t begin = earliest / kSpan * kSpan;
  if (size == kSpan) {
    KVPanel<K> span = panel_at(sequence, begin, kv_head);
    for (int64_t at = begin; at <= last; at += kSpan) {
      // Next span to prefetch: after the last span of a task, the first span of the task that probably follows.
      const KVPanel<K> next = at + kSpan <= last ? panel_at(sequence, at + kSpan, kv_head)
                              : tile + 1 < tiles ? panel_at(a.tiles[2 * (tile + 1)], 0, kv_head)
                                                 : panel_at(a.tiles[0], 0, (kv_head + 1) % a.kv_heads);
      attend_rows(span, next, at);
      span = next;
    }
  } else {
    thread_local std::vector<CacheLine> memory;
    memory.resize(ceil_div(KVPanel<K>::bytes(dim, kSpan), sizeof(CacheLine)));
    const KVPanel<K> span(memory.data(), 0, dim, kSpan);
    for (int64_t at = begin; at <= last; at += kSpan) {
      for (int64_t position = at; position <= last && position < at + kSpan; position += size) {
        copy_panel(span, position - at, panel_at(sequence, position, kv_head), dim, size);
        if (position + kSpan <= last) prefetch(panel_at(sequence, position + kSpan, kv_head), dim, size);
      }
      attend_rows(span, span, at);
    }
  }
  for (int r = 0; r < count; r++) {
    float weight_sum = sum(rows.weight_sum[r]);
    if (a.sinks) {  // weight of the sink relative to the row's maximum
      const float sink =
          a.sinks[kv_head * heads_per_kv + (first_row + r) % heads_per_kv] * kLog2E - rows.max_score[r] * power;
      weight_sum += exp2<false>(broadcast(sink < 100.0f ? sink : 100.0f))[0];
    }
    const f32x16 share = broadcast(1.0f / weight_sum);
    T* out = (T*)a.out + out_offsets[r];
    for (int64_t d = 0; d < dim; d += 16) store(out + d, load(rows.out + r * dim + d) * share);
  }
}

// Calls `f` with the element type and the storage type of keys and values as template arguments.
template <class F>
inline void with_kv_type(Type type, bool quantized, F&& f) {
  if (type == Type::float32)
    quantized ? f.template operator()<float, Int8KV>() : f.template operator()<float, UnquantizedKV<float>>();
  else
    quantized ? f.template operator()<bf16, Int8KV>() : f.template operator()<bf16, UnquantizedKV<bf16>>();
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
