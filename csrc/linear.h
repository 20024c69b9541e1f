// Linear layers over packed matrices, rounding what they are multiplied with, and taking rows back out for embeddings.

#pragma once

#include <cmath>

#include "elementwise.h"
#include "hadamard.h"
#include "product.h"
#include "rounding.h"

namespace penstock {
namespace PENSTOCK_ISA {

// A task is a block of rows by some panels; tasks of the same rows follow each other.
struct Share {
  int64_t first, end, column, until;
};
inline Share share_of(const Linear& a, int64_t outputs, int64_t task) {
  const int64_t width = kPanel * a.panels, tasks = ceil_div(outputs, width);
  const int64_t first = task / tasks * kRowBlock, column = task % tasks * width;
  return {first, first + kRowBlock < a.rows ? first + kRowBlock : a.rows, column,
          column + width < outputs ? column + width : outputs};
}

// The same with the rows from `first` to `end` as their format's step multiplies them, in memory of this thread's that lasts
// until the next call.
inline Linear prepared(const Linear& a, int64_t first, int64_t end) {
  Linear ready = a;
  with_format(a.matrix, [&]<class F>() {
    using Step = typename F::Step;
    using In = typename Step::In;
    if constexpr (!std::is_same_v<In, typename Step::X>) {
      thread_local std::vector<Line> near;
      const int64_t width = F::kIntegers ? (a.matrix.in + 7) / 8 * 8 : a.matrix.in;
      In* const x = (In*)with_room(near, ceil_div((end - first) * width * sizeof(In), sizeof(Line)));
      prepare<Step>((const typename Step::X*)a.x + first * width, (end - first) * width, x);
      ready.x = (const char*)x - first * width * sizeof(In);  // which is where row 0 would be
    }
  });
  return ready;
}

// Calls `finish` (product.h) for the rows and panels of a task.
template <class Finish>
inline void walk(const Linear& given, int64_t task, Finish&& finish) {
  const Share s = share_of(given, given.matrix.outputs, task);
  const Linear a = prepared(given, s.first, s.end);
  RowSink sink{kUnprepared, finish};
  for (int64_t column = s.column; column < s.until; column += kPanel)
    multiply_rows(a, s.first, s.end, column, column + kPanel, sink);
}

// Writes the outputs of some rows and a panel, those of the first row to `out`.
template <class Out>
void write_panel(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, Out* out, int64_t stride) {
  auto at = [=](int64_t row, int64_t output) { return out + (row - first) * stride + output - column; };
  RowSink sink{[&](int64_t row, int64_t output, int64_t count) {  // asked for, which takes as long as the product
                 for (int64_t i = 0; i < count; i += 64 / sizeof(Out)) __builtin_prefetch(at(row, output) + i, 1);
               },
               [&](int64_t row, int64_t output, int64_t count, const Outputs& values) {
                 if (count == kPanel)
                   store_all(at(row, output), values);
                 else
                   for (int g = 0; g * 16 < count; g++) store_some(at(row, output) + g * 16, values[g], count - g * 16);
               }};
  multiply_rows(a, first, end, column, next, sink);
}

template <class Out>
void linear_block(const Linear& given, int64_t task) {
  const int64_t outputs = given.matrix.outputs;
  const Share s = share_of(given, outputs, task);
  const Linear a = prepared(given, s.first, s.end);
  for (int64_t column = s.column; column < s.until; column += kPanel)
    write_panel(a, s.first, s.end, column, column + kPanel, (Out*)a.out + s.first * a.out_stride + column, a.out_stride);
}

// Gate and up, each half of the outputs and whole panels, and of them what the next matrix is multiplied with. A panel of
// both at a time, so that they stay near; those of a single tile of rows are small, and all panels then follow each other.
// `out(row)` is where a row's outputs begin.
template <class Out, class Row>
void gated_panels(const Linear& a, const Share& s, Row&& out) {
  const int64_t size = a.matrix.outputs / 2;
  const int64_t some = s.end - s.first > kTileRows ? kPanel : s.until - s.column;
  static_assert(kRowBlock >= kTileRows * kMostPanels);
  alignas(64) thread_local Out gates[kRowBlock * kPanel], ups[kRowBlock * kPanel];
  for (int64_t begin = s.column; begin < s.until; begin += some) {
    const int64_t end = begin + some;
    for (int64_t c = begin; c < end; c += kPanel)
      write_panel(a, s.first, s.end, c, c + kPanel < end ? c + kPanel : size + begin, gates + c - begin, some);
    for (int64_t c = begin; c < end; c += kPanel)
      write_panel(a, s.first, s.end, size + c, c + kPanel < end ? size + c + kPanel : end, ups + c - begin, some);
    for (int64_t row = 0; row < s.end - s.first; row++)
      gate(a.activation, gates + row * some, ups + row * some, out(s.first + row) + begin, some);
  }
}

template <class Out>
void gated_block(const Linear& given, int64_t task) {
  const Share s = share_of(given, given.matrix.outputs / 2, task);
  const Linear a = prepared(given, s.first, s.end);
  gated_panels<Out>(a, s, [&](int64_t row) { return (Out*)a.out + row * a.out_stride; });
}

template <class T>
void quantize_values(const Quantize& a, int64_t row, const T* x) {
  int8_t* out = a.out + row * a.padded;
  const int64_t groups = ceil_div(a.in, a.group), stride = groups + (a.has_total ? 1 : 0);
  int32_t* const sums = a.sums + row * stride;
  if (a.in_groups) {
    for (int64_t group = 0; group < groups; group++) {
      const int64_t begin = group * a.group, end = begin + a.group < a.in ? begin + a.group : a.in;
      const Rounding found = round_row(x + begin, end - begin, out + begin);
      a.scales[row * groups + group] = found.scale, sums[group] = found.sum;
    }
    memset(out + a.in, 0, a.padded - a.in);
    return;
  }
  const float most = magnitude(x, a.in);
  a.scales[row] = most / 127.0f;
  if (!(most > kNothing)) {  // or not a number, as the scale then says
    memset(out, 0, a.padded);
    memset(sums, 0, stride * sizeof(int32_t));
    return;
  }
  const float inverse = 127.0f / most;
  memset(out + a.in, 0, a.padded - a.in);
  const int64_t together = a.group == 16 || a.group == 32 ? a.in / 64 * 64 : 0;
  round_groups(x, together, inverse, a.group, out, sums);
  for (int64_t group = together / a.group; group < groups; group++) {
    const int64_t begin = group * a.group, end = begin + a.group < a.in ? begin + a.group : a.in;
    sums[group] = round_run(x + begin, end - begin, inverse, out + begin);
  }
  if (!a.has_total) return;
  sums[groups] = 0;
  for (int64_t group = 0; group < groups; group++) sums[groups] += sums[group];
}

template <class T>
void quantize_row(const Quantize& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.in;
  if (a.rotation > 1)
    quantize_values(a, row, rotated(x, a.in, a.rotation));
  else
    quantize_values(a, row, x);
}

template <class T>
void rotate_row(const Rotate& a, int64_t row) {
  const float* x = rotated((const T*)a.x + row * a.in, a.in, a.rotation);
  T* out = (T*)a.out + row * a.in;
  by_sixteen(a.in, [&](int64_t i, auto n) { put(out + i, get(x + i, n), n); });
}

template <class T>
void sum_groups_row(const GroupSums& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.in;
  float* sums = a.sums + row * ceil_div(a.in, a.group);
  for (int64_t begin = 0; begin < a.in; begin += a.group) {
    const int64_t end = begin + a.group < a.in ? begin + a.group : a.in;
    f32x16 lanes = {};
    for (int64_t i = begin; i < end; i += 16) lanes += load_some(x + i, end - i);
    *sums++ = sum(lanes);
  }
}

template <class T>
void gather_row(const Gather& a, int64_t row) {
  const Matrix& m = a.matrix;
  const int64_t id = a.ids[row] - a.first;
  if (id < 0 || id >= m.outputs) return;
  const int64_t number = id / kPanel, output = id % kPanel;
  const char* panel = (const char*)m.panels + number * panel_bytes(m);
  const int64_t scales = number * groups_of(m) * kPanel;
  T* out = (T*)a.out + row * m.in;
  with_format(m, [&]<class F>() {
    if (m.rotation > 1) {  // the rotation is its own inverse, but for a factor that the weights have already
      thread_local std::vector<float> memory;
      float* const weights = with_room(memory, m.in);
      for (int64_t i = 0; i < m.in; i++) weights[i] = F::get(m, panel, scales, output, i);
      const float* values = rotated(weights, m.in, m.rotation);
      by_sixteen(m.in, [&](int64_t i, auto n) { put(out + i, get(values + i, n), n); });
      return;
    }
    for (int64_t i = 0; i < m.in; i++) narrow(out + (m.order ? m.order[i] : i), F::get(m, panel, scales, output, i));
  });
}

// A panel is written from its beginning to its end, for which 64 rows are read side by side.
template <class T>
void pack_plain(const Pack& a, int64_t number) {
  constexpr int n = Plain<T>::Step::kInputs;
  const Matrix& m = a.matrix;
  T* panel = (T*)((char*)m.panels + number * panel_bytes(m));
  const int64_t row = number * kPanel - a.first, count = a.rows - row < kPanel ? a.rows - row : kPanel;
  const T* weight = (const T*)a.weight + row * m.in;
  for (int64_t i = 0; i < m.in; i += n) {
    const int64_t some = m.in - i < n ? m.in - i : n;
    for (int64_t o = 0; o < count; o++)
      memcpy(panel + (i * kPanel + o * n), weight + o * m.in + i, (some == n ? n : some) * sizeof(T));
  }
}

// The scale of least squared error for 4 bits, as ops/scale_search.py defines it to the bit; with `base` the largest magnitude
// becomes -8.
template <class T>
inline float search_scale(const T* weight, int64_t count, float base) {
  constexpr int kCandidates = 6;
  const float inverse = 1.0f / base;
  float best = 0.0f, ratio = 1.0f;
  for (int number = 0; number < kCandidates; number++) {
    const float factor = 1.0f + number / 16.0f;
    f32x16 products = {}, squares = {};
    for (int64_t i = 0; i < count; i += 16) {
      const f32x16 value = load_some(weight + i, count - i) * inverse;
      const f32x16 rounded = convert<f32x16>(to_nibbles(value * factor));
      products += rounded * value;
      squares += rounded * rounded;
    }
    const float product = sum(products), square = sum(squares), gain = product * product / square;
    if (gain > best) best = gain, ratio = product / square;
  }
  const uint32_t bits = as<uint32_t>(base * ratio);  // rounded to the precision of float16
  return as<float>((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

// A group's scale: in 8 bits the largest magnitude becomes 127; in 4 bits the scale is searched. 0 for an all-zero group; NaN
// if a weight is not finite.
template <class F, class T>
float scale_of(const T* weight, int64_t count) {
  const float most = magnitude(weight, count);
  if (!(most > kNothing)) return most * 0.0f;
  if (F::kBits == 8) return most / 127.0f;
  bool has_most = false;
  for (int64_t i = 0; i < count; i++) has_most |= widen(weight[i]) == most;
  return search_scale(weight, count, (has_most ? -most : most) / 8.0f);
}

template <class F, class T>
void round_group(const T* weight, int64_t count, float scale, int8_t* out) {
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t some = count - i < 16 ? count - i : 16;
    const f32x16 value = (some < 16 ? load_part(weight + i, some) : load(weight + i)) * inverse;
    const i8x16 narrow = convert<i8x16>(F::kBits == 4 ? to_nibbles(value) : to_integers(value));
    memcpy(out + i, &narrow, some);
  }
}

// Rounds to nearest: to -127 to 127, or to -8 to 7. Groups without a scale are zero in `out` already.
template <class F, class T>
void round_weights(const Matrix& m, const T* weight, int8_t* out, float* scales) {
  for (int64_t begin = 0; begin < m.in; begin += m.group, scales += kPanel) {
    const int64_t count = begin + m.group < m.in ? m.group : m.in - begin;
    const float scale = *scales = scale_of<F>(weight + begin, count);
    if (scale < 0.0f || scale > 0.0f) round_group<F>(weight + begin, count, scale, out + begin);
  }
}

// Squared rounding error minus the constant sum of squared weights, as ops/scale_search.py defines it to the bit.
template <class T>
inline float rounding_error(const T* weight, int64_t count, float scale) {
  const float inverse = 1.0f / scale;
  f32x16 products = {}, squares = {};
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 value = load_some(weight + i, count - i) * inverse, rounded = convert<f32x16>(to_nibbles(value));
    products += rounded * value;
    squares += rounded * rounded;
  }
  return (sum(squares) - 2.0f * sum(products)) * (scale * scale);
}

// Rounds with int8 group scales and an output scale (search_integer_scales of ops/scale_search.py).
template <class F, class T>
void round_weights_by_integers(const Matrix& m, const T* weight, int8_t* out, int8_t* scales, float* output_scale) {
  constexpr float kMost = 15.0f;
  thread_local std::vector<float> memory;
  const int64_t groups = groups_of(m);
  float* const found = with_room(memory, groups);
  auto count = [&](int64_t group) { return (group + 1) * m.group < m.in ? m.group : m.in - group * m.group; };
  float most = 0.0f, spoiled = 0.0f;
  for (int64_t group = 0; group < groups; group++) {
    const float scale = found[group] = scale_of<F>(weight + group * m.group, count(group)), size = std::fabs(scale);
    most = size > most ? size : most;
    spoiled += scale * 0.0f;
  }
  *output_scale = most / kMost + spoiled;
  if (spoiled != 0.0f || most == 0.0f) return;  // `scales` are zero, too
  const float unit = *output_scale, inverse = kMost / most;
  for (int64_t group = 0; group < groups; group++, scales += kPanel) {
    if (found[group] == 0.0f) continue;
    const T* const some = weight + group * m.group;
    const float exact = std::fabs(found[group]) * inverse, sign = found[group] < 0.0f ? -1.0f : 1.0f;
    float best = 0.0f, least = 0.0f;
    for (const float near : {std::floor(exact), std::floor(exact) + 1.0f}) {
      const float size = near < 1.0f ? 1.0f : near > kMost ? kMost : near;
      const float error = rounding_error(some, count(group), sign * size * unit);
      if (best == 0.0f || error < least) best = sign * size, least = error;
    }
    *scales = int8_t(best);
    round_group<F>(some, count(group), best * unit, out + group * m.group);
  }
}

// Of what is rounded, or given as integers.
template <class F, class T>
void pack_rounded(const Pack& a, int64_t number) {
  constexpr int n = F::Step::kInputs;
  const Matrix& m = a.matrix;
  const int64_t padded = ceil_div(m.in, n) * n;
  const int64_t row = number * kPanel - a.first, count = a.rows - row < kPanel ? a.rows - row : kPanel;
  std::vector<int8_t> rounded(kPanel * padded);
  for (int64_t o = 0; o < count; o++) {
    const T* weight = (const T*)a.weight + (row + o) * m.in;
    int8_t* to = rounded.data() + o * padded;
    if constexpr (std::is_same_v<T, int8_t>) {
      memcpy(to, weight, m.in);
    } else {
      const int64_t at = number * groups_of(m) * kPanel + o;
      auto round = [&](const auto* values) {
        if (!m.output_scales) return round_weights<F>(m, values, to, (float*)m.scales.at + at);
        round_weights_by_integers<F>(m, values, to, (int8_t*)m.scales.at + at,
                                     (float*)m.output_scales + number * kPanel + o);
      };
      if (m.rotation > 1) {
        float* values = rotated(weight, m.in, m.rotation);
        for (int64_t i = 0; i < m.in; i++) values[i] *= 1.0f / float(m.rotation);
        round(values);
      } else {
        round(weight);
      }
    }
  }
  auto* unit = (typename F::Unit::Bits*)((char*)m.panels + number * panel_bytes(m));
  for (int64_t i = 0; i < padded; i += n)
    for (int64_t o = 0; o < kPanel; o++) *unit++ = F::Unit::of(rounded.data() + o * padded + i);
}

template <class T>
void pack_panel(const Pack& a, int64_t task) {
  const int64_t number = a.first / kPanel + task;
  with_format(a.matrix, [&]<class F>() {
    if constexpr (!std::is_same_v<F, Plain<float>> && !std::is_same_v<F, Plain<bf16>>)
      pack_rounded<F, T>(a, number);
    else if constexpr (!std::is_same_v<T, int8_t>)
      pack_plain<T>(a, number);
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
