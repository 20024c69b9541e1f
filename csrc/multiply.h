// Products of rows and a panel: definition of `multiply_format`, which products.cc instantiates for all formats.

#pragma once

#include "product.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int64_t kChunkBytes = 12288;  // bytes per tile of rows, for up to 8 tiles
constexpr int64_t kNarrowChunkBytes = 65536;  // bytes for narrow tiles: each reads a quarter, which stays in the L1 cache

// Number of inputs of a chunk. All rows are multiplied with a chunk before the next chunk; it is large enough to load the
// next chunk during the computation. A single tile of whole panels is always bound by memory, and takes all inputs.
template <class F>
inline int64_t chunk_inputs(const Matrix& m, int64_t tiles, bool narrow) {
  constexpr int64_t n = F::Step::kInputs, step = kStride<typename F::Step>;
  if (tiles == 1 && !narrow) return m.in;
  const int64_t unit = m.group < m.in ? m.group : HasSum16<typename F::Step> ? 32 * n : n;
  const int64_t max_bytes = kWidth < 16 ? kNarrowChunkBytes : kChunkBytes * (tiles < 8 ? tiles : 8);
  const int64_t num_chunks = ceil_div(ceil_div(m.in, n) * step, max_bytes);
  return ceil_div(ceil_div(m.in, num_chunks), unit) * unit;
}

// The panel to prefetch. `step`: number of bytes to prefetch for each step of the current panel.
struct NextPanel {
  const char* at;
  int64_t step;
};

// Multiplies a few rows by a chunk of a panel, G vectors of columns at a time. `acc` holds the sums until the last chunk,
// then the outputs. Prefetches `ahead`, up to `ahead_end`. Not inlined, since compilers optimize larger functions less well.
template <class F, int R, int G>
__attribute__((noinline)) void multiply_tile(const Linear& a, int64_t row, int64_t columns, const char* panel,
                                             int64_t scales, InputRange chunk, Prefetch ahead, const char* ahead_end,
                                             float* acc) {
  constexpr int64_t width = G * kWidth;
  const int64_t prefetched = ceil_div(chunk.end - chunk.begin, F::Step::kInputs) * ahead.lines * 64;
  for (int64_t c = 0; c < columns; c += width, ahead.at += prefetched)
    F::template product<R, G>(a, row, panel + c / kWidth * F::Step::kBytes, scales + c, chunk,
                              {ahead.at, ahead.at < ahead_end ? ahead.lines : 0}, acc + c);
}

// Applies output scales, row scales and the bias to products, as far as the matrix has them.
template <class F>
inline void apply_epilogue(const Linear& a, int64_t row, int64_t rows, int64_t column, int64_t count, Outputs* values) {
  const float *bias = a.matrix.bias, *scales = a.matrix.output_scales;
  if (!F::kIntegers && !bias) return;
  for (int g = 0; g < kPanel / 16; g++) {
    const f32x16 added = bias ? load_n(bias + column + g * 16, count - g * 16) : f32x16{};
    for (int64_t r = 0; r < rows; r++) {
      if (scales) values[r][g] *= load(scales + column + g * 16);
      if (F::kIntegers && !a.matrix.x_in_groups) values[r][g] *= a.x_scales[row + r];
      if (bias) values[r][g] += added;
    }
  }
}

// Multiplies rows by a panel. `is_cached`: the panel is in the processor's cache, and is not prefetched.
template <class F, bool is_cached>
void multiply_panel(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel, int64_t scales,
                    NextPanel next, const Sink& sink) {
  constexpr int64_t n = F::Step::kInputs, step = kStride<typename F::Step>;
  const Matrix& m = a.matrix;
  const int64_t tiles = ceil_div(end - first, F::kRows), tallest = ceil_div(end - first, tiles);
  const int64_t width = F::groups(int(tallest)) * kWidth;  // columns of a tile
  const bool single_tile = tiles == 1 && width == kPanel;  // memory is read sequentially
  const int64_t inputs = chunk_inputs<F>(m, tiles, !single_tile);
  const int64_t calls = single_tile ? 1 : tiles * (kPanel / width), lines = ceil_div(next.step / 64, calls);
  const int64_t count = m.outputs - column < kPanel ? m.outputs - column : kPanel;
  Outputs acc[kRowBlock];
  for (InputRange chunk{0, 0}; chunk.end < m.in;) {
    chunk = {chunk.end, chunk.end + inputs < m.in ? chunk.end + inputs : m.in};
    const bool last = chunk.end == m.in;
    const int64_t steps = ceil_div(chunk.end - chunk.begin, n);
    const char* const begin = panel + chunk.begin / n * step;
    const char* ahead = is_cached     ? next.at + chunk.begin / n * next.step
                        : single_tile ? begin + kPrefetchDistance
                        : !last       ? begin + steps * step
                                      : next.at;
    const char* const ahead_end = ahead + steps * next.step;
    // Calls `f(row, height)` for each tile of rows. Heights are balanced, since a tile of one or two rows takes nearly as
    // long as a tile of four.
    auto each_tile = [&](auto&& f) {
      for (int64_t row = first, height; row < end; row += height)
        f(row, height = ceil_div(end - row, ceil_div(end - row, F::kRows)));
    };
    auto multiply = [&](int64_t row, int64_t height, int64_t from, int64_t columns) {
      with_rows<F::kRows>(height, [&]<int R>() {
        auto multiply_vectors = [&]<int G>() {
          multiply_tile<F, R, G>(a, row, columns, panel + from / kWidth * F::Step::kBytes, scales + from, chunk,
                                 {ahead, lines}, ahead_end, (float*)acc[row - first] + from);
          ahead += ceil_div(columns, G * kWidth) * steps * lines * 64;
        };
        constexpr int vectors = F::groups(R),
                      tallest_vectors = F::groups(F::kRows);  // a shorter tile uses the vectors of its neighbours
        if (vectors == tallest_vectors || tiles == 1)
          multiply_vectors.template operator()<vectors>();
        else
          multiply_vectors.template operator()<tallest_vectors>();
      });
    };
    auto finish = [&](int64_t row, int64_t height) {
      Outputs* const values = acc + (row - first);
      apply_epilogue<F>(a, row, height, column, count, values);
      sink.finish(sink.self, row, height, column, count, values);
    };
    if (kWidth < 16 && tiles > 1) {  // all rows use the columns of a tile while these are in the processor's cache
      for (int64_t c = 0; c < count; c += width)
        each_tile([&](int64_t row, int64_t height) {
          if (last && c + width >= count) sink.prepare(sink.self, row, height, column, count);
          multiply(row, height, c, width);
          if (last && c + width >= count) finish(row, height);
        });
      continue;
    }
    each_tile([&](int64_t row, int64_t height) {
      if (last) sink.prepare(sink.self, row, height, column, count);
      multiply(row, height, 0, count);
      if (last) finish(row, height);
    });
  }
}

// --- AMX -------------------------------------------------------------------------------------------------------------

constexpr int64_t kAmxChunkBytes = 64 << 10;  // bytes of a chunk of a panel, with which all rows of a task are multiplied
constexpr int64_t kSmallAmxChunkBytes = 16 << 10;  // bytes of a chunk for few rows, which are bound by memory
constexpr int64_t kMinAmxRows = 32;  // minimum number of rows for which AMX is faster with integers

// True if AMX is used. Floating-point sums must not depend on the number of rows: they use AMX for any number of rows. Sums
// of integers are exact, and use AMX if it is faster.
template <class F>
inline bool use_amx(const Matrix& m, int64_t rows) {
  using Step = typename AmxStepOf<typename F::Step>::type;
  if constexpr (!UsesAmx<Step>::value) return false;
  if constexpr (!F::kIntegers) return true;
  return rows >= kMinAmxRows && (m.group >= m.in || m.group % kAmxTileInputs<Step> == 0);
}

// `multiply_panel` with AMX. The weights of a chunk stay in the processor's cache while all rows are multiplied with them.
template <class F>
void multiply_panel_amx(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel, int64_t scales,
                        const char* next, const Sink& sink) {
  using From = typename F::Step;
  using Step = typename AmxStepOf<From>::type;
  using X = typename Step::X;
  using Sum = typename UsesAmx<Step>::Sum;
  constexpr int64_t stride = kStride<Step>, from_stride = kStride<From>;
  constexpr bool unquantized = std::is_same_v<F, Unquantized<X>>, in_place = std::is_same_v<From, Step>;
  thread_local Outputs acc[kRowBlock];  // outputs so far, or sums if there is a single group
  alignas(64) Sum group_sums[kMaxAmxRows * kPanel];
  const Matrix& m = a.matrix;
  const bool grouped = !unquantized && m.group < m.in;
  const int64_t groups = unquantized ? 1 : num_groups(m), width = F::kIntegers ? (m.in + 7) / 8 * 8 : m.in;
  const int64_t tiles = ceil_div(end - first, kMaxAmxRows), blocks = end - first > kAmxTileRows ? tiles * 2 : 1;
  const int64_t unit = grouped ? m.group : kAmxTileInputs<Step>;
  const int64_t max_inputs = (blocks > 2 ? kAmxChunkBytes : kSmallAmxChunkBytes) / stride * Step::kInputs;
  const int64_t inputs = in_place && blocks == 1 ? m.in : max_inputs < unit ? unit : max_inputs / unit * unit;
  const int64_t count = m.outputs - column < kPanel ? m.outputs - column : kPanel;
  for (InputRange chunk{0, 0}; chunk.end < m.in;) {
    chunk = {chunk.end, chunk.end + inputs < m.in ? chunk.end + inputs : m.in};
    const bool last = chunk.end == m.in;
    const int64_t steps = ceil_div(chunk.end - chunk.begin, From::kInputs);
    const char* const from = panel + chunk.begin / From::kInputs * from_stride;
    const char* weights = from;
    if constexpr (!in_place) weights = widen<From>(from, steps, blocks == 1 ? kPrefetchDistance : 0);
    Prefetch ahead{last ? next : from + steps * from_stride,
                   ceil_div(steps * from_stride / 64, blocks * ceil_div(chunk.end - chunk.begin, kAmxTileInputs<Step>)),
                   blocks <= 2};
    if (blocks == 1) ahead = {from + kPrefetchDistance, in_place ? ahead.lines : 0, true};
    for (int64_t row = first; row < end; row += kMaxAmxRows) {
      const int64_t rows = end - row < kMaxAmxRows ? end - row : kMaxAmxRows;
      const X* x = (const X*)a.x + row * width + chunk.begin;
      Outputs* const values = acc + (row - first);
      Sum* const sums = (Sum*)values;
      if (last) sink.prepare(sink.self, row, rows, column, count);
      auto multiply = [&](int64_t begin, int64_t end, Sum* sums, bool from_zero) {
        multiply_amx<Step>(x + begin - chunk.begin, width, rows, weights + (begin - chunk.begin) / Step::kInputs * stride,
                           stride, kPanel, end - begin, sums, kPanel, from_zero, ahead);
        ahead.at += (end - begin) / kAmxTileInputs<Step> * ahead.lines * 64 * (rows > kAmxTileRows ? 2 : 1);
      };
      // Converts the sums of a group to outputs, or adds them to the outputs so far.
      auto add_group = [&](const Sum* from, int64_t group, float* to) {
        if constexpr (!unquantized) {
          f32x16 scale[kPanel / 16], offset[kPanel / 16] = {};
          load_groups(m.scales, scales + group * kPanel, scale);
          if (m.offsets.data) load_groups(m.offsets, scales + group * kPanel, offset);
          for (int64_t r = 0; r < rows; r++)
            PENSTOCK_FOR (int g = 0; g < kPanel / 16; g++) {
              auto sum = load_bits<typename Step::Sum>(from + r * kPanel + g * 16);
              if constexpr (F::kIntegers) sum -= F::kZero * F::x_sum(a, (row + r) * groups + group);
              float* out = to + r * kPanel + g * 16;
              const float x_scale = m.x_in_groups ? a.x_scales[(row + r) * groups + group] : 1.0f;
              f32x16 value = to_float(sum) * scale[g];
              if (grouped) value = fma(to_float(sum) * x_scale, scale[g], group ? load(out) : f32x16{});
              if (m.offsets.data)
                value = fma(broadcast(F::x_sum(a, (row + r) * groups + group) * x_scale), offset[g], value);
              store(out, value);
            }
        }
      };
      if (grouped) {
        for (int64_t begin = chunk.begin, end; begin < chunk.end; begin = end) {
          end = begin + m.group < m.in ? begin + m.group : m.in;
          multiply(begin, end, group_sums, true);
          add_group(group_sums, begin / m.group, (float*)values);
        }
      } else {
        multiply(chunk.begin, chunk.end, sums, chunk.begin == 0);
      }
      if (!last) continue;
      if (!grouped) add_group(sums, 0, (float*)values);
      apply_epilogue<F>(a, row, rows, column, count, values);
      sink.finish(sink.self, row, rows, column, count, values);
    }
  }
}

// --- Formats ---------------------------------------------------------------------------------------------------------

#if defined(PENSTOCK_HAS_DOT4)
// Minimum numbers of rows for which 4-bit weights with int8 group scales are converted to 8 bits: kMinScaledRows in
// registers, kMinConvertedRows before the product.
constexpr int64_t kMinScaledRows = 5, kMinConvertedRows = 9;

// Converts a product with a W4A8 panel with int8 group scales to a product with W8A8, which gives the same bits. The result
// is valid until the next call on this thread.
inline Linear as_w8a8(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel, int64_t scales) {
  thread_local int32_t sums[kRowBlock];
  const int64_t groups = num_groups(a.matrix), stride = num_sums(a.matrix);
  for (int64_t row = first; row < end; row++) sums[row - first] = ((const int32_t*)a.x_sums)[row * stride + groups];
  Linear w8a8 = a;
  w8a8.x_sums = sums - first;
  w8a8.matrix.scales = {a.matrix.output_scales, GroupType::float32};
  w8a8.matrix.output_scales = nullptr;
  w8a8.matrix.group = a.matrix.in;
  w8a8.matrix.format = Format::w8a8;
  w8a8.matrix.panels = convert_panel_to_w8a8(a.matrix, panel, scales) - column / kPanel * panel_bytes(w8a8.matrix);
  return w8a8;
}
#endif

template <class F>
void multiply_format(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, const Sink& sink) {
  constexpr int64_t step = kStride<typename F::Step>;
  const Matrix& m = a.matrix;
  auto panel = [&](int64_t column) { return (const char*)m.panels + column / kPanel * panel_bytes(m); };
  const int64_t scales = column * num_groups(m);  // index of the panel's first scale
  using From = typename F::Step;
  using ManyRows = typename F::ManyRows;
#if defined(PENSTOCK_HAS_DOT4)  // without dot4, products with 4-bit weights are faster than with converted weights
  if constexpr (std::is_same_v<F, W4A8>) {
    if (m.output_scales && end - first >= kMinScaledRows && end - first < kMinConvertedRows)
      return multiply_panel<ScaledW4A8, false>(a, first, end, column, panel(column), scales, {panel(next), step}, sink);
    if (m.output_scales && end - first >= kMinConvertedRows)
      return multiply_format<W8A8>(as_w8a8(a, first, end, column, panel(column), scales), first, end, column, column, sink);
  }
#endif
  if constexpr (UsesAmx<typename AmxStepOf<From>::type>::value)
    if (use_amx<F>(m, end - first))
      return multiply_panel_amx<F>(a, first, end, column, panel(column), scales, panel(next), sink);
  if constexpr (!std::is_same_v<F, ManyRows>)
    if (end - first >= F::kManyRows) {
      if constexpr (std::is_same_v<From, typename ManyRows::Step>)
        multiply_panel<ManyRows, false>(a, first, end, column, panel(column), scales, {panel(next), step}, sink);
      else
        multiply_panel<ManyRows, true>(a, first, end, column, widen<From>(panel(column), ceil_div(m.in, From::kInputs)),
                                       scales, {panel(next), step / (From::kInputs / ManyRows::Step::kInputs)}, sink);
      return;
    }
  multiply_panel<F, false>(a, first, end, column, panel(column), scales, {panel(next), step}, sink);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
