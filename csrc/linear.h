// Linear layers, quantization and rotation of their inputs, embeddings, and packing of matrices.

#pragma once

#include <cmath>

#include "elementwise.h"
#include "hadamard.h"
#include "product.h"
#include "rounding.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Rows and columns of a task: a block of rows times some panels. Consecutive tasks have the same rows.
struct TaskRange {
  int64_t first, end, column, column_end;
};
inline TaskRange task_range(const Linear& a, int64_t outputs, int64_t task) {
  const int64_t width = kPanel * a.panels, tasks = ceil_div(outputs, width);
  const int64_t first = task / tasks * kRowBlock, column = task % tasks * width;
  return {first, first + kRowBlock < a.rows ? first + kRowBlock : a.rows, column,
          column + width < outputs ? column + width : outputs};
}

// Returns `a` with the rows from `first` to `end` converted to the input type of the format's step, in thread-local memory
// that is valid until the next call.
inline Linear convert_rows(const Linear& a, int64_t first, int64_t end) {
  Linear ready = a;
  with_format(a.matrix, [&]<class F>() {
    using Step = typename F::Step;
    using In = typename Step::In;
    if constexpr (!std::is_same_v<In, typename Step::X>) {
      thread_local std::vector<CacheLine> memory;
      const int64_t width = F::kIntegers ? (a.matrix.in + 7) / 8 * 8 : a.matrix.in;
      In* const x = (In*)scratch(memory, ceil_div((end - first) * width * sizeof(In), sizeof(CacheLine)));
      prepare<Step>((const typename Step::X*)a.x + first * width, (end - first) * width, x);
      ready.x = (const char*)x - first * width * sizeof(In);  // address of row 0
    }
  });
  return ready;
}

// Multiplies the rows and panels of a task. Calls `finish` (RowSink::finish) with the outputs.
template <class Finish>
inline void multiply_task(const Linear& args, int64_t task, Finish&& finish) {
  const TaskRange s = task_range(args, args.matrix.outputs, task);
  const Linear a = convert_rows(args, s.first, s.end);
  RowSink sink{kNoPrepare, finish};
  for (int64_t column = s.column; column < s.column_end; column += kPanel)
    multiply_rows(a, s.first, s.end, column, column + kPanel, sink);
}

// Writes the outputs of some rows and a panel. `out`: address of the first row's outputs.
template <class Out>
void write_panel(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, Out* out, int64_t stride) {
  auto at = [=](int64_t row, int64_t output) { return out + (row - first) * stride + output - column; };
  RowSink sink{[&](int64_t row, int64_t output, int64_t count) {  // prefetched during the product
                 for (int64_t i = 0; i < count; i += 64 / sizeof(Out)) __builtin_prefetch(at(row, output) + i, 1);
               },
               [&](int64_t row, int64_t output, int64_t count, const Outputs& values) {
                 if (count == kPanel)
                   store_vectors(at(row, output), values);
                 else
                   for (int g = 0; g * 16 < count; g++) store_n(at(row, output) + g * 16, values[g], count - g * 16);
               }};
  multiply_rows(a, first, end, column, next, sink);
}

template <class Out>
void linear_block(const Linear& args, int64_t task) {
  const int64_t outputs = args.matrix.outputs;
  const TaskRange s = task_range(args, outputs, task);
  const Linear a = convert_rows(args, s.first, s.end);
  for (int64_t column = s.column; column < s.column_end; column += kPanel)
    write_panel(a, s.first, s.end, column, column + kPanel, (Out*)a.out + s.first * a.out_stride + column, a.out_stride);
}

// Gated product: the first half of the outputs is the gate, the second half `up`; both halves are whole panels. One panel of
// each half is computed at a time, so that their outputs stay in the processor's cache. A single tile of rows has few
// outputs; for it, all panels are read sequentially instead. `out(row)`: address of a row's outputs.
template <class Out, class Row>
void gated_panels(const Linear& a, const TaskRange& s, Row&& out) {
  const int64_t size = a.matrix.outputs / 2;
  const int64_t width = s.end - s.first > kTileRows ? kPanel : s.column_end - s.column;
  static_assert(kRowBlock >= kTileRows * kMaxTaskPanels);
  alignas(64) thread_local Out gates[kRowBlock * kPanel], ups[kRowBlock * kPanel];
  for (int64_t begin = s.column; begin < s.column_end; begin += width) {
    const int64_t end = begin + width;
    for (int64_t c = begin; c < end; c += kPanel)
      write_panel(a, s.first, s.end, c, c + kPanel < end ? c + kPanel : size + begin, gates + c - begin, width);
    for (int64_t c = begin; c < end; c += kPanel)
      write_panel(a, s.first, s.end, size + c, c + kPanel < end ? size + c + kPanel : end, ups + c - begin, width);
    for (int64_t row = 0; row < s.end - s.first; row++)
      gate(a.activation, gates + row * width, ups + row * width, out(s.first + row) + begin, width);
  }
}

template <class Out>
void gated_block(const Linear& args, int64_t task) {
  const TaskRange s = task_range(args, args.matrix.outputs / 2, task);
  const Linear a = convert_rows(args, s.first, s.end);
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
      const Quantization result = quantize_vector(x + begin, end - begin, out + begin);
      a.scales[row * groups + group] = result.scale, sums[group] = result.sum;
    }
    memset(out + a.in, 0, a.padded - a.in);
    return;
  }
  const float maximum = max_magnitude(x, a.in);
  a.scales[row] = maximum / 127.0f;
  if (!(maximum > kMinMagnitude)) {  // also true for NaN, which the scale then is
    memset(out, 0, a.padded);
    memset(sums, 0, stride * sizeof(int32_t));
    return;
  }
  const float inverse = 127.0f / maximum;
  memset(out + a.in, 0, a.padded - a.in);
  const int64_t vectorized = a.group == 16 || a.group == 32 ? a.in / 64 * 64 : 0;
  quantize_groups(x, vectorized, inverse, a.group, out, sums);
  for (int64_t group = vectorized / a.group; group < groups; group++) {
    const int64_t begin = group * a.group, end = begin + a.group < a.in ? begin + a.group : a.in;
    sums[group] = quantize_run(x + begin, end - begin, inverse, out + begin);
  }
  if (!a.has_total) return;
  sums[groups] = 0;
  for (int64_t group = 0; group < groups; group++) sums[groups] += sums[group];
}

template <class T>
void quantize_row(const Quantize& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.in;
  if (a.rotation > 1)
    quantize_values(a, row, rotate_blocks(x, a.in, a.rotation));
  else
    quantize_values(a, row, x);
}

template <class T>
void rotate_row(const Rotate& a, int64_t row) {
  const float* x = rotate_blocks((const T*)a.x + row * a.in, a.in, a.rotation);
  T* out = (T*)a.out + row * a.in;
  for_each_16(a.in, [&](int64_t i, auto n) { put(out + i, get(x + i, n), n); });
}

template <class T>
void sum_groups_row(const GroupSums& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.in;
  float* sums = a.sums + row * ceil_div(a.in, a.group);
  for (int64_t begin = 0; begin < a.in; begin += a.group) {
    const int64_t end = begin + a.group < a.in ? begin + a.group : a.in;
    f32x16 lanes = {};
    for (int64_t i = begin; i < end; i += 16) lanes += load_n(x + i, end - i);
    *sums++ = sum(lanes);
  }
}

template <class T>
void embedding_row(const Embedding& a, int64_t row) {
  const Matrix& m = a.matrix;
  const int64_t id = a.ids[row] - a.first;
  if (id < 0 || id >= m.outputs) return;
  const int64_t number = id / kPanel, output = id % kPanel;
  const char* panel = (const char*)m.panels + number * panel_bytes(m);
  const int64_t scales = number * num_groups(m) * kPanel;
  T* out = (T*)a.out + row * m.in;
  with_format(m, [&]<class F>() {
    if (m.rotation > 1) {  // the rotation is its own inverse, except for a factor that the weights include
      thread_local std::vector<float> memory;
      float* const weights = scratch(memory, m.in);
      for (int64_t i = 0; i < m.in; i++) weights[i] = F::get(m, panel, scales, output, i);
      const float* values = rotate_blocks(weights, m.in, m.rotation);
      for_each_16(m.in, [&](int64_t i, auto n) { put(out + i, get(values + i, n), n); });
      return;
    }
    for (int64_t i = 0; i < m.in; i++) narrow(out + (m.order ? m.order[i] : i), F::get(m, panel, scales, output, i));
  });
}

// Packs a panel, which is written sequentially while 64 rows are read in parallel.
template <class T>
void pack_unquantized(const Pack& a, int64_t number) {
  constexpr int n = Unquantized<T>::Step::kInputs;
  const Matrix& m = a.matrix;
  T* panel = (T*)((char*)m.panels + number * panel_bytes(m));
  const int64_t row = number * kPanel - a.first, count = a.rows - row < kPanel ? a.rows - row : kPanel;
  const T* weight = (const T*)a.weight + row * m.in;
  for (int64_t i = 0; i < m.in; i += n) {
    const int64_t inputs = m.in - i < n ? m.in - i : n;
    for (int64_t o = 0; o < count; o++)
      memcpy(panel + (i * kPanel + o * n), weight + o * m.in + i, (inputs == n ? n : inputs) * sizeof(T));
  }
}

// Returns the 4-bit scale with the least squared error, with the same bits as ops/scale_search.py. `base` maps the largest
// magnitude to -8.
template <class T>
inline float search_scale(const T* weight, int64_t count, float base) {
  constexpr int kCandidates = 6;
  const float inverse = 1.0f / base;
  float best = 0.0f, ratio = 1.0f;
  for (int number = 0; number < kCandidates; number++) {
    const float factor = 1.0f + number / 16.0f;
    f32x16 products = {}, squares = {};
    for (int64_t i = 0; i < count; i += 16) {
      const f32x16 value = load_n(weight + i, count - i) * inverse;
      const f32x16 rounded = convert<f32x16>(round_to_int4(value * factor));
      products += rounded * value;
      squares += rounded * rounded;
    }
    const float product = sum(products), square = sum(squares), gain = product * product / square;
    if (gain > best) best = gain, ratio = product / square;
  }
  const uint32_t bits = bitcast<uint32_t>(base * ratio);  // rounded to the precision of float16
  return bitcast<float>((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

// Returns the scale of a group: with 8 bits the largest magnitude divided by 127, with 4 bits the result of a search. 0 for
// a group of zeros; NaN if a weight is not finite.
template <class F, class T>
float group_scale(const T* weight, int64_t count) {
  const float maximum = max_magnitude(weight, count);
  if (!(maximum > kMinMagnitude)) return maximum * 0.0f;
  if (F::kBits == 8) return maximum / 127.0f;
  bool has_maximum = false;
  for (int64_t i = 0; i < count; i++) has_maximum |= widen(weight[i]) == maximum;
  return search_scale(weight, count, (has_maximum ? -maximum : maximum) / 8.0f);
}

template <class F, class T>
void round_group(const T* weight, int64_t count, float scale, int8_t* out) {
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t length = count - i < 16 ? count - i : 16;
    const f32x16 value = (length < 16 ? load_tail(weight + i, length) : load(weight + i)) * inverse;
    const i8x16 narrow = convert<i8x16>(F::kBits == 4 ? round_to_int4(value) : round_to_int(value));
    memcpy(out + i, &narrow, length);
  }
}

// Quantizes weights to [-127, 127] or [-8, 7], rounding to nearest. The caller has set `out` to zeros, which groups with the
// scale 0 or NaN keep.
template <class F, class T>
void round_weights(const Matrix& m, const T* weight, int8_t* out, float* scales) {
  for (int64_t begin = 0; begin < m.in; begin += m.group, scales += kPanel) {
    const int64_t count = begin + m.group < m.in ? m.group : m.in - begin;
    const float scale = *scales = group_scale<F>(weight + begin, count);
    if (scale < 0.0f || scale > 0.0f) round_group<F>(weight + begin, count, scale, out + begin);
  }
}

// Squared rounding error minus the constant sum of squared weights, with the same bits as ops/scale_search.py.
template <class T>
inline float rounding_error(const T* weight, int64_t count, float scale) {
  const float inverse = 1.0f / scale;
  f32x16 products = {}, squares = {};
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 value = load_n(weight + i, count - i) * inverse, rounded = convert<f32x16>(round_to_int4(value));
    products += rounded * value;
    squares += rounded * rounded;
  }
  return (sum(squares) - 2.0f * sum(products)) * (scale * scale);
}

// Quantizes with int8 group scales and an output scale (search_integer_scales of ops/scale_search.py).
template <class F, class T>
void round_weights_with_integer_scales(const Matrix& m, const T* weight, int8_t* out, int8_t* scales, float* output_scale) {
  constexpr float kMaxInteger = 15.0f;
  thread_local std::vector<float> memory;
  const int64_t groups = num_groups(m);
  float* const exact_scales = scratch(memory, groups);
  auto count = [&](int64_t group) { return (group + 1) * m.group < m.in ? m.group : m.in - group * m.group; };
  float maximum = 0.0f, not_finite = 0.0f;
  for (int64_t group = 0; group < groups; group++) {
    const float scale = exact_scales[group] = group_scale<F>(weight + group * m.group, count(group)),
                size = std::fabs(scale);
    maximum = size > maximum ? size : maximum;
    not_finite += scale * 0.0f;
  }
  *output_scale = maximum / kMaxInteger + not_finite;
  if (not_finite != 0.0f || maximum == 0.0f) return;  // the caller has set `scales` to zeros
  const float unit = *output_scale, inverse = kMaxInteger / maximum;
  for (int64_t group = 0; group < groups; group++, scales += kPanel) {
    if (exact_scales[group] == 0.0f) continue;
    const T* const weights = weight + group * m.group;
    const float exact = std::fabs(exact_scales[group]) * inverse, sign = exact_scales[group] < 0.0f ? -1.0f : 1.0f;
    float best = 0.0f, lowest_error = 0.0f;
    for (const float rounded : {std::floor(exact), std::floor(exact) + 1.0f}) {
      const float size = rounded < 1.0f ? 1.0f : rounded > kMaxInteger ? kMaxInteger : rounded;
      const float error = rounding_error(weights, count(group), sign * size * unit);
      if (best == 0.0f || error < lowest_error) best = sign * size, lowest_error = error;
    }
    *scales = int8_t(best);
    round_group<F>(weights, count(group), best * unit, out + group * m.group);
  }
}

// Packs a panel of a quantized matrix, from weights or from integers (T = int8_t).
template <class F, class T>
void pack_quantized(const Pack& a, int64_t number) {
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
      const int64_t at = number * num_groups(m) * kPanel + o;
      auto round = [&](const auto* values) {
        if (!m.output_scales) return round_weights<F>(m, values, to, (float*)m.scales.data + at);
        round_weights_with_integer_scales<F>(m, values, to, (int8_t*)m.scales.data + at,
                                             (float*)m.output_scales + number * kPanel + o);
      };
      if (m.rotation > 1) {
        float* values = rotate_blocks(weight, m.in, m.rotation);
        for (int64_t i = 0; i < m.in; i++) values[i] *= 1.0f / float(m.rotation);
        round(values);
      } else {
        round(weight);
      }
    }
  }
  auto* unit = (typename F::Unit::Bits*)((char*)m.panels + number * panel_bytes(m));
  for (int64_t i = 0; i < padded; i += n)
    for (int64_t o = 0; o < kPanel; o++) *unit++ = F::Unit::pack(rounded.data() + o * padded + i);
}

template <class T>
void pack_panel(const Pack& a, int64_t task) {
  const int64_t number = a.first / kPanel + task;
  with_format(a.matrix, [&]<class F>() {
    if constexpr (!std::is_same_v<F, Unquantized<float>> && !std::is_same_v<F, Unquantized<bf16>>)
      pack_quantized<F, T>(a, number);
    else if constexpr (!std::is_same_v<T, int8_t>)
      pack_unquantized<T>(a, number);
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
