// Linear layers over packed matrices, rounding what they are multiplied with, and taking rows back out for embeddings.

#pragma once

#include "elementwise.h"
#include "formats.h"
#include "rounding.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int64_t kSoon = kHasTiles ? 4096 : 512;  // bytes ahead of a single tile of rows
constexpr int64_t kPiece = 12288;  // bytes for each of up to 8 tiles

// Inputs that all rows are multiplied with before the next ones are touched: so many that this takes as long as memory
// needs to bring those. A single tile of rows is held by memory whatever the piece, and takes all.
template <class F>
inline int64_t inputs_of_piece(const Matrix& m, int64_t tiles) {
  constexpr int64_t n = F::Step::kInputs, step = kPanel / 16 * F::Step::kBytes;
  if (tiles == 1) return m.in;
  const int64_t whole = m.group < m.in ? m.group : n;
  const int64_t pieces = ceil_div(ceil_div(m.in, n) * step, kPiece * (tiles < 8 ? tiles : 8));
  return ceil_div(ceil_div(m.in, pieces), whole) * whole;
}

// What will be read after a panel: `step` bytes for each of the panel's steps.
struct Next {
  const char* at;
  int64_t step;
};

// Calls `finish(row, output, count, values)` for each run of outputs that a product holds of some rows and a panel, and
// before their products `prepare(row, output, count)`. A panel that `is_near` need not be asked for.
template <class F, bool is_near, class Prepare, class Finish>
inline void multiply_panel(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel,
                           const float* scales, Next next, Prepare&& prepare, Finish&& finish) {
  constexpr int64_t n = F::Step::kInputs, step = kPanel / 16 * F::Step::kBytes, width = F::kGroups * 16;
  const Matrix& m = a.matrix;
  const int64_t tiles = ceil_div(end - first, F::kRows), inputs = inputs_of_piece<F>(m, tiles);
  const int64_t calls = tiles == 1 ? 1 : tiles * (kPanel / width), lines = ceil_div(next.step / 64, calls);
  f32x16 kept[kRowBlock][kPanel / 16];
  for (Piece piece{0, 0}; piece.end < m.in;) {
    piece = {piece.end, piece.end + inputs < m.in ? piece.end + inputs : m.in};
    const int64_t steps = ceil_div(piece.end - piece.begin, n);
    const char* const begin = panel + piece.begin / n * step;
    const char* soon = is_near            ? next.at + piece.begin / n * next.step
                       : tiles == 1       ? begin + kSoon
                       : piece.end < m.in ? begin + steps * step
                                          : next.at;
    const char* const until = soon + steps * next.step;
    // As even as can be: a tile of one or two rows takes nearly as long as one of four.
    for (int64_t row = first, height; row < end; row += height) {
      height = ceil_div(end - row, ceil_div(end - row, F::kRows));
      with_rows<F::kRows>(height, [&]<int R>() {
        for (int64_t c = 0; c < kPanel && column + c < m.outputs; c += width) {
          const int64_t at = column + c, left = m.outputs - at, count = left < width ? left : width;
          f32x16 out[R][F::kGroups];
          if (piece.end == m.in)
            for (int r = 0; r < R; r++) prepare(row + r, at, count);
          const bool done =
              F::template product<R>(a, row, panel + c / 16 * F::Step::kBytes, scales + c, piece,
                                     {soon, soon < until ? lines : 0}, kept[row - first] + c / 16, out);
          soon += steps * lines * 64;
          if (!done) continue;
          if (m.bias) {
            PENSTOCK_UNROLL for (int g = 0; g < F::kGroups; g++) {
              const f32x16 bias = load_some(m.bias + at + g * 16, count - g * 16);
              PENSTOCK_UNROLL for (int r = 0; r < R; r++) out[r][g] += bias;
            }
          }
          PENSTOCK_UNROLL for (int r = 0; r < R; r++) finish(row + r, at, count, out[r]);
        }
      });
    }
  }
}

// --- By tiles --------------------------------------------------------------------------------------------------------

constexpr int64_t kTilePiece = 64 << 10;  // bytes of a panel that all rows of a task are multiplied with in turn
constexpr int64_t kLonePiece = 16 << 10;  // the same where rows are few, and memory is what they wait for
constexpr int64_t kFewest = 32;           // rows of integers for which tiles are worth it

// Where sums are rounded, rows that are few must be multiplied as many are; integers need not.
template <class F>
inline bool by_tiles(const Matrix& m, int64_t rows) {
  using Step = typename Tiled<typename F::Step>::type;
  if constexpr (!ByTiles<Step>::value) return false;
  if constexpr (!F::kIntegers) return true;
  return rows >= kFewest && (m.group >= m.in || m.group % kTileInputs<Step> == 0);
}

// As `multiply_panel`. Of each run of inputs the weights stay near while all rows are multiplied with them.
template <class F, class Prepare, class Finish>
void multiply_panel_by_tiles(const Linear& a, int64_t first, int64_t end, int64_t column, const char* panel,
                             const float* scales, const char* next, Prepare&& prepare, Finish&& finish) {
  using From = typename F::Step;
  using Step = typename Tiled<From>::type;
  using X = typename Step::X;
  using Sum = typename ByTiles<Step>::Sum;
  constexpr int64_t stride = kPanel / 16 * Step::kBytes, from_stride = kPanel / 16 * From::kBytes;
  constexpr bool plain = std::is_same_v<F, Plain<X>>, in_place = std::is_same_v<From, Step>;
  alignas(64) thread_local Sum kept[kRowBlock * kPanel];  // outputs so far; where they are one group's, its sums
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
              ceil_div(steps * from_stride / 64, blocks * ceil_div(piece.end - piece.begin, kTileInputs<Step>)), blocks <= 2};
    if (blocks == 1) soon = {from + kSoon, in_place ? soon.lines : 0, true};
    for (int64_t row = first; row < end; row += kTallest) {
      const int64_t rows = end - row < kTallest ? end - row : kTallest;
      const X* x = (const X*)a.x + row * width + piece.begin;
      Sum* sums = kept + (row - first) * kPanel;
      if (last)
        for (int64_t r = 0; r < rows; r++) prepare(row + r, column, count);
      auto multiply = [&](int64_t begin, int64_t end, Sum* sums, bool anew) {
        multiply_tiles<Step>(x + begin - piece.begin, width, rows, weights + (begin - piece.begin) / Step::kInputs * stride,
                             stride, kPanel, end - begin, sums, kPanel, anew, soon);
        soon.at += (end - begin) / kTileInputs<Step> * soon.lines * 64 * (rows > kTileHeight ? 2 : 1);
      };
      auto shifted = [&](const Sum* sums, int64_t r, int g, int64_t group) {
        const auto sum = load_bits<typename Step::Sum>(sums + r * kPanel + g * 16);
        if constexpr (F::kIntegers)
          return as_float(sum - F::kZero * a.x_sums[(row + r) * groups + group]);
        else
          return sum;
      };
      if (grouped) {
        for (int64_t begin = piece.begin, end; begin < piece.end; begin = end) {
          end = begin + m.group < m.in ? begin + m.group : m.in;
          multiply(begin, end, of_group, true);
          const int64_t group = begin / m.group;
          f32x16 scale[kPanel / 16];
          for (int g = 0; g < kPanel / 16; g++) scale[g] = load(scales + group * kPanel + g * 16);
          for (int64_t r = 0; r < rows; r++)
            PENSTOCK_UNROLL for (int g = 0; g < kPanel / 16; g++) {
              float* out = (float*)sums + r * kPanel + g * 16;
              store(out, fma(shifted(of_group, r, g, group), scale[g], begin ? load(out) : f32x16{}));
            }
        }
      } else {
        multiply(piece.begin, piece.end, sums, piece.begin == 0);
      }
      if (!last) continue;
      for (int64_t r = 0; r < rows; r++) {
        f32x16 out[kPanel / 16];
        PENSTOCK_UNROLL for (int g = 0; g < kPanel / 16; g++) {
          if (plain || grouped)
            out[g] = load((const float*)sums + r * kPanel + g * 16);
          else
            out[g] = shifted(sums, r, g, 0) * load(scales + g * 16);
          if constexpr (F::kIntegers) out[g] *= a.x_scales[row + r];
          if (m.bias) out[g] += load_some(m.bias + column + g * 16, count - g * 16);
        }
        finish(row + r, column, count, out);
      }
    }
  }
}

// --- Of a matrix -----------------------------------------------------------------------------------------------------

// The same for the panel that begins at a column; `next` is where the one after it begins.
template <class F, class Prepare, class Finish>
inline void multiply_rows(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, Prepare&& prepare,
                          Finish&& finish) {
  constexpr int64_t step = kPanel / 16 * F::Step::kBytes;
  const Matrix& m = a.matrix;
  auto panel = [&](int64_t column) { return (const char*)m.panels + column / kPanel * panel_bytes(m); };
  const float* scales = m.scales + column * groups_of(m);
  using From = typename F::Step;
  using Many = typename F::Many;
  if constexpr (ByTiles<typename Tiled<From>::type>::value)
    if (by_tiles<F>(m, end - first))
      return multiply_panel_by_tiles<F>(a, first, end, column, panel(column), scales, panel(next), prepare, finish);
  if constexpr (!std::is_same_v<F, Many>)
    if (end - first >= F::kMany) {
      if constexpr (std::is_same_v<From, typename Many::Step>)
        multiply_panel<Many, false>(a, first, end, column, panel(column), scales, {panel(next), step}, prepare, finish);
      else
        multiply_panel<Many, true>(a, first, end, column, widen<From>(panel(column), ceil_div(m.in, From::kInputs)), scales,
                                   {panel(next), step / (From::kInputs / Many::Step::kInputs)}, prepare, finish);
      return;
    }
  multiply_panel<F, false>(a, first, end, column, panel(column), scales, {panel(next), step}, prepare, finish);
}

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

template <class F, class Finish>
inline void walk(const Linear& a, int64_t task, Finish&& finish) {
  const Share s = share_of(a, a.matrix.outputs, task);
  for (int64_t column = s.column; column < s.until; column += kPanel)
    multiply_rows<F>(a, s.first, s.end, column, column + kPanel, [](int64_t, int64_t, int64_t) {}, finish);
}

// Writes the outputs of some rows and a panel, those of the first row to `out`.
template <class F, class Out>
void write_panel(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, Out* out, int64_t stride) {
  auto at = [&](int64_t row, int64_t output) { return out + (row - first) * stride + output - column; };
  multiply_rows<F>(
      a, first, end, column, next,
      [&](int64_t row, int64_t output, int64_t count) {  // asked for, which takes as long as the product
        for (int64_t i = 0; i < count; i += 64 / sizeof(Out)) __builtin_prefetch(at(row, output) + i, 1);
      },
      [&]<int G>(int64_t row, int64_t output, int64_t count, const f32x16(&values)[G]) PENSTOCK_INLINE {
        if (count == G * 16)
          store_all(at(row, output), values);
        else
          for (int g = 0; g * 16 < count; g++) store_some(at(row, output) + g * 16, values[g], count - g * 16);
      });
}

template <class Out>
void linear_block(const Linear& a, int64_t task) {
  const int64_t outputs = a.matrix.outputs;
  const Share s = share_of(a, outputs, task);
  with_format(a.matrix, [&]<class F>() {
    for (int64_t column = s.column; column < s.until; column += kPanel)
      write_panel<F>(a, s.first, s.end, column, column + kPanel, (Out*)a.out + s.first * outputs + column, outputs);
  });
}

// Gate and up, each half of the outputs and whole panels, and of them what the next matrix is multiplied with. A panel of
// both at a time, so that they stay near; those of a single tile of rows are small, and all panels then follow each other.
template <class Out>
void gated_block(const Linear& a, int64_t task) {
  const int64_t size = a.matrix.outputs / 2;
  const Share s = share_of(a, size, task);
  const int64_t some = s.end - s.first > kTileRows ? kPanel : s.until - s.column;
  static_assert(kRowBlock >= kTileRows * kMostPanels);
  alignas(64) thread_local Out gates[kRowBlock * kPanel], ups[kRowBlock * kPanel];
  with_format(a.matrix, [&]<class F>() {
    for (int64_t begin = s.column; begin < s.until; begin += some) {
      const int64_t end = begin + some;
      for (int64_t c = begin; c < end; c += kPanel)
        write_panel<F>(a, s.first, s.end, c, c + kPanel < end ? c + kPanel : size + begin, gates + c - begin, some);
      for (int64_t c = begin; c < end; c += kPanel)
        write_panel<F>(a, s.first, s.end, size + c, c + kPanel < end ? size + c + kPanel : end, ups + c - begin, some);
      for (int64_t row = 0; row < s.end - s.first; row++)
        silu_mul(gates + row * some, ups + row * some, (Out*)a.out + (s.first + row) * size + begin, some);
    }
  });
}

template <class T>
void quantize_row(const Quantize& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.in;
  int8_t* out = a.out + row * a.padded;
  const float most = magnitude(x, a.in);
  const int64_t groups = ceil_div(a.in, a.group);
  a.scales[row] = most / 127.0f;
  if (!(most > kNothing)) {  // or not a number, as the scale then says
    memset(out, 0, a.padded);
    memset(a.sums + row * groups, 0, groups * sizeof(int32_t));
    return;
  }
  const float inverse = 127.0f / most;
  memset(out + a.in, 0, a.padded - a.in);
  for (int64_t group = 0; group < groups; group++) {
    const int64_t begin = group * a.group, end = begin + a.group < a.in ? begin + a.group : a.in;
    a.sums[row * groups + group] = round_run(x + begin, end - begin, inverse, out + begin);
  }
}

template <class T>
void gather_row(const Gather& a, int64_t row) {
  const Matrix& m = a.matrix;
  const int64_t number = a.ids[row] / kPanel, output = a.ids[row] % kPanel;
  const char* panel = (const char*)m.panels + number * panel_bytes(m);
  const float* scales = m.scales + number * groups_of(m) * kPanel;
  T* out = (T*)a.out + row * m.in;
  with_format(m, [&]<class F>() {
    for (int64_t i = 0; i < m.in; i++) narrow(out + i, F::get(m, panel, scales, output, i));
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

// Rounds to nearest. 8 bits use -127 to 127; 4 bits use all of -8 to 7, with the largest magnitude as -8.
template <class F, class T>
void round_weights(const Matrix& m, const T* weight, int8_t* out, float* scales) {
  for (int64_t begin = 0; begin < m.in; begin += m.group, scales += kPanel) {
    const int64_t end = begin + m.group < m.in ? begin + m.group : m.in;
    float extreme = magnitude(weight + begin, end - begin);
    if (F::kBits == 4)
      for (int64_t i = begin; i < end; i++)
        if (widen(weight[i]) == extreme) {
          extreme = -extreme;
          break;
        }
    const float scale = extreme / (F::kBits == 4 ? 8.0f : 127.0f), inverse = 1.0f / scale;
    *scales = scale;
    if (!(extreme > kNothing || -extreme > kNothing)) continue;  // `out` is zero; a scale that is no number says so
    for (int64_t i = begin; i < end; i += 16) {
      const int64_t count = end - i < 16 ? end - i : 16;
      i32x16 q = to_integers((count < 16 ? load_part(weight + i, count) : load(weight + i)) * inverse);
      if (F::kBits == 4) q = q > 7 ? i32x16{} + 7 : q;
      const i8x16 narrow = __builtin_convertvector(q, i8x16);
      memcpy(out + i, &narrow, count);
    }
  }
}

template <class F, class T>
void pack_rounded(const Pack& a, int64_t number) {
  constexpr int n = F::Step::kInputs;
  const Matrix& m = a.matrix;
  const int64_t padded = ceil_div(m.in, n) * n;
  const int64_t row = number * kPanel - a.first, count = a.rows - row < kPanel ? a.rows - row : kPanel;
  std::vector<int8_t> rounded(kPanel * padded);
  for (int64_t o = 0; o < count; o++)
    round_weights<F, T>(m, (const T*)a.weight + (row + o) * m.in, rounded.data() + o * padded,
                    (float*)m.scales + number * groups_of(m) * kPanel + o);
  auto* unit = (typename F::Unit::Bits*)((char*)m.panels + number * panel_bytes(m));
  for (int64_t i = 0; i < padded; i += n)
    for (int64_t o = 0; o < kPanel; o++) *unit++ = F::Unit::of(rounded.data() + o * padded + i);
}

template <class T>
void pack_panel(const Pack& a, int64_t task) {
  const int64_t number = a.first / kPanel + task;
  with_format(a.matrix, [&]<class F>() {
    if constexpr (std::is_same_v<F, Plain<float>> || std::is_same_v<F, Plain<bf16>>)
      pack_plain<T>(a, number);
    else
      pack_rounded<F, T>(a, number);
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
