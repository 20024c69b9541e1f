// How rows are multiplied with a panel: `multiply_format` for the formats that a file instantiates it for.

#pragma once

#include "product.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int64_t kPiece = 12288;      // bytes for each of up to 8 tiles
constexpr int64_t kNarrowPiece = 65536;  // where tiles are narrow: a quarter of it, which is what a tile reads, stays near

// Inputs that all rows are multiplied with before the next ones are touched: so many that this takes as long as memory
// needs to bring those. A single tile of whole panels is held by memory whatever the piece, and takes all.
template <class F>
inline int64_t inputs_of_piece(const Matrix& m, int64_t tiles, bool narrow) {
  constexpr int64_t n = F::Step::kInputs, step = kStride<typename F::Step>;
  if (tiles == 1 && !narrow) return m.in;
  const int64_t whole = m.group < m.in ? m.group : InWords<typename F::Step> ? 32 * n : n;
  const int64_t most = kWidth < 16 ? kNarrowPiece : kPiece * (tiles < 8 ? tiles : 8);
  const int64_t pieces = ceil_div(ceil_div(m.in, n) * step, most);
  return ceil_div(ceil_div(m.in, pieces), whole) * whole;
}

// What will be read after a panel: `step` bytes for each of the panel's steps.
struct Next {
  const char* at;
  int64_t step;
};

// A few rows by a piece of a panel, G vectors of it or all; their sums are kept until the last piece, and then their outputs.
// Not inlined, since each number of rows is a function that is as large as a compiler deals with well. `soon` is asked for,
// up to `until`.
template <class F, int R, int G>
__attribute__((noinline)) void multiply_tile(const Linear& a, int64_t row, int64_t columns, const char* panel,
                                             int64_t scales, Piece piece, Soon soon, const char* until, float* kept) {
  constexpr int64_t width = G * kWidth;
  const int64_t asked = ceil_div(piece.end - piece.begin, F::Step::kInputs) * soon.lines * 64;
  for (int64_t c = 0; c < columns; c += width, soon.at += asked)
    F::template product<R, G>(a, row, panel + c / kWidth * F::Step::kBytes, scales + c, piece,
                              {soon.at, soon.at < until ? soon.lines : 0}, kept + c);
}

// Epilogue: output scales (if any), row scales, bias.
template <class F>
inline void complete(const Linear& a, int64_t row, int64_t rows, int64_t column, int64_t count, Outputs* values) {
  const float *bias = a.matrix.bias, *scales = a.matrix.output_scales;
  if (!F::kIntegers && !bias) return;
  for (int g = 0; g < kPanel / 16; g++) {
    const f32x16 added = bias ? load_some(bias + column + g * 16, count - g * 16) : f32x16{};
    for (int64_t r = 0; r < rows; r++) {
      if (scales) values[r][g] *= load(scales + column + g * 16);
      if (F::kIntegers && !a.matrix.x_in_groups) values[r][g] *= a.x_scales[row + r];
      if (bias) values[r][g] += added;
    }
  }
}

// A panel that `is_near` need not be asked for.
template <class F, bool is_near>
void multiply_panel(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel, int64_t scales,
                    Next next, const Sink& sink) {
  constexpr int64_t n = F::Step::kInputs, step = kStride<typename F::Step>;
  const Matrix& m = a.matrix;
  const int64_t tiles = ceil_div(end - first, F::kRows), tallest = ceil_div(end - first, tiles);
  const int64_t width = F::groups(int(tallest)) * kWidth;  // of a tile
  const bool lone = tiles == 1 && width == kPanel;  // which reads line after line
  const int64_t inputs = inputs_of_piece<F>(m, tiles, !lone);
  const int64_t calls = lone ? 1 : tiles * (kPanel / width), lines = ceil_div(next.step / 64, calls);
  const int64_t count = m.outputs - column < kPanel ? m.outputs - column : kPanel;
  Outputs kept[kRowBlock];
  for (Piece piece{0, 0}; piece.end < m.in;) {
    piece = {piece.end, piece.end + inputs < m.in ? piece.end + inputs : m.in};
    const bool last = piece.end == m.in;
    const int64_t steps = ceil_div(piece.end - piece.begin, n);
    const char* const begin = panel + piece.begin / n * step;
    const char* soon = is_near ? next.at + piece.begin / n * next.step
                       : lone  ? begin + kSoon
                       : !last ? begin + steps * step
                               : next.at;
    const char* const until = soon + steps * next.step;
    // Calls `f(row, height)` for each tile of rows, as even as can be: one of one or two rows takes nearly as long as of four.
    auto each_tile = [&](auto&& f) {
      for (int64_t row = first, height; row < end; row += height)
        f(row, height = ceil_div(end - row, ceil_div(end - row, F::kRows)));
    };
    auto multiply = [&](int64_t row, int64_t height, int64_t from, int64_t columns) {
      with_rows<F::kRows>(height, [&]<int R>() {
        auto by = [&]<int G>() {
          multiply_tile<F, R, G>(a, row, columns, panel + from / kWidth * F::Step::kBytes, scales + from, piece,
                                 {soon, lines}, until, (float*)kept[row - first] + from);
          soon += ceil_div(columns, G * kWidth) * steps * lines * 64;
        };
        constexpr int own = F::groups(R), others = F::groups(F::kRows);  // a shorter tile's are not those of its neighbours
        if (own == others || tiles == 1)
          by.template operator()<own>();
        else
          by.template operator()<others>();
      });
    };
    auto finish = [&](int64_t row, int64_t height) {
      Outputs* const values = kept + (row - first);
      complete<F>(a, row, height, column, count, values);
      sink.finish(sink.self, row, height, column, count, values);
    };
    if (kWidth < 16 && tiles > 1) {  // a tile's columns of the piece stay near while all rows take them
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

// --- By tiles --------------------------------------------------------------------------------------------------------

constexpr int64_t kTilePiece = 64 << 10;  // bytes of a panel that all rows of a task are multiplied with in turn
constexpr int64_t kLonePiece = 16 << 10;  // the same where rows are few, and memory is what they wait for
constexpr int64_t kFewest = 32;  // rows of integers for which tiles are worth it

// Where sums are rounded, rows that are few must be multiplied as many are; integers need not.
template <class F>
inline bool by_tiles(const Matrix& m, int64_t rows) {
  using Step = typename Tiled<typename F::Step>::type;
  if constexpr (!ByTiles<Step>::value) return false;
  if constexpr (!F::kIntegers) return true;
  return rows >= kFewest && (m.group >= m.in || m.group % kTileInputs<Step> == 0);
}

// As `multiply_panel`. Of each run of inputs the weights stay near while all rows are multiplied with them.
template <class F>
void multiply_panel_by_tiles(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel, int64_t scales,
                             const char* next, const Sink& sink) {
  using From = typename F::Step;
  using Step = typename Tiled<From>::type;
  using X = typename Step::X;
  using Sum = typename ByTiles<Step>::Sum;
  constexpr int64_t stride = kStride<Step>, from_stride = kStride<From>;
  constexpr bool plain = std::is_same_v<F, Plain<X>>, in_place = std::is_same_v<From, Step>;
  thread_local Outputs kept[kRowBlock];  // outputs so far; where they are one group's, its sums
  alignas(64) Sum of_group[kTallest * kPanel];
  const Matrix& m = a.matrix;
  const bool grouped = !plain && m.group < m.in;
  const int64_t groups = plain ? 1 : groups_of(m), width = F::kIntegers ? (m.in + 7) / 8 * 8 : m.in;
  const int64_t tiles = ceil_div(end - first, kTallest), blocks = end - first > kTileHeight ? tiles * 2 : 1;
  const int64_t unit = grouped ? m.group : kTileInputs<Step>;
  const int64_t most = (blocks > 2 ? kTilePiece : kLonePiece) / stride * Step::kInputs;
  const int64_t inputs = in_place && blocks == 1 ? m.in : most < unit ? unit : most / unit * unit;
  const int64_t count = m.outputs - column < kPanel ? m.outputs - column : kPanel;
  for (Piece piece{0, 0}; piece.end < m.in;) {
    piece = {piece.end, piece.end + inputs < m.in ? piece.end + inputs : m.in};
    const bool last = piece.end == m.in;
    const int64_t steps = ceil_div(piece.end - piece.begin, From::kInputs);
    const char* const from = panel + piece.begin / From::kInputs * from_stride;
    const char* weights = from;
    if constexpr (!in_place) weights = widen<From>(from, steps, blocks == 1 ? kSoon : 0);
    Soon soon{last ? next : from + steps * from_stride,
              ceil_div(steps * from_stride / 64, blocks * ceil_div(piece.end - piece.begin, kTileInputs<Step>)),
              blocks <= 2};
    if (blocks == 1) soon = {from + kSoon, in_place ? soon.lines : 0, true};
    for (int64_t row = first; row < end; row += kTallest) {
      const int64_t rows = end - row < kTallest ? end - row : kTallest;
      const X* x = (const X*)a.x + row * width + piece.begin;
      Outputs* const values = kept + (row - first);
      Sum* const sums = (Sum*)values;
      if (last) sink.prepare(sink.self, row, rows, column, count);
      auto multiply = [&](int64_t begin, int64_t end, Sum* sums, bool anew) {
        multiply_tiles<Step>(x + begin - piece.begin, width, rows, weights + (begin - piece.begin) / Step::kInputs * stride,
                             stride, kPanel, end - begin, sums, kPanel, anew, soon);
        soon.at += (end - begin) / kTileInputs<Step> * soon.lines * 64 * (rows > kTileHeight ? 2 : 1);
      };
      // What sums of a group become in outputs, or add to those so far.
      auto join = [&](const Sum* from, int64_t group, float* to) {
        if constexpr (!plain) {
          f32x16 scale[kPanel / 16], offset[kPanel / 16] = {};
          load_groups(m.scales, scales + group * kPanel, scale);
          if (m.offsets.at) load_groups(m.offsets, scales + group * kPanel, offset);
          for (int64_t r = 0; r < rows; r++)
            PENSTOCK_FOR (int g = 0; g < kPanel / 16; g++) {
              auto sum = load_bits<typename Step::Sum>(from + r * kPanel + g * 16);
              if constexpr (F::kIntegers) sum -= F::kZero * F::x_sum(a, (row + r) * groups + group);
              float* out = to + r * kPanel + g * 16;
              const float x_scale = m.x_in_groups ? a.x_scales[(row + r) * groups + group] : 1.0f;
              f32x16 value = as_float(sum) * scale[g];
              if (grouped) value = fma(as_float(sum) * x_scale, scale[g], group ? load(out) : f32x16{});
              if (m.offsets.at) value = fma(all(F::x_sum(a, (row + r) * groups + group) * x_scale), offset[g], value);
              store(out, value);
            }
        }
      };
      if (grouped) {
        for (int64_t begin = piece.begin, end; begin < piece.end; begin = end) {
          end = begin + m.group < m.in ? begin + m.group : m.in;
          multiply(begin, end, of_group, true);
          join(of_group, begin / m.group, (float*)values);
        }
      } else {
        multiply(piece.begin, piece.end, sums, piece.begin == 0);
      }
      if (!last) continue;
      if (!grouped) join(sums, 0, (float*)values);
      complete<F>(a, row, rows, column, count, values);
      sink.finish(sink.self, row, rows, column, count, values);
    }
  }
}

// --- Of a format -----------------------------------------------------------------------------------------------------

#if defined(PENSTOCK_QUADS)
// From how many rows 4-bit weights with int8 group scales are converted to 8 bits: in registers, or before the product.
constexpr int64_t kScaled = 5, kWidened = 9;

// The product with a W4A8 panel with int8 group scales as a product with W8A8, which has the same bits. Valid until the next
// call on this thread.
inline Linear as_w8a8(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel, int64_t scales) {
  thread_local int32_t sums[kRowBlock];
  const int64_t groups = groups_of(a.matrix), stride = sums_of(a.matrix);
  for (int64_t row = first; row < end; row++) sums[row - first] = ((const int32_t*)a.x_sums)[row * stride + groups];
  Linear wide = a;
  wide.x_sums = sums - first;
  wide.matrix.scales = {a.matrix.output_scales, GroupType::float32};
  wide.matrix.output_scales = nullptr;
  wide.matrix.group = a.matrix.in;
  wide.matrix.format = Format::w8a8;
  wide.matrix.panels = widen_scaled(a.matrix, panel, scales) - column / kPanel * panel_bytes(wide.matrix);
  return wide;
}
#endif

template <class F>
void multiply_format(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, const Sink& sink) {
  constexpr int64_t step = kStride<typename F::Step>;
  const Matrix& m = a.matrix;
  auto panel = [&](int64_t column) { return (const char*)m.panels + column / kPanel * panel_bytes(m); };
  const int64_t scales = column * groups_of(m);  // where the panel's begin
  using From = typename F::Step;
  using Many = typename F::Many;
#if defined(PENSTOCK_QUADS)  // else products of 4 bits are the faster ones
  if constexpr (std::is_same_v<F, W4A8>) {
    if (m.output_scales && end - first >= kScaled && end - first < kWidened)
      return multiply_panel<ScaledW4A8, false>(a, first, end, column, panel(column), scales, {panel(next), step}, sink);
    if (m.output_scales && end - first >= kWidened)
      return multiply_format<W8A8>(as_w8a8(a, first, end, column, panel(column), scales), first, end, column, column, sink);
  }
#endif
  if constexpr (ByTiles<typename Tiled<From>::type>::value)
    if (by_tiles<F>(m, end - first))
      return multiply_panel_by_tiles<F>(a, first, end, column, panel(column), scales, panel(next), sink);
  if constexpr (!std::is_same_v<F, Many>)
    if (end - first >= F::kMany) {
      if constexpr (std::is_same_v<From, typename Many::Step>)
        multiply_panel<Many, false>(a, first, end, column, panel(column), scales, {panel(next), step}, sink);
      else
        multiply_panel<Many, true>(a, first, end, column, widen<From>(panel(column), ceil_div(m.in, From::kInputs)), scales,
                                   {panel(next), step / (From::kInputs / Many::Step::kInputs)}, sink);
      return;
    }
  multiply_panel<F, false>(a, first, end, column, panel(column), scales, {panel(next), step}, sink);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
