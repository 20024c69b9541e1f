// How matrices are kept: where an element lies in a panel, and how rows are multiplied with it.
//
// Rounded formats keep integers q and a scale for each output and group of inputs, so that a weight is q * scale. A
// group is summed by itself and then joins the output, which costs little next to the group and keeps the order of
// sums in every format the same for one row and for a thousand. Where a weight is q * scale + offset, the offset times
// the sum of the group's inputs joins after it.

#pragma once

#include "amx.h"
#include "kernels.h"

namespace penstock {
namespace PENSTOCK_ISA {

// A run of inputs: whole groups, or a part of the only one.
struct Piece {
  int64_t begin, end;
};

// Sums of a few rows, from zero or from what is kept of them: [rows][kPanel].
template <class Sum, int R, int G>
PENSTOCK_INLINE inline void resume(bool anew, const float* kept, Sum (&sums)[R][G]) {
  PENSTOCK_FOR (int r = 0; r < R; r++)
    PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] = anew ? Sum{} : load_bits<Sum>(kept + r * kPanel + g * kWidth);
}
template <class Sum, int R, int G>
PENSTOCK_INLINE inline void keep(const Sum (&sums)[R][G], float* kept) {
  PENSTOCK_FOR (int r = 0; r < R; r++)
    PENSTOCK_FOR (int g = 0; g < G; g++) store_bits(kept + r * kPanel + g * kWidth, sums[r][g]);
}

// Integers of a group and some columns, from the `at`-th on.
template <int n>
inline Vector<int32_t, n> load_integers(const OfGroups& from, int64_t at) {
  return convert<Vector<int32_t, n>>(load_bits<Vector<int8_t, n>>((const int8_t*)from.at + at));
}

// Floats of a group and G vectors of columns, from the `at`-th on.
template <class V, int G>
PENSTOCK_INLINE inline void load_groups(const OfGroups& from, int64_t at, V (&to)[G]) {
  constexpr int n = kLanesOf<V>;
  if (from.type == GroupType::float16)
    PENSTOCK_FOR (int g = 0; g < G; g++)
      to[g] = widen_half(load_bits<Vector<uint16_t, n>>((const uint16_t*)from.at + at + g * n));
  else
    PENSTOCK_FOR (int g = 0; g < G; g++) to[g] = load_bits<V>((const float*)from.at + at + g * n);
}
inline float get_group(const OfGroups& from, int64_t at) {
  if (from.type == GroupType::int8) return ((const int8_t*)from.at)[at];
  return from.type == GroupType::float16 ? widen_half(((const uint16_t*)from.at)[at]) : ((const float*)from.at)[at];
}

// Bytes from one of a panel's steps to the next.
template <class Step>
constexpr int64_t kStride = kPanel / kWidth * Step::kBytes;

// --- Formats ---------------------------------------------------------------------------------------------------------

// The weights as they are.
template <class T>
struct Plain {
  using Step = typename StepOf<T>::Step;
  using X = T;
  using Many = Plain;
  static constexpr bool kIntegers = false;
  static constexpr int kZero = 0;
  static constexpr int kRows = kTileRows;
  static constexpr int groups(int rows) { return groups_of_rows(rows); }

  static float get(const Matrix&, const char* panel, int64_t, int64_t output, int64_t input) {
    constexpr int n = Step::kInputs;
    return widen(((const T*)panel)[(input / n * kPanel + output) * n + input % n]);
  }

  // Adds a piece to what is kept of those before it.
  template <int R, int G>
  PENSTOCK_INLINE static void product(const Linear& a, int64_t row, const char* panel, int64_t, Piece piece, Soon soon,
                                      float* kept) {
    using In = typename Step::In;
    const int64_t in = a.matrix.in;
    f32xw sums[R][G];
    resume(piece.begin == 0, kept, sums);
    multiply<Step, R, G>((const In*)a.x + row * in + piece.begin, in, panel + piece.begin / Step::kInputs * kStride<Step>,
                         kStride<Step>, piece.end - piece.begin, sums, soon);
    keep(sums, kept);
  }
};

// Integers of `Bits` bits, kept with `Zero` added; a unit holds those of a step for one output. A product holds up to
// `Rows` rows of `Groups` vectors of columns; 0: as many as fit into registers.
template <class S, int Bits, int Zero, class U, int Rows = kTileRows, int Groups = 0>
struct Rounded {
  using Step = S;
  using X = typename S::X;
  using Unit = U;
  static constexpr bool kIntegers = sizeof(X) == 1;
  static constexpr int kBits = Bits, kZero = Zero, kRows = Rows;
  static constexpr bool kHasIntegerScales = kIntegers && Bits == 4;
  static constexpr int groups(int rows) { return Groups ? Groups : groups_of_rows(rows); }
  // What kMany rows and more are multiplied with: integers as bfloat16, made once for all of them; or, where groups are
  // summed by themselves, fewer columns at a time, so that both the groups' sums and the outputs stay in registers.
  static constexpr bool kNarrow = std::is_same_v<S, OctetStep> && kWidth == 16 && !InWords<S> && !Groups;
  using Many = std::conditional_t<!kIntegers, Rounded<PairStep, Bits, 0, U>,
                                  std::conditional_t<kNarrow, Rounded<S, Bits, Zero, U, 7, 2>, Rounded>>;
  static constexpr int kMany = kNarrow ? 18 : kRows + 1;

  static float get(const Matrix& m, const char* panel, int64_t scales, int64_t output, int64_t input) {
    const auto unit = ((const typename U::Bits*)panel)[input / S::kInputs * kPanel + output];
    const int64_t at = scales + input / m.group * kPanel + output;
    const float value = float(U::get(unit, input % S::kInputs)) * get_group(m.scales, at);
    if (m.output_scales) return value * m.output_scales[scales / groups_of(m) + output];
    return m.offsets.at ? value + get_group(m.offsets, at) : value;
  }

  // With one group its sums are kept between pieces, and become outputs after the last; else the outputs so far. Scales of
  // rows and outputs are left to `complete`. The panel's own scales begin with the `scales`-th of the matrix.
  template <int R, int G>
  PENSTOCK_INLINE static void product(const Linear& a, int64_t row, const char* panel, int64_t scales, Piece piece,
                                      Soon soon, float* kept) {
    const Matrix& m = a.matrix;
    if constexpr (kHasIntegerScales)
      if (m.output_scales) return product_of_integers<R, G>(a, row, panel, scales, piece, soon, kept);
    if (m.group >= m.in) {
      typename S::Sum sums[R][G];
      resume(piece.begin == 0, kept, sums);
      if (piece.begin == 0) shift(a, row, 1, sums);
      add(a, row, panel, piece, soon, sums);
      if (piece.end < m.in) return keep(sums, kept);
      f32xw out[R][G], scale[G];
      load_groups(m.scales, scales, scale);
      PENSTOCK_FOR (int g = 0; g < G; g++)
        PENSTOCK_FOR (int r = 0; r < R; r++) out[r][g] = as_float(sums[r][g]) * scale[g];
      if (m.offsets.at) add_offsets(a, scales, row, 1, out);
      return keep(out, kept);
    }
    f32xw out[R][G];
    resume(piece.begin == 0, kept, out);
    const int64_t groups = groups_of(m), first = piece.begin / m.group;
    int64_t x_sums = row * groups + first;
    scales += first * kPanel;
    for (int64_t begin = piece.begin, end; begin < piece.end; begin = end, scales += kPanel, x_sums++) {
      end = begin + m.group < m.in ? begin + m.group : m.in;
      typename S::Sum sums[R][G];
      resume(true, kept, sums);
      shift(a, x_sums, groups, sums);
      add(a, row, panel, {begin, end}, soon, sums);
      soon.at += m.group / S::kInputs * soon.lines * 64;
      f32xw scale[G];
      load_groups(m.scales, scales, scale);
      PENSTOCK_FOR (int g = 0; g < G; g++)
        PENSTOCK_FOR (int r = 0; r < R; r++) {
          const f32xw sum = as_float(sums[r][g]);
          out[r][g] = fma(m.x_in_groups ? sum * a.x_scales[x_sums + r * groups] : sum, scale[g], out[r][g]);
        }
      if (m.offsets.at) add_offsets(a, scales, x_sums, groups, out);
    }
    keep(out, kept);
  }

  // Product with int8 group scales; accumulates in int32. A group has at most 32 inputs, so its sum fits in 16 bits, and a
  // matrix of a single group is one piece.
  template <int R, int G>
  PENSTOCK_INLINE static void product_of_integers(const Linear& a, int64_t row, const char* panel, int64_t scales,
                                                  Piece piece, Soon soon, float* kept) {
    const Matrix& m = a.matrix;
    i32xw out[R][G];
    resume(piece.begin == 0, kept, out);
    const int64_t stride = sums_of(m), first = piece.begin / m.group;
    int64_t x_sums = row * stride + first;
    scales += first * kPanel;
    for (int64_t begin = piece.begin, end; begin < piece.end; begin = end, scales += kPanel, x_sums++) {
      end = begin + m.group < m.in ? begin + m.group : m.in;
      i32xw sums[R][G];
      resume(true, kept, sums);
      shift(a, x_sums, stride, sums);
      add(a, row, panel, {begin, end}, soon, sums);
      soon.at += m.group / S::kInputs * soon.lines * 64;
      PENSTOCK_FOR (int g = 0; g < G; g++) {
        const u32xw scale = as<u32xw>(load_integers<kWidth>(m.scales, scales + g * kWidth)) & 0xffff;
        PENSTOCK_FOR (int r = 0; r < R; r++) out[r][g] = add_pairs(out[r][g], as<u32xw>(sums[r][g]), scale);
      }
    }
    if (piece.end < m.in) return keep(out, kept);
    f32xw found[R][G];
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) found[r][g] = as_float(out[r][g]);
    keep(found, kept);
  }

  // The sum of a group of a row's inputs, as rows are rounded.
  static auto x_sum(const Linear& a, int64_t at) {
    return ((const std::conditional_t<kIntegers, int32_t, float>*)a.x_sums)[at];
  }

 private:
  // Sums of a row's inputs are the `x_sums`-th, those of the next row lie `stride` further on.
  template <int R, int G>
  PENSTOCK_INLINE static void shift(const Linear& a, int64_t x_sums, int64_t stride, typename S::Sum (&sums)[R][G]) {
    if constexpr (kIntegers)
      PENSTOCK_FOR (int r = 0; r < R; r++)
        PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] -= Zero * x_sum(a, x_sums + r * stride);
  }

  template <int R, int G>
  PENSTOCK_INLINE static void add_offsets(const Linear& a, int64_t scales, int64_t x_sums, int64_t stride,
                                          f32xw (&out)[R][G]) {
    f32xw offsets[G];
    load_groups(a.matrix.offsets, scales, offsets);
    PENSTOCK_FOR (int r = 0; r < R; r++) {
      const float x_scale = a.matrix.x_in_groups ? a.x_scales[x_sums + r * stride] : 1.0f;
      const auto sum = all<f32xw>(x_sum(a, x_sums + r * stride) * x_scale);
      PENSTOCK_FOR (int g = 0; g < G; g++) out[r][g] = fma(sum, offsets[g], out[r][g]);
    }
  }

  template <int R, int G>
  PENSTOCK_INLINE static void add(const Linear& a, int64_t row, const char* panel, Piece piece, Soon soon,
                                  typename S::Sum (&sums)[R][G]) {
    using In = typename S::In;
    constexpr int n = S::kInputs;
    const int64_t in = a.matrix.in, width = kIntegers ? (in + 7) / 8 * 8 : in, inputs = piece.end - piece.begin;
    // Integers are padded with zeros, so that there is no last part of a step.
    multiply<S, R, G>((const In*)a.x + row * width + piece.begin, width, panel + piece.begin / n * kStride<S>, kStride<S>,
                      kIntegers ? (inputs + n - 1) / n * n : inputs, sums, soon);
  }
};

struct QuadUnit {
  using Bits = uint32_t;
  static Bits of(const int8_t* q) {
    uint32_t bytes;
    memcpy(&bytes, q, 4);
    return bytes ^ 0x80808080;  // 128 added to each
  }
  static int get(Bits unit, int64_t input) { return int(unit >> (8 * input) & 255) - 128; }
};
struct PairUnit {
  using Bits = uint16_t;
  static Bits of(const int8_t* q) {
    uint16_t bytes;
    memcpy(&bytes, q, 2);
    return bytes;
  }
  static int get(Bits unit, int64_t input) { return int8_t(unit >> (8 * input)); }
};
// Eight of four bits each; inputs lie `Near` bits apart within a stretch of `Length`, and stretches `Far` bits apart.
template <int Length, int Near, int Far>
struct NibbleUnit {
  using Bits = uint32_t;
  static Bits of(const int8_t* q) {
    uint32_t unit = 0;
    for (int i = 0; i < 8; i++) unit |= uint32_t(q[i] + 8) << place(i);
    return unit;
  }
  static int get(Bits unit, int64_t input) { return int(unit >> place(input) & 15) - 8; }
  static int place(int64_t input) { return int(Near * (input % Length) + Far * (input / Length)); }
};
using OctetUnit = NibbleUnit<4, 8, 4>;
using WideOctetUnit = NibbleUnit<2, 16, 4>;

// Floating-point numbers of four bits, given as such less 8.
struct TinyOctetUnit : WideOctetUnit {
  static float get(Bits unit, int64_t input) {
    constexpr float magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int code = WideOctetUnit::get(unit, input) + 8;
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code];
  }
};

using W8A8 = Rounded<QuadStep, 8, 128, QuadUnit>;
using W4A8 = Rounded<OctetStep, 4, 8, OctetUnit>;
using WInt8 = Rounded<WidePairStep, 8, 0, PairUnit>;
using WInt4 = Rounded<WideOctetStep, 4, 8, WideOctetUnit>;
using WFloat4 = Rounded<TinyOctetStep, 4, 0, TinyOctetUnit>;

struct alignas(64) Line {
  char bytes[64];
};

// Steps of a panel as steps that hold less, one of which is a vector of what `Step::wide` makes: it is cheaper to do that
// once than for each few rows. What lies so many bytes ahead is asked for, unless that is none.
template <class Step>
const char* widen(const char* panel, int64_t steps, int64_t ahead = 0) {
  constexpr int parts = sizeof(typename Step::Wide) / sizeof(u32xw), groups = kPanel / kWidth;
  thread_local std::vector<Line> wide;
  char* const to = with_room(wide, steps * parts * kPanel / 16)->bytes;
  for (int64_t i = 0; i < steps; i++)
    for (int g = 0; g < groups; g++) {
      const char* from = panel + (i * groups + g) * Step::kBytes;
      if (ahead) __builtin_prefetch(from + ahead, 0, 3);
      const auto weights = Step::wide(from);
      for (int part = 0; part < parts; part++)
        store_bits(to + ((i * parts + part) * groups + g) * sizeof(u32xw), weights.of[part]);
    }
  return to;
}

#if defined(PENSTOCK_QUADS)
// Converts 4-bit weights of a group and G vectors of columns to unsigned 8-bit weights, q * scale + 128.
template <int G>
struct IntegerScales {
  using Words = Vector<uint16_t, 2 * kWidth>;
  u32xw flip[G], factor[G], added[G];

  // (q - 8) * s + 128 is q * s + (128 - 8 * s), or of a negative s (15 - q) * -s + (128 + 7 * s): each byte is below 256.
  PENSTOCK_INLINE IntegerScales(const OfGroups& scales, int64_t at) {
    PENSTOCK_FOR (int g = 0; g < G; g++) {
      const i32xw scale = load_integers<kWidth>(scales, at + g * kWidth), sign = scale >> 31;
      const i32xw size = (scale ^ sign) - sign;
      flip[g] = as<u32xw>(sign & 0x0f0f0f0f);
      factor[g] = as<u32xw>(size | size << 16);
      added[g] = first_bytes(as<u32xw>(128 - (size << 3) + (size & sign)));
    }
  }
  // Four inputs of the g-th vector of columns, each being the low half of a byte.
  PENSTOCK_INLINE u32xw scaled(const u32xw& weights, int g) const {
#if defined(__AVX512F__)
    const auto nibbles = (u32xw)_mm512_ternarylogic_epi32((__m512i)weights, _mm512_set1_epi32(0x0f0f0f0f), (__m512i)flip[g],
                                                          0x6a);  // (a & b) ^ c
#else
    const u32xw nibbles = (weights & 0x0f0f0f0f) ^ flip[g];
#endif
    return as<u32xw>(as<Words>(nibbles) * as<Words>(factor[g])) + added[g];
  }

 private:
  // The first byte of each lane four times.
  PENSTOCK_INLINE static u32xw first_bytes(const u32xw& v) {
#if defined(__AVX512F__)
    return (u32xw)_mm512_shuffle_epi8((__m512i)v, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
#else
    return (u32xw)_mm256_shuffle_epi8(
        (__m256i)v, _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c));
#endif
  }
};

// Converts a W4A8 panel with int8 group scales to W8A8 in a thread-local buffer, valid until the next call. Prefetches kSoon
// bytes ahead.
inline const char* widen_scaled(const Matrix& m, const char* panel, int64_t scales) {
  constexpr int64_t n = OctetStep::kInputs;
  constexpr int groups = kPanel / kWidth;
  thread_local std::vector<Line> wide;
  const int64_t steps = ceil_div(m.in, n), of_group = m.group / n;
  char* const to = with_room(wide, steps * 2 * kPanel / 16)->bytes;
  for (int64_t begin = 0; begin < steps; begin += of_group, scales += kPanel) {
    const IntegerScales<groups> of_columns(m.scales, scales);
    const int64_t end = begin + of_group < steps ? begin + of_group : steps;
    for (int64_t i = begin; i < end; i++)
      PENSTOCK_FOR (int g = 0; g < groups; g++) {
        const char* from = panel + (i * groups + g) * OctetStep::kBytes;
        __builtin_prefetch(from + kSoon, 0, 3);
        const u32xw both = load_bits<u32xw>(from);
        PENSTOCK_FOR (int part = 0; part < 2; part++)
          store_bits(to + ((i * 2 + part) * groups + g) * sizeof(u32xw), of_columns.scaled(both >> 4 * part, g));
      }
  }
  return to;
}

// W4A8 with int8 group scales for a few rows: weights are converted to 8 bits in registers, so groups need no separate sums.
struct ScaledW4A8 : Rounded<OctetStep, 4, 8, OctetUnit, 8, 2> {
  using Many = ScaledW4A8;

  template <int R, int G>
  PENSTOCK_INLINE static void product(const Linear& a, int64_t row, const char* panel, int64_t scales, Piece piece,
                                      Soon soon, float* kept) {
    const Matrix& m = a.matrix;
    const int64_t stride = sums_of(m), width = (m.in + 7) / 8 * 8;
    const int8_t* const x = (const int8_t*)a.x + row * width;
    i32xw sums[R][G];
    resume(piece.begin == 0, kept, sums);
    if (piece.begin == 0)
      PENSTOCK_FOR (int r = 0; r < R; r++)
        PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] -= 128 * x_sum(a, (row + r + 1) * stride - 1);
    scales += piece.begin / m.group * kPanel;
    for (int64_t begin = piece.begin, end; begin < piece.end; begin = end, scales += kPanel) {
      end = begin + m.group < m.in ? begin + m.group : m.in;
      const IntegerScales<G> of_columns(m.scales, scales);
      for (int64_t i = begin; i < end; i += 8) {
        ask_for(soon);
        u32xw weights[2][G];
        PENSTOCK_FOR (int g = 0; g < G; g++) {
          const auto both = load_bits<u32xw>(panel + i / 8 * kStride<OctetStep> + g * OctetStep::kBytes);
          PENSTOCK_FOR (int part = 0; part < 2; part++) weights[part][g] = of_columns.scaled(both >> 4 * part, g);
        }
        PENSTOCK_FOR (int part = 0; part < 2; part++)
          PENSTOCK_FOR (int r = 0; r < R; r++) {
            const u32xw input = QuadStep::input(x + r * width + i + 4 * part);
            PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] = add_quads(sums[r][g], weights[part][g], input);
          }
      }
    }
    if (piece.end < m.in) return keep(sums, kept);
    f32xw found[R][G];
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) found[r][g] = as_float(sums[r][g]);
    keep(found, kept);
  }
};
#endif

// What tiles are multiplied with in place of a step.
template <class Step>
struct Tiled {
  using type = Step;
};
template <>
struct Tiled<OctetStep> {
  using type = QuadStep;
};
template <>
struct Tiled<WidePairStep> {
  using type = PairStep;
};
template <class Numbers>
struct Tiled<WideOctets<Numbers>> {
  using type = PairStep;
};

// Calls `f` with the format of a matrix as a type.
template <class F>
inline void with_format(const Matrix& m, F&& f) {
  switch (m.format) {
    case Format::w8a8: return f.template operator()<W8A8>();
    case Format::w4a8: return f.template operator()<W4A8>();
    case Format::wint8: return f.template operator()<WInt8>();
    case Format::wint4: return f.template operator()<WInt4>();
    case Format::wfloat4: return f.template operator()<WFloat4>();
    default: m.type == Type::float32 ? f.template operator()<Plain<float>>() : f.template operator()<Plain<bf16>>();
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
