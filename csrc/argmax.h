// Largest output of each row, without storing all outputs.
//
// If a matrix has a sketch (a copy in 8 bits), most outputs need not be computed. With x = x' + e and w = w' + f, where x'
// and w' are the quantized vectors, x w and x' w' differ by x f + e w', which is at most |x| |f| + |e| |w'|
// (Cauchy-Schwarz). Therefore the sketch bounds each output. An output is discarded if its upper bound is below the lower
// bound of another output. The remaining outputs are computed like in the full product, so that the result has the same
// bits.

#pragma once

#include <atomic>
#include <cmath>

#include "linear.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Replaces the outputs of a row that the bitmask does not allow by minus infinity.
inline f32x16 apply_bitmask(const Bitmask& a, int64_t row, int64_t output, f32x16 values) {
  if (!a.bits || output / 16 >= a.stride) return values;  // padding of the last panel
  const i32x16 bits = i32x16{} + int32_t(a.bits[row * a.stride + output / 16]);
  return select(((bits >> iota()) & 1) != 0, values, broadcast(kNegInf));
}

// Finds the largest output of each row for the panels of a task, the first one in a tie.
inline void argmax_block(const ArgMax& l, int64_t task) {
  const Linear& a = l.product;
  const int64_t tasks = ceil_div(a.matrix.outputs, kPanel * a.panels), task_index = task % tasks;
  const auto [first, end, column, column_end] = task_range(a, a.matrix.outputs, task);
  f32x16 values[kRowBlock];  // largest value per lane, and first output of its vector
  i32x16 begins[kRowBlock];
  for (int64_t row = first; row < end; row++) {
    values[row - first] = broadcast(kNegInf);
    begins[row - first] = i32x16{} + int32_t(column);
  }
  multiply_task(a, task, [&](int64_t row, int64_t output, int64_t count, const Outputs& found) {
    f32x16 best = values[row - first];
    i32x16 begin = begins[row - first];
    PENSTOCK_FOR (int g = 0; g < kPanel / 16; g++) {
      const f32x16 known = count == kPanel ? found[g] : select(iota() + g * 16 < int32_t(count), found[g], best);
      const f32x16 v = apply_bitmask(l.bitmask, row, output + g * 16, known);
      begin = select(v > best, i32x16{} + int32_t(output + g * 16), begin);
      best = max(v, best);
    }
    values[row - first] = best;
    begins[row - first] = begin;
  });
  for (int64_t row = first; row < end; row++) {
    const f32x16 lanes = values[row - first];
    const float maximum = reduce_max(lanes);
    int64_t found = a.matrix.outputs;
    for (int lane = 0; lane < 16; lane++) {
      const int64_t output = begins[row - first][lane] + lane;
      if (lanes[lane] == maximum && output < found) found = output;
    }
    l.values[row * tasks + task_index] = maximum;
    l.outputs[row * tasks + task_index] = found < a.matrix.outputs ? found : column;
  }
}

// --- With a sketch ---------------------------------------------------------------------------------------------------

// Loads the weights of an input for 16 outputs.
inline f32x16 load_outputs(const float* panel, int64_t input, int64_t first) { return load(panel + input * kPanel + first); }
inline f32x16 load_outputs(const bf16* panel, int64_t input, int64_t first) {
  const u32x16 pairs = load_bits<u32x16>(panel + (input / 2 * kPanel + first) * 2);
  return bitcast<f32x16>(input % 2 ? pairs & 0xffff0000 : pairs << 16);
}

inline f32x16 sqrt(f32x16 v) {
  float values[16];
  store(values, v);
  for (float& value : values) value = std::sqrt(value);
  return load(values);
}

// Bound of the rounding error of a float dot product, relative to |x| |w|, for any order of summation; with a margin.
inline float rounding_slack(int64_t in) { return float(in + 16) * 0x1p-22f; }

// Upper bound of a norm, with a margin for its rounding error and for squares that underflow.
inline float upper_norm(float norm) { return norm * 1.01f + 1e-17f; }

template <class T>
void sketch_panel(const Sketch& s, int64_t number) {
  const Matrix& m = s.matrix;
  const T* panel = (const T*)((const char*)m.panels + number * panel_bytes(m));
  char* out = (char*)s.quantized.panels + number * panel_bytes(s.quantized);
  float error_norm = 0.0f, norm = 0.0f;
  bool is_finite = true;
  for (int64_t first = 0; first < kPanel; first += 16) {
    f32x16 maximum = {}, squares = {}, error_squares = {};
    for (int64_t i = 0; i < m.in; i++) {
      const f32x16 w = load_outputs(panel, i, first);
      maximum = max(maximum, max(w, -w));
    }
    const f32x16 scale = maximum / 127.0f, inverse = select(maximum > kMinMagnitude, 127.0f / maximum, f32x16{});
    store((float*)s.quantized.scales.data + number * kPanel + first, scale);
    for (int64_t begin = 0; begin < m.in; begin += 4) {
      u32x16 packed = {};
      for (int64_t i = 0; i < 4; i++) {
        const f32x16 w = begin + i < m.in ? load_outputs(panel, begin + i, first) : f32x16{};
        const i32x16 q = round_to_int(w * inverse);
        const f32x16 quantized = to_float(q) * scale, error = w - quantized;
        squares = fma(quantized, quantized, squares);
        error_squares = fma(error, error, error_squares);
        packed |= bitcast<u32x16>((q + 128) & 255) << int(8 * i);
      }
      store_bits(out + (begin / 4 * kPanel + first) * 4, packed);
    }
    error_norm = std::fmax(error_norm, reduce_max(sqrt(error_squares)));
    norm = std::fmax(norm, reduce_max(sqrt(squares)));
    is_finite = is_finite && sum(error_squares) + sum(squares) < __builtin_inff();
  }
  // Add the rounding errors of products with the sketch. Matrices with values that are not finite have no bounds.
  s.error_norms[number] = is_finite ? upper_norm(error_norm + rounding_slack(m.in) * norm) : __builtin_nanf("");
  s.norms[number] = upper_norm(norm);
}

template <class T>
void measure_norms_row(const SketchSearch& s, int64_t row) {
  const Linear& a = s.product;
  const int64_t in = a.matrix.in, width = (in + 7) / 8 * 8;
  const T* x = (const T*)s.x + row * in;
  const int8_t* quantized = (const int8_t*)a.x + row * width;
  const f32x16 scale = broadcast(a.x_scales[row]);
  f32x16 squares = {}, error_squares = {};
  for (int64_t i = 0; i < in; i += 16) {
    i8x16 q = {};
    memcpy(&q, quantized + i, in - i < 16 ? in - i : 16);
    const f32x16 v = load_n(x + i, in - i), error = v - to_float(q) * scale;
    squares = fma(v, v, squares);
    error_squares = fma(error, error, error_squares);
  }
  s.x_norms[row] = upper_norm(std::sqrt(sum(squares)));
  s.x_error_norms[row] = upper_norm(std::sqrt(sum(error_squares)));
}

// Records the vectors of 16 outputs that may contain the largest output of a row.
inline void find_candidates_block(const SketchSearch& s, int64_t task) {
  const Linear& a = s.product;
  float lower_bound[kRowBlock];  // lower bound of the largest output of each row
  for (int64_t row = 0; row < a.rows; row++) lower_bound[row] = s.lower_bounds[row].load(std::memory_order_relaxed);
  Candidate* const found = s.candidates + task * a.rows * a.panels * (kPanel / 16);
  int64_t num_found = 0;
  multiply_task(a, task, [&](int64_t row, int64_t output, int64_t count, const Outputs& values) {
    const int64_t panel = output / kPanel;
    const float bound = s.x_norms[row] * s.error_norms[panel] + s.x_error_norms[row] * s.norms[panel] + kMinMagnitude;
    f32x16 maximum = values[0];
    PENSTOCK_FOR (int g = 1; g < kPanel / 16; g++) maximum = max(values[g], maximum);
    if (!any_at_least(maximum, lower_bound[row] - bound)) return;
    for (int g = 0; g * 16 < count; g++) {
      const f32x16 valid = select(iota() + g * 16 < int32_t(count), values[g], broadcast(kNegInf));
      const f32x16 known = apply_bitmask(s.bitmask, row, output + g * 16, valid);
      if (!any_at_least(known, lower_bound[row] - bound)) continue;
      const float top = reduce_max(known);
      if (top == kNegInf) continue;
      found[num_found++] = {int32_t(row), int32_t(output / 16 + g), top + bound, 0};
      lower_bound[row] = top - bound > lower_bound[row] ? top - bound : lower_bound[row];
    }
  });
  s.counts[task] = num_found;
  for (int64_t row = 0; row < a.rows; row++)
    for (float known = s.lower_bounds[row].load(std::memory_order_relaxed);
         known < lower_bound[row] &&
         !s.lower_bounds[row].compare_exchange_weak(known, lower_bound[row], std::memory_order_relaxed);) {
    }
}

// Computes the outputs of a candidate, with the same bits as `linear_block`.
template <class T>
void evaluate_candidate(const SketchSearch& s, Candidate& c) {
  using Step = typename Unquantized<T>::Step;
  const Matrix& m = *s.matrix;
  const char* panel = (const char*)m.panels + c.vector * 16 / kPanel * panel_bytes(m);
  panel += c.vector % (kPanel / 16) * (16 / kWidth) * Step::kBytes;
  const T* x = (const T*)s.x + c.row * m.in;
  f32x16 values = {};
  if constexpr (UsesAmx<Step>::value) {
    multiply_amx<Step>(x, m.in, 1, panel, kStride<Step>, 16, m.in, (float*)&values, 16, true);
  } else {
    f32xw sums[1][16 / kWidth] = {};
    const Linear ready = convert_rows({m, x, nullptr, nullptr, nullptr, 0, 1, 1, m.type}, 0, 1);
    multiply<Step, 1, 16 / kWidth>((const typename Step::In*)ready.x, m.in, panel, kStride<Step>, m.in, sums);
    memcpy(&values, sums, sizeof(values));
  }
  const int32_t left = int32_t(m.outputs - int64_t(c.vector) * 16);
  const f32x16 valid = select(iota() < left, values, broadcast(kNegInf));
  const f32x16 known = apply_bitmask(s.bitmask, c.row, int64_t(c.vector) * 16, valid);
  c.value = reduce_max(known);
  c.lane = 0;
  while (c.lane < 15 && known[c.lane] != c.value) c.lane++;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
