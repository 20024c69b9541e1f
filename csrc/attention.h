// Paged attention: one function for a single query and for a thousand.
//
// A task is some rows (queries times the heads that share keys and values). They walk over the sequence's positions from the
// first ones on with an online softmax (Milakov and Gimelshein, 2018), a span of 64 absolute positions at a time, so that a
// row's result does not depend on which rows share its task, nor on how a prompt was cut into chunks, nor on the block size,
// as long as keys and values are finite. Products take six rows at a time; all rows of a task take a span before the next one
// is touched, so that it comes from near.

#pragma once

#include <algorithm>

#include "formats.h"
#include "rounding.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kMuch = 8.0f;  // in powers of two: weights grow up to 256

// --- What a cache holds ----------------------------------------------------------------------------------------------

// Keys and values as they are.
template <class T>
struct Whole {
  using Element = T;
  using KeyStep = typename StepOf<T>::Step;
  using ValueStep = KeyStep;
  static constexpr bool kRounds = false;
};

// Keys and values rounded to 8 bits, each of a position with its own scale; keys have 128 added. Queries are rounded, too,
// and weights within a span of positions.
struct EightBits {
  using Element = int8_t;
  using KeyStep = QuadStep;
  using ValueStep = WeightStep;
  static constexpr bool kRounds = true;
};

// A panel's keys and values for one head.
template <class K>
struct Panel {
  typename K::Element *keys, *values;
  float *key_scales, *value_scales;  // where they are rounded

  static int64_t bytes(int64_t dim, int64_t size) {
    return 2 * size * (dim * sizeof(typename K::Element) + (K::kRounds ? sizeof(float) : 0));
  }

  // The panel of a cache at that number, counted over panels and heads.
  Panel(const void* cache, int64_t number, int64_t dim, int64_t size) {
    keys = (typename K::Element*)((char*)cache + number * bytes(dim, size));
    values = keys + dim * size;
    key_scales = (float*)(values + dim * size);
    value_scales = key_scales + size;
  }
};

// A key goes into its column of a panel: some of its elements together, then as many a row further.
template <class K>
inline void place_key(typename K::Element* panel, int64_t position, int64_t size, const typename K::Element* key,
                      int64_t dim) {
  constexpr int n = K::KeyStep::kInputs;
  for (int64_t d = 0; d < dim; d += n) memcpy(panel + d * size + position * n, key + d, n * sizeof(typename K::Element));
}

// A value goes into its row, in which some positions lie together for each element.
template <class K>
inline void place_value(typename K::Element* panel, int64_t position, const typename K::Element* value, int64_t dim) {
  constexpr int n = K::ValueStep::kInputs;
  typename K::Element* to = panel + position / n * n * dim;
#if defined(__AVX512BW__)
  if constexpr (n > 1) {  // sixteen at a time; other positions may be written by somebody else meanwhile
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

// The inverse of both.
template <class K>
inline void take_key(const typename K::Element* panel, int64_t position, int64_t size, typename K::Element* key,
                     int64_t dim) {
  constexpr int n = K::KeyStep::kInputs;
  for (int64_t d = 0; d < dim; d += n) memcpy(key + d, panel + d * size + position * n, n * sizeof(typename K::Element));
}

template <class K>
inline void take_value(const typename K::Element* panel, int64_t position, typename K::Element* value, int64_t dim) {
  constexpr int n = K::ValueStep::kInputs;
  const typename K::Element* from = panel + position / n * n * dim;
  for (int64_t d = 0; d < dim; d++) value[d] = from[d * n + position % n];
}

// Asks for what both will write, which lies in many places.
template <class K>
inline void ask_for_places(const Panel<K>& panel, int64_t position, int64_t size, int64_t dim) {
  using Element = typename K::Element;
  constexpr int n = K::KeyStep::kInputs, m = K::ValueStep::kInputs;
  for (int64_t d = 0; d < dim; d += n) __builtin_prefetch(panel.keys + d * size + position * n, 1);
  for (int64_t i = 0; i < dim * m; i += 64 / sizeof(Element))
    __builtin_prefetch(panel.values + position / m * m * dim + i, 1);
}

template <class T, class K>
void store_token(const Store& a, int64_t token) {
  const int64_t slot = a.slots[token], position = slot % a.panel;
  auto panel_at = [&](int64_t head) { return Panel<K>(a.cache, slot / a.panel * a.kv_heads + head, a.dim, a.panel); };
  ask_for_places(panel_at(0), position, a.panel, a.dim);
  for (int64_t head = 0; head < a.kv_heads; head++) {
    const Panel<K> panel = panel_at(head);
    if (head + 1 < a.kv_heads) ask_for_places(panel_at(head + 1), position, a.panel, a.dim);
    const T* k = (const T*)a.k + token * a.stride_k + head * a.dim;
    const T* v = (const T*)a.v + token * a.stride_v + head * a.dim;
    if constexpr (K::kRounds) {
      int8_t key[kMaxHead], value[kMaxHead];
      panel.key_scales[position] = round_row(k, a.dim, key).scale;
      for (int64_t d = 0; d < a.dim; d++) key[d] = int8_t(key[d] ^ 0x80);
      panel.value_scales[position] = round_row(v, a.dim, value).scale;
      place_key<K>(panel.keys, position, a.panel, key, a.dim);
      place_value<K>(panel.values, position, value, a.dim);
    } else {
      place_key<K>(panel.keys, position, a.panel, k, a.dim);
      place_value<K>(panel.values, position, v, a.dim);
    }
  }
}

// Copies a task's tokens from the cache to the buffer, or back.
template <class K, bool out>
void exchange_tokens(const Exchange& a, int64_t task) {
  using Element = typename K::Element;
  constexpr int64_t scale_bytes = K::kRounds ? sizeof(float) : 0;
  const int64_t vector = a.dim * sizeof(Element) + scale_bytes;
  const int64_t first = task * kRowsTogether, end = first + kRowsTogether < a.count ? first + kRowsTogether : a.count;
  for (int64_t i = first; i < end; i++) {
    const int64_t slot = a.slots[a.chosen[i]], position = slot % a.panel, place = a.places[a.chosen[i]];
    char* keys =
        a.buffer + place / a.slot_tokens * a.slot_bytes + (place % a.slot_tokens * a.all_heads + a.first_head) * vector;
    char* values = keys + a.slot_tokens * a.all_heads * vector;
    for (int64_t head = 0; head < a.kv_heads; head++, keys += vector, values += vector) {
      const Panel<K> panel(a.cache, slot / a.panel * a.kv_heads + head, a.dim, a.panel);
      Element key[kMaxHead], value[kMaxHead];
      const int64_t bytes = a.dim * sizeof(Element);
      auto shift = [&] {  // keys lie in the cache with 128 added
        if constexpr (K::kRounds)
          for (int64_t d = 0; d < a.dim; d++) key[d] = int8_t(key[d] ^ 0x80);
      };
      if constexpr (out) {
        take_key<K>(panel.keys, position, a.panel, key, a.dim);
        take_value<K>(panel.values, position, value, a.dim);
        shift();
        memcpy(keys, key, bytes);
        memcpy(values, value, bytes);
        memcpy(keys + bytes, panel.key_scales + position, scale_bytes);
        memcpy(values + bytes, panel.value_scales + position, scale_bytes);
      } else {
        memcpy(key, keys, bytes);
        memcpy(value, values, bytes);
        shift();
        place_key<K>(panel.keys, position, a.panel, key, a.dim);
        place_value<K>(panel.values, position, value, a.dim);
        memcpy(panel.key_scales + position, keys + bytes, scale_bytes);
        memcpy(panel.value_scales + position, values + bytes, scale_bytes);
      }
    }
  }
}

// --- Products --------------------------------------------------------------------------------------------------------

// x[R][inputs] * panel[inputs][columns of `width`], as many columns at a time as registers hold: each vector's sums begin
// with what `begin(row, column)` returns, and go to `finish(row, column, sums)`. `soon` is asked for on the way.
template <class Step, int R, class Begin, class Finish>
PENSTOCK_INLINE inline void multiply_columns(const typename Step::In* x, int64_t ldx, const void* panel, int64_t width,
                                             int64_t columns, int64_t inputs, Soon soon, Begin&& begin, Finish&& finish) {
  auto some = [&]<int G>(int64_t c) PENSTOCK_INLINE {
    typename Step::Sum sums[R][G];
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] = begin(r, c + g * kWidth);
    multiply<Step, R, G>(x, ldx, (const char*)panel + c / kWidth * Step::kBytes, width / kWidth * Step::kBytes, inputs, sums,
                         soon);
    soon.at += inputs / Step::kInputs * soon.lines * 64;
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) finish(r, c + g * kWidth, sums[r][g]);
  };
  constexpr int most = groups_of_rows(R), few = 16 / kWidth < most ? 16 / kWidth : most;
  int64_t c = 0;
  for (; c + most * kWidth <= columns; c += most * kWidth) some.template operator()<most>(c);
  for (; c < columns; c += few * kWidth) some.template operator()<few>(c);
}

// --- Attention -------------------------------------------------------------------------------------------------------

template <class K>
constexpr bool kByTiles = ByTiles<typename K::KeyStep>::value;
constexpr int64_t kTogether = kHasTiles ? kTaskRows : kTileRows;  // rows at a span, at most

// What the rows of a task have come to; queries lie `dim` apart, and what they have come to the size of a value.
template <class K>
struct Rows {
  typename K::KeyStep::In* q;  // in lines of memory, as `out`
  float* out;
  f32x16 total[kTaskRows];
  float top[kTaskRows + 16];
  int64_t seen[kTaskRows], from[kTaskRows];  // a row sees positions from..seen
  Rounding rounding[kTaskRows];  // of q
  // Of those at work, positions a span apart.
  alignas(64) float scores[kTogether * kSpan];
  alignas(64) typename K::ValueStep::In weights[kTogether * kSpan];
  float scales[kTogether];  // of weights, where they are rounded

  template <class T>
  void set_query(int64_t row, const T* from, int64_t dim) {
    if constexpr (K::kRounds) {
      int8_t rounded[kMaxLatentKey];
      rounding[row] = round_row(from, dim, rounded);
      prepare<typename K::KeyStep>(rounded, dim, q + row * dim);
    } else {
      prepare<typename K::KeyStep>(from, dim, q + row * dim);
    }
  }
  // Of values with so many elements.
  void clear(int count, int64_t value_dim) {
    memset(out, 0, count * value_dim * sizeof(float));
    for (int r = 0; r < count; r++) {
      top[r] = kNever;
      total[r] = f32x16{};
    }
  }
};

// What a span of keys and values, that begins at position `begin`, is to some rows of a task.
template <class K>
struct Meeting {
  Rows<K>& rows;
  int first;
  const Panel<K>& span;
  const Panel<K>& next;
  int64_t dim, value_dim, begin;  // elements of a key, and of a value
  int64_t filled, columns;  // positions seen by one of the rows, and those in full vectors

  // The next span is asked for while the first rows are at this one.
  Soon soon(const void* next, int rows) const {
    return {(const char*)next, first ? 0 : ceil_div(groups_of_rows(rows) * kWidth, 16)};
  }
  Soon soon_by_tiles(const void* next, int count) const {
    return {(const char*)next, first ? 0 : count > kTileHeight ? 2 * kTileHeight : 4 * kTileHeight};
  }
};

// The three parts of attention are functions of their own, so that none takes the others' registers.
#define PENSTOCK_APART __attribute__((noinline))

// Queries by keys.
template <class K, int R>
PENSTOCK_APART void score(Meeting<K>& m) {
  const Rounding* rounding = m.rows.rounding + m.first;
  multiply_columns<typename K::KeyStep, R>(
      m.rows.q + m.first * m.dim, m.dim, m.span.keys, kSpan, m.columns, m.dim, m.soon(m.next.keys, R),
      [&](int r, int64_t) {
        if constexpr (K::kRounds)
          return i32xw{} - 128 * rounding[r].sum;
        else
          return f32xw{};
      },
      [&](int r, int64_t c, const auto& sums) {
        float* to = m.rows.scores + r * kSpan + c;
        if constexpr (K::kRounds)
          store_bits(to, as_float(sums) * load_bits<f32xw>(m.span.key_scales + c) * rounding[r].scale);
        else
          store_bits(to, sums);
      });
}

template <class K>
PENSTOCK_APART void score_by_tiles(Meeting<K>& m, int count) {
  using Step = typename K::KeyStep;
  using Sum = typename ByTiles<Step>::Sum;
  multiply_tiles<Step>(m.rows.q + m.first * m.dim, m.dim, count, m.span.keys, kSpan / 16 * Step::kBytes, m.columns, m.dim,
                       (Sum*)m.rows.scores, kSpan, true, m.soon_by_tiles(m.next.keys, count));
  if constexpr (K::kRounds)
    for (int r = 0; r < count; r++) {
      const Rounding& rounding = m.rows.rounding[m.first + r];
      for (int64_t c = 0; c < m.columns; c += 16) {
        float* score = m.rows.scores + r * kSpan + c;
        const i32x16 sums = load_bits<i32x16>(score) - 128 * rounding.sum;
        store(score, as_float(sums) * load(m.span.key_scales + c) * rounding.scale);
      }
    }
}

// The visible positions' scales of values, over the largest of them and times 255, which is what a weight of 1 becomes.
// Returns that largest one.
inline float relative_scales(const float* scales, int64_t columns, f32x16* relative, auto&& visible) {
  f32x16 most = {};
  for (int64_t p = 0; p < columns; p += 16) {
    relative[p / 16] = choose(visible(p), load(scales + p), f32x16{});
    most = max(relative[p / 16], most);
  }
  const float largest_scale = largest(most);
  const f32x16 inverse = all(largest_scale > kNothing ? 255.0f / largest_scale : 0.0f);
  for (int64_t p = 0; p < columns; p += 16) relative[p / 16] *= inverse;
  return largest_scale;
}

// Scores to weights, of which e^(scale * x) is 2^(power * x). A row's weights are relative to the largest score it has seen
// so far, or to one that is not much less: so what was summed before need not shrink each time a larger one is found.
template <class K, int R>
PENSTOCK_APART void weigh(Meeting<K>& m, int at, float power) {
  const int64_t first = m.first + at;  // of those at work the rows from `at` on
  constexpr bool coarse = !std::is_same_v<K, Whole<float>>;
  auto whole = [&](int64_t row) { return m.begin >= m.rows.from[row] && m.begin + m.columns - 1 <= m.rows.seen[row]; };
  auto visible = [&](int64_t row, int64_t p) {
    const i32x16 position = lanes() + int32_t(m.begin + p);
    return (position >= int32_t(m.rows.from[row])) & (position <= int32_t(m.rows.seen[row]));
  };
  float highest[16], bases[16], shares[16];  // of each row
  store(highest, all(kNever));
  for (int r = 0; r < R; r++) {
    float* scores = m.rows.scores + (at + r) * kSpan;
    f32x16 high = all(kNever);
    for (int64_t p = 0; p < m.columns; p += 16) {
      f32x16 known = load(scores + p);
      if (!whole(first + r)) store(scores + p, known = choose(visible(first + r, p), known, all(kNever)));
      high = max(high, known);
    }
    highest[r] = largest(high);
  }
  const f32x16 now = load(highest), before = load(m.rows.top + first);
  const i32x16 grows = (now - before) * power > kMuch;
  const f32x16 top = choose(grows, now, before);
  store(m.rows.top + first, top);
  store(bases, choose(now == kNever, f32x16{}, (K::kRounds ? now : top) * -power));  // nothing seen: every weight is zero
  store(shares, choose(now == kNever, f32x16{}, exp2<false>((now - top) * power)));
  const f32x16 keep = exp2<false>((before - top) * power);
  for (int r = 0; r < R; r++)
    if (grows[r]) {
      float* out = m.rows.out + (first + r) * m.value_dim;
      for (int64_t d = 0; d < m.value_dim; d += 16) store(out + d, load(out + d) * keep[r]);
      m.rows.total[first + r] *= keep[r];
    }
  f32x16 relative[kSpan / 16];
  float value_scale = -1.0f;  // of the whole span, once it is known
  for (int r = 0; r < R; r++) {
    const int64_t row = first + r;
    const float* scores = m.rows.scores + (at + r) * kSpan;
    auto* weights = m.rows.weights + (at + r) * kSpan;
    f32x16 sums = {};
    if constexpr (K::kRounds) {  // the span's largest weight becomes about 255
      float own_scale = value_scale;
      if (!whole(row)) {
        own_scale = relative_scales(m.span.value_scales, m.columns, relative, [&](int64_t p) { return visible(row, p); });
        value_scale = -1.0f;
      } else if (value_scale < 0) {
        own_scale = value_scale =
            relative_scales(m.span.value_scales, m.columns, relative, [](int64_t) { return lanes() >= 0; });
      }
      for (int64_t p = 0; p < m.columns; p += 16) {
        const f32x16 w = exp2<coarse>(fma(load(scores + p), all(power), all(bases[r])));
        sums += w;
        const u8x16 narrow = convert<u8x16>(to_integers(w * relative[p / 16]));
        prepare<typename K::ValueStep>((const uint8_t*)&narrow, 16, weights + p);
      }
      sums *= shares[r];
      m.rows.scales[at + r] = own_scale / 255.0f * shares[r];
    } else {
      for (int64_t p = 0; p < m.columns; p += 16) {
        const f32x16 w = exp2<coarse>(fma(load(scores + p), all(power), all(bases[r])));
        sums += w;
        store(weights + p, w);
      }
    }
    m.rows.total[row] += sums;
  }
}

// Weights by values join what the rows have come to.
template <class K, int R>
PENSTOCK_APART void blend(Meeting<K>& m) {
  float* out = m.rows.out + m.first * m.value_dim;
  multiply_columns<typename K::ValueStep, R>(
      m.rows.weights, kSpan, m.span.values, m.value_dim, m.value_dim, K::kRounds ? (m.filled + 3) / 4 * 4 : m.filled,
      m.soon(m.next.values, R),
      [&](int r, int64_t c) {
        if constexpr (K::kRounds)
          return i32xw{};
        else
          return load_bits<f32xw>(out + r * m.value_dim + c);
      },
      [&](int r, int64_t c, const auto& sums) {
        float* to = out + r * m.value_dim + c;
        if constexpr (K::kRounds)
          store_bits(to, fma(as_float(sums), all<f32xw>(m.rows.scales[r]), load_bits<f32xw>(to)));
        else
          store_bits(to, sums);
      });
}

template <class K>
PENSTOCK_APART void blend_by_tiles(Meeting<K>& m, int count) {
  using Step = typename K::ValueStep;
  const int64_t dim = m.value_dim, stride = dim / 16 * Step::kBytes;
  const Soon soon = m.soon_by_tiles(m.next.values, count);
  float* out = m.rows.out + m.first * m.value_dim;
  if constexpr (K::kRounds) {
    alignas(64) int32_t sums[kTogether * kMaxLatent];
    multiply_tiles<Step>(m.rows.weights, kSpan, count, m.span.values, stride, dim, m.filled, sums, dim, true, soon);
    for (int r = 0; r < count; r++)
      for (int64_t d = r * dim; d < (r + 1) * dim; d += 16)
        store(out + d, fma(as_float(load_bits<i32x16>(sums + d)), all(m.rows.scales[r]), load(out + d)));
  } else {
    multiply_tiles<Step>(m.rows.weights, kSpan, count, m.span.values, stride, dim, m.filled, out, dim, false, soon);
  }
}

// Scores to the hyperbolic tangents of `squeeze` times them.
template <class K>
PENSTOCK_APART void cap_scores(Meeting<K>& m, int count, float squeeze) {
  for (int r = 0; r < count; r++)
    for (int64_t p = 0; p < m.columns; p += 16) {
      float* score = m.rows.scores + r * kSpan + p;
      store(score, tanh(load(score) * squeeze));
    }
}

template <class K>
void attend(Rows<K>& rows, int first, int count, const Panel<K>& span, const Panel<K>& next, int64_t dim, int64_t value_dim,
            int64_t begin, float power, float squeeze = 0) {
  int64_t last = 0;
  for (int r = 0; r < count; r++) last = rows.seen[first + r] > last ? rows.seen[first + r] : last;
  if (last < begin) return;
  // What is filled and seen by one of the rows: beyond it lies what other sequences left, which may be anything.
  const int64_t filled = last + 1 - begin < kSpan ? last + 1 - begin : kSpan;
  Meeting<K> m{rows, first, span, next, dim, value_dim, begin, filled, (filled + 15) / 16 * 16};
  if constexpr (kByTiles<K>) {
    score_by_tiles(m, count);
    if (squeeze) cap_scores(m, count, squeeze);
    for (int at = 0; at < count; at += kTileRows) with_rows(count - at, [&]<int R>() { weigh<K, R>(m, at, power); });
    blend_by_tiles(m, count);
  } else {
    with_rows(count, [&]<int R>() {
      score<K, R>(m);
      if (squeeze) cap_scores(m, R, squeeze);
      weigh<K, R>(m, 0, power);
      blend<K, R>(m);
    });
  }
}

// Copies a panel of `size` positions to those from `at` on of a span.
template <class K>
void join(const Panel<K>& span, int64_t at, const Panel<K>& panel, int64_t dim, int64_t size) {
  constexpr int n = K::KeyStep::kInputs;
  for (int64_t d = 0; d < dim; d += n)
    for (int64_t p = 0; p < size; p += 16)  // as many as have 64 bytes
      memcpy(span.keys + d * kSpan + (at + p) * n, panel.keys + d * size + p * n, 16 * n * sizeof(typename K::Element));
  memcpy(span.values + at * dim, panel.values, size * dim * sizeof(typename K::Element));
  if constexpr (K::kRounds) {
    memcpy(span.key_scales + at, panel.key_scales, size * sizeof(float));
    memcpy(span.value_scales + at, panel.value_scales, size * sizeof(float));
  }
}

template <class K>
void ask_for(const Panel<K>& panel, int64_t dim, int64_t size) {
  const int64_t bytes = Panel<K>::bytes(dim, size);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)panel.keys + i, 0, kHasTiles ? 3 : 2);
}

// Tasks of a head follow each other, so that its keys and values stay near.
template <class T, class K>
void attention_task(const Attention& a, int64_t task) {
  const int64_t tiles = a.tasks / a.kv_heads, tile = task % tiles, kv_head = task / tiles;
  const int64_t sequence = a.tiles[2 * tile], first_row = a.tiles[2 * tile + 1];
  const int64_t sharing = a.heads / a.kv_heads, dim = a.dim, size = panel_of(a.block_size);
  const int64_t start = a.query_starts[sequence], queries = a.query_starts[sequence + 1] - start;
  const int64_t before = a.lengths[sequence] - queries, left = queries * sharing - first_row;
  const int count = int(left < kTaskRows ? left : kTaskRows);
  alignas(64) typename K::KeyStep::In queries_of_rows[kTaskRows * kMaxHead];
  alignas(64) float out_of_rows[kTaskRows * kMaxHead];
  Rows<K> rows;
  rows.q = queries_of_rows;
  rows.out = out_of_rows;
  int64_t offsets[kTaskRows], places[kTaskRows], last = 0, earliest = a.lengths[sequence];
  for (int r = 0; r < count; r++) {
    const int64_t query = (first_row + r) / sharing, head = kv_head * sharing + (first_row + r) % sharing;
    const int64_t own = before + query, beyond = a.chunked ? own % std::max<int64_t>(a.window, 1) + 1 : a.window;
    const int64_t from = a.window && own >= beyond ? own - beyond + 1 : 0;
    const int64_t end = a.lengths[sequence] - 1, far = a.causal ? own : a.window ? own + a.window - 1 : end;
    const int64_t seen = std::min<int64_t>(a.key_ends ? a.key_ends[start + query] - 1 : far, end);
    offsets[r] = ((start + query) * a.heads + head) * dim;
    places[r] = (start + query) * a.out_stride + head * dim;
    const T* q = (const T*)a.q + offsets[r];  // a page from the next one's, so that nobody else thinks of asking for it
    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(q + d);
    rows.seen[r] = seen;
    rows.from[r] = from;
    last = seen > last ? seen : last;
    earliest = from < earliest ? from : earliest;
  }
  rows.clear(count, dim);
  for (int r = 0; r < count; r++) rows.set_query(r, (const T*)a.q + offsets[r], dim);
  const uint32_t of_block = uint32_t(a.block_size / size);  // panels
  auto panel_at = [&](int64_t sequence, int64_t position, int64_t kv_head) {
    const uint32_t panel = uint32_t(position) / uint32_t(size);
    const int64_t block = a.block_tables[sequence * a.table_width + panel / of_block];
    return Panel<K>(a.cache, (block * of_block + panel % of_block) * a.kv_heads + kv_head, dim, size);
  };
  const float power = (a.cap ? a.cap : a.scale) * kLog2E, squeeze = a.cap ? a.scale / a.cap : 0.0f;
  auto go_over = [&](const Panel<K>& span, const Panel<K>& next, int64_t begin) {
    constexpr int together = kByTiles<K> ? kTogether : kTileRows;
    for (int first = 0; first < count; first += together)
      attend<K>(rows, first, count - first < together ? count - first : together, span, next, dim, dim, begin, power,
                squeeze);
  };
  const int64_t begin = earliest / kSpan * kSpan;
  if (size == kSpan) {
    Panel<K> span = panel_at(sequence, begin, kv_head);
    for (int64_t at = begin; at <= last; at += kSpan) {
      // After a task's last span, probably the first one of the task that follows.
      const Panel<K> next = at + kSpan <= last ? panel_at(sequence, at + kSpan, kv_head)
                            : tile + 1 < tiles ? panel_at(a.tiles[2 * (tile + 1)], 0, kv_head)
                                               : panel_at(a.tiles[0], 0, (kv_head + 1) % a.kv_heads);
      go_over(span, next, at);
      span = next;
    }
  } else {
    thread_local std::vector<Line> memory;
    memory.resize(ceil_div(Panel<K>::bytes(dim, kSpan), sizeof(Line)));
    const Panel<K> span(memory.data(), 0, dim, kSpan);
    for (int64_t at = begin; at <= last; at += kSpan) {
      for (int64_t position = at; position <= last && position < at + kSpan; position += size) {
        join(span, position - at, panel_at(sequence, position, kv_head), dim, size);
        if (position + kSpan <= last) ask_for(panel_at(sequence, position + kSpan, kv_head), dim, size);
      }
      go_over(span, span, at);
    }
  }
  for (int r = 0; r < count; r++) {
    float total = sum(rows.total[r]);
    if (a.sinks) {  // what the score that has no value adds, relative to the row's others
      const float sink = a.sinks[kv_head * sharing + (first_row + r) % sharing] * kLog2E - rows.top[r] * power;
      total += exp2<false>(all(sink < 100.0f ? sink : 100.0f))[0];
    }
    const f32x16 share = all(1.0f / total);
    T* out = (T*)a.out + places[r];
    for (int64_t d = 0; d < dim; d += 16) store(out + d, load(rows.out + r * dim + d) * share);
  }
}

// Calls `f` with the type of queries, keys and values, and with how the cache holds the latter.
template <class F>
inline void with_kept(Type type, bool rounded, F&& f) {
  if (type == Type::float32)
    rounded ? f.template operator()<float, EightBits>() : f.template operator()<float, Whole<float>>();
  else
    rounded ? f.template operator()<bf16, EightBits>() : f.template operator()<bf16, Whole<bf16>>();
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
