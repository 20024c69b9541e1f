// The largest output of each row, without keeping the others.
//
// Where a matrix has a sketch, which is the same in 8 bits, most outputs need not be computed. With x = x' + e and
// w = w' + f, where x' and w' are what was rounded, x w and x' w' differ by x f + e w', at most |x| |f| + |e| |w'| (Cauchy
// and Schwarz). So the sketch says between which bounds an output lies, and those whose upper one is below another's lower
// one are out. What is left is computed as ever: the result is the same to the bit.

#pragma once

#include <atomic>
#include <cmath>

#include "linear.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Sixteen outputs of a row, but minus infinity where one may not be chosen.
inline f32x16 if_allowed(const Allowed& a, int64_t row, int64_t output, f32x16 values) {
  if (!a.bits || output / 16 >= a.sixteens) return values;  // what fills the last panel is none of a row's
  const i32x16 bits = i32x16{} + int32_t(a.bits[row * a.sixteens + output / 16]);
  return choose(((bits >> lanes()) & 1) != 0, values, all(kNever));
}

// Of each row the largest output, the first where several are.
inline void likeliest_block(const Likeliest& l, int64_t task) {
  const Linear& a = l.product;
  const int64_t tasks = ceil_div(a.matrix.outputs, kPanel * a.panels), own = task % tasks;
  const auto [first, end, column, until] = share_of(a, a.matrix.outputs, task);
  f32x16 values[kRowBlock];  // of each lane, and the output that the vector with it begins at
  i32x16 begins[kRowBlock];
  for (int64_t row = first; row < end; row++) {
    values[row - first] = all(kNever);
    begins[row - first] = i32x16{} + int32_t(column);
  }
  walk(a, task, [&](int64_t row, int64_t output, int64_t count, const Outputs& found) {
    f32x16 best = values[row - first];
    i32x16 begin = begins[row - first];
    PENSTOCK_FOR (int g = 0; g < kPanel / 16; g++) {
      const f32x16 known = count == kPanel ? found[g] : choose(lanes() + g * 16 < int32_t(count), found[g], best);
      const f32x16 v = if_allowed(l.allowed, row, output + g * 16, known);
      begin = choose(v > best, i32x16{} + int32_t(output + g * 16), begin);
      best = max(v, best);
    }
    values[row - first] = best;
    begins[row - first] = begin;
  });
  for (int64_t row = first; row < end; row++) {
    const f32x16 lanes = values[row - first];
    const float most = largest(lanes);
    int64_t found = a.matrix.outputs;
    for (int lane = 0; lane < 16; lane++) {
      const int64_t output = begins[row - first][lane] + lane;
      if (lanes[lane] == most && output < found) found = output;
    }
    l.values[row * tasks + own] = most;
    l.outputs[row * tasks + own] = found < a.matrix.outputs ? found : column;
  }
}

// --- By a sketch -----------------------------------------------------------------------------------------------------

// An input of 16 outputs.
inline f32x16 lanes_of(const float* panel, int64_t input, int64_t first) { return load(panel + input * kPanel + first); }
inline f32x16 lanes_of(const bf16* panel, int64_t input, int64_t first) {
  const u32x16 pairs = load_bits<u32x16>(panel + (input / 2 * kPanel + first) * 2);
  return as<f32x16>(input % 2 ? pairs & 0xffff0000 : pairs << 16);
}

inline f32x16 roots(f32x16 v) {
  float each[16];
  store(each, v);
  for (float& one : each) one = std::sqrt(one);
  return load(each);
}

// The share of |x| |w| by which a sum of float products is off at most, in whatever order; with a margin.
inline float slack_of(int64_t in) { return float(in + 16) * 0x1p-22f; }

// A length that is at least the true one: with a margin for how it was summed, and for squares too small for a float.
inline float at_least(float length) { return length * 1.01f + 1e-17f; }

template <class T>
void sketch_panel(const Sketch& s, int64_t number) {
  const Matrix& m = s.whole;
  const T* panel = (const T*)((const char*)m.panels + number * panel_bytes(m));
  char* out = (char*)s.rounded.panels + number * panel_bytes(s.rounded);
  float off = 0.0f, length = 0.0f;
  bool sound = true;
  for (int64_t first = 0; first < kPanel; first += 16) {
    f32x16 most = {}, lengths = {}, distances = {};
    for (int64_t i = 0; i < m.in; i++) {
      const f32x16 w = lanes_of(panel, i, first);
      most = max(most, max(w, -w));
    }
    const f32x16 scale = most / 127.0f, inverse = choose(most > kNothing, 127.0f / most, f32x16{});
    store((float*)s.rounded.scales.at + number * kPanel + first, scale);
    for (int64_t begin = 0; begin < m.in; begin += 4) {
      u32x16 four = {};
      for (int64_t i = 0; i < 4; i++) {
        const f32x16 w = begin + i < m.in ? lanes_of(panel, begin + i, first) : f32x16{};
        const i32x16 q = to_integers(w * inverse);
        const f32x16 about = as_float(q) * scale, rest = w - about;
        lengths = fma(about, about, lengths);
        distances = fma(rest, rest, distances);
        four |= as<u32x16>((q + 128) & 255) << int(8 * i);
      }
      store_bits(out + (begin / 4 * kPanel + first) * 4, four);
    }
    off = std::fmax(off, largest(roots(distances)));
    length = std::fmax(length, largest(roots(lengths)));
    sound = sound && sum(distances) + sum(lengths) < __builtin_inff();
  }
  // As above, since these are sums, too. What holds something that is no number has no bounds.
  s.off[number] = sound ? at_least(off + slack_of(m.in) * length) : __builtin_nanf("");
  s.lengths[number] = at_least(length);
}

template <class T>
void measure_row(const Screening& s, int64_t row) {
  const Linear& a = s.product;
  const int64_t in = a.matrix.in, width = (in + 7) / 8 * 8;
  const T* x = (const T*)s.x + row * in;
  const int8_t* rounded = (const int8_t*)a.x + row * width;
  const f32x16 scale = all(a.x_scales[row]);
  f32x16 lengths = {}, distances = {};
  for (int64_t i = 0; i < in; i += 16) {
    i8x16 q = {};
    memcpy(&q, rounded + i, in - i < 16 ? in - i : 16);
    const f32x16 v = load_some(x + i, in - i), rest = v - as_float(q) * scale;
    lengths = fma(v, v, lengths);
    distances = fma(rest, rest, distances);
  }
  s.x_lengths[row] = at_least(std::sqrt(sum(lengths)));
  s.x_off[row] = at_least(std::sqrt(sum(distances)));
}

inline bool any_reaches(f32x16 v, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)all(least), _CMP_GE_OQ);
#else
  return largest(v) >= least;
#endif
}

// Notes which sixteen outputs of a row may hold the largest one.
inline void screen_block(const Screening& s, int64_t task) {
  const Linear& a = s.product;
  float least[kRowBlock];  // what the largest output of a row is at least
  for (int64_t row = 0; row < a.rows; row++) least[row] = s.least[row].load(std::memory_order_relaxed);
  Candidate* const found = s.candidates + task * a.rows * a.panels * (kPanel / 16);
  int64_t count = 0;
  walk(a, task, [&](int64_t row, int64_t output, int64_t some, const Outputs& values) {
    const int64_t panel = output / kPanel;
    const float off = s.x_lengths[row] * s.off[panel] + s.x_off[row] * s.lengths[panel] + kNothing;
    f32x16 most = values[0];
    PENSTOCK_FOR (int g = 1; g < kPanel / 16; g++) most = max(values[g], most);
    if (!any_reaches(most, least[row] - off)) return;
    for (int g = 0; g * 16 < some; g++) {
      const f32x16 there = choose(lanes() + g * 16 < int32_t(some), values[g], all(kNever));
      const f32x16 known = if_allowed(s.allowed, row, output + g * 16, there);
      if (!any_reaches(known, least[row] - off)) continue;
      const float top = largest(known);
      if (top == kNever) continue;
      found[count++] = {int32_t(row), int32_t(output / 16 + g), top + off, 0};
      least[row] = top - off > least[row] ? top - off : least[row];
    }
  });
  s.counts[task] = count;
  for (int64_t row = 0; row < a.rows; row++)
    for (float known = s.least[row].load(std::memory_order_relaxed);
         known < least[row] && !s.least[row].compare_exchange_weak(known, least[row], std::memory_order_relaxed);) {
    }
}

// Computes a candidate as `linear_block` would.
template <class T>
void settle_candidate(const Screening& s, Candidate& c) {
  using Step = typename Plain<T>::Step;
  const Matrix& m = *s.whole;
  const char* panel = (const char*)m.panels + c.sixteen * 16 / kPanel * panel_bytes(m);
  panel += c.sixteen % (kPanel / 16) * (16 / kWidth) * Step::kBytes;
  const T* x = (const T*)s.x + c.row * m.in;
  f32x16 whole = {};
  if constexpr (ByTiles<Step>::value) {
    multiply_tiles<Step>(x, m.in, 1, panel, kStride<Step>, 16, m.in, (float*)&whole, 16, true);
  } else {
    f32xw sums[1][16 / kWidth] = {};
    const Linear ready = prepared({m, x, nullptr, nullptr, nullptr, 0, 1, 1, m.type}, 0, 1);
    multiply<Step, 1, 16 / kWidth>((const typename Step::In*)ready.x, m.in, panel, kStride<Step>, m.in, sums);
    memcpy(&whole, sums, sizeof(whole));
  }
  const int32_t left = int32_t(m.outputs - int64_t(c.sixteen) * 16);
  const f32x16 there = choose(lanes() < left, whole, all(kNever));
  const f32x16 known = if_allowed(s.allowed, c.row, int64_t(c.sixteen) * 16, there);
  c.value = largest(known);
  c.lane = 0;
  while (c.lane < 15 && known[c.lane] != c.value) c.lane++;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
