// Matrix formats: layout of a panel, and multiplication by rows.
//
// Quantized formats store integers q and a scale for each output and group of inputs; a weight is q * scale. Each group is
// summed separately, and its scaled sum is added to the output, so that the order of summation is the same for any number of
// rows. If a weight is q * scale + offset, the offset times the sum of the group's inputs is added after that.

#pragma once

#include "amx.h"
#include "kernels.h"

namespace penstock {
namespace PENSTOCK_ISA {

// A range of inputs: whole groups, or a part of the only group.
struct InputRange {
  int64_t begin, end;
};

// Loads sums [rows][kPanel] from `acc`, or zeros with `from_zero`; `store_acc` stores sums.
template <class Sum, int R, int G>
PENSTOCK_INLINE inline void load_acc(bool from_zero, const float* acc, Sum (&sums)[R][G]) {
  PENSTOCK_FOR (int r = 0; r < R; r++)
    PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] = from_zero ? Sum{} : load_bits<Sum>(acc + r * kPanel + g * kWidth);
}
template <class Sum, int R, int G>
PENSTOCK_INLINE inline void store_acc(const Sum (&sums)[R][G], float* acc) {
  PENSTOCK_FOR (int r = 0; r < R; r++)
    PENSTOCK_FOR (int g = 0; g < G; g++) store_bits(acc + r * kPanel + g * kWidth, sums[r][g]);
}

// Loads int8 values of a group for n columns, from index `at`.
template <int n>
inline Vector<int32_t, n> load_integers(const GroupValues& from, int64_t at) {
  return convert<Vector<int32_t, n>>(load_bits<Vector<int8_t, n>>((const int8_t*)from.data + at));
}

// Loads float32 or float16 values of a group for G vectors of columns, from index `at`.
template <class V, int G>
PENSTOCK_INLINE inline void load_groups(const GroupValues& from, int64_t at, V (&to)[G]) {
  constexpr int n = kLanesOf<V>;
  if (from.type == GroupType::float16)
    PENSTOCK_FOR (int g = 0; g < G; g++)
      to[g] = widen_half(load_bits<Vector<uint16_t, n>>((const uint16_t*)from.data + at + g * n));
  else
    PENSTOCK_FOR (int g = 0; g < G; g++) to[g] = load_bits<V>((const float*)from.data + at + g * n);
}
inline float get_group(const GroupValues& from, int64_t at) {
  if (from.type == GroupType::int8) return ((const int8_t*)from.data)[at];
  return from.type == GroupType::float16 ? widen_half(((const uint16_t*)from.data)[at]) : ((const float*)from.data)[at];
}

// Bytes between steps of a panel.
template <class Step>
constexpr int64_t kStride = kPanel / kWidth * Step::kBytes;

// --- Formats ---------------------------------------------------------------------------------------------------------

// Unquantized weights.
template <class T>
struct Unquantized {
  using Step = typename StepOf<T>::Step;
  using X = T;
  using ManyRows = Unquantized;
  static constexpr bool kIntegers = false;
  static constexpr int kZero = 0;
  static constexpr int kRows = kTileRows;
  static constexpr int groups(int rows) { return column_vectors(rows); }

  static float get(const Matrix&, const char* panel, int64_t, int64_t output, int64_t input) {
    constexpr int n = Step::kInputs;
    return widen(((const T*)panel)[(input / n * kPanel + output) * n + input % n]);
  }

  // Adds the products of a chunk to `acc`.
  template <int R, int G>
  PENSTOCK_INLINE static void product(const Linear& a, int64_t row, const char* panel, int64_t, InputRange chunk,
                                      Prefetch ahead, float* acc) {
    using In = typename Step::In;
    const int64_t in = a.matrix.in;
    f32xw sums[R][G];
    load_acc(chunk.begin == 0, acc, sums);
    multiply<Step, R, G>((const In*)a.x + row * in + chunk.begin, in, panel + chunk.begin / Step::kInputs * kStride<Step>,
                         kStride<Step>, chunk.end - chunk.begin, sums, ahead);
    store_acc(sums, acc);
  }
};

// Quantized weights of `Bits` bits, stored with `Zero` added. A unit `U` packs the weights of a step for one output. A
// product has up to `Rows` rows of `Groups` vectors of columns; 0: as many as fit into registers.
template <class S, int Bits, int Zero, class U, int Rows = kTileRows, int Groups = 0>
struct Quantized {
  using Step = S;
  using X = typename S::X;
  using Unit = U;
  static constexpr bool kIntegers = sizeof(X) == 1;
  static constexpr int kBits = Bits, kZero = Zero, kRows = Rows;
  static constexpr bool kHasIntegerScales = kIntegers && Bits == 4;
  static constexpr int groups(int rows) { return Groups ? Groups : column_vectors(rows); }
  // Format for products of at least kManyRows rows. Weight-only formats: weights are converted to bfloat16 once for all
  // rows. W4A8 with narrow sums: fewer columns at a time, so that both the sums of groups and the outputs stay in registers.
  static constexpr bool kNarrow = std::is_same_v<S, Int4Step> && kWidth == 16 && !HasSum16<S> && !Groups;
  using ManyRows = std::conditional_t<!kIntegers, Quantized<Bf16Step, Bits, 0, U>,
                                      std::conditional_t<kNarrow, Quantized<S, Bits, Zero, U, 7, 2>, Quantized>>;
  static constexpr int kManyRows = kNarrow ? 18 : kRows + 1;

  static float get(const Matrix& m, const char* panel, int64_t scales, int64_t output, int64_t input) {
    const auto unit = ((const typename U::Bits*)panel)[input / S::kInputs * kPanel + output];
    const int64_t at = scales + input / m.group * kPanel + output;
    const float value = float(U::get(unit, input % S::kInputs)) * get_group(m.scales, at);
    if (m.output_scales) return value * m.output_scales[scales / num_groups(m) + output];
    return m.offsets.data ? value + get_group(m.offsets, at) : value;
  }

  // Adds the products of a chunk to `acc`. With a single group, `acc` holds sums between chunks, and outputs after the last
  // chunk; with several groups, it holds outputs. `apply_epilogue` applies row and output scales. `scales`: index of the
  // panel's first scale.
  template <int R, int G>
  PENSTOCK_INLINE static void product(const Linear& a, int64_t row, const char* panel, int64_t scales, InputRange chunk,
                                      Prefetch ahead, float* acc) {
    const Matrix& m = a.matrix;
    if constexpr (kHasIntegerScales)
      if (m.output_scales) return product_of_integers<R, G>(a, row, panel, scales, chunk, ahead, acc);
    if (m.group >= m.in) {
      typename S::Sum sums[R][G];
      load_acc(chunk.begin == 0, acc, sums);
      if (chunk.begin == 0) shift(a, row, 1, sums);
      add(a, row, panel, chunk, ahead, sums);
      if (chunk.end < m.in) return store_acc(sums, acc);
      f32xw out[R][G], scale[G];
      load_groups(m.scales, scales, scale);
      PENSTOCK_FOR (int g = 0; g < G; g++)
        PENSTOCK_FOR (int r = 0; r < R; r++) out[r][g] = to_float(sums[r][g]) * scale[g];
      if (m.offsets.data) add_offsets(a, scales, row, 1, out);
      return store_acc(out, acc);
    }
    f32xw out[R][G];
    load_acc(chunk.begin == 0, acc, out);
    const int64_t groups = num_groups(m), first = chunk.begin / m.group;
    int64_t x_sums = row * groups + first;
    scales += first * kPanel;
    for (int64_t begin = chunk.begin, end; begin < chunk.end; begin = end, scales += kPanel, x_sums++) {
      end = begin + m.group < m.in ? begin + m.group : m.in;
      typename S::Sum sums[R][G];
      load_acc(true, acc, sums);
      shift(a, x_sums, groups, sums);
      add(a, row, panel, {begin, end}, ahead, sums);
      ahead.at += m.group / S::kInputs * ahead.lines * 64;
      f32xw scale[G];
      load_groups(m.scales, scales, scale);
      PENSTOCK_FOR (int g = 0; g < G; g++)
        PENSTOCK_FOR (int r = 0; r < R; r++) {
          const f32xw sum = to_float(sums[r][g]);
          out[r][g] = fma(m.x_in_groups ? sum * a.x_scales[x_sums + r * groups] : sum, scale[g], out[r][g]);
        }
      if (m.offsets.data) add_offsets(a, scales, x_sums, groups, out);
    }
    store_acc(out, acc);
  }

  // Product with int8 group scales, accumulated in int32. A group has at most 32 inputs, so that its sum fits into 16 bits,
  // and a matrix of a single group is one chunk.
  template <int R, int G>
  PENSTOCK_INLINE static void product_of_integers(const Linear& a, int64_t row, const char* panel, int64_t scales,
                                                  InputRange chunk, Prefetch ahead, float* acc) {
    const Matrix& m = a.matrix;
    i32xw out[R][G];
    load_acc(chunk.begin == 0, acc, out);
    const int64_t stride = num_sums(m), first = chunk.begin / m.group;
    int64_t x_sums = row * stride + first;
    scales += first * kPanel;
    for (int64_t begin = chunk.begin, end; begin < chunk.end; begin = end, scales += kPanel, x_sums++) {
      end = begin + m.group < m.in ? begin + m.group : m.in;
      i32xw sums[R][G];
      load_acc(true, acc, sums);
      shift(a, x_sums, stride, sums);
      add(a, row, panel, {begin, end}, ahead, sums);
      ahead.at += m.group / S::kInputs * ahead.lines * 64;
      PENSTOCK_FOR (int g = 0; g < G; g++) {
        const u32xw scale = bitcast<u32xw>(load_integers<kWidth>(m.scales, scales + g * kWidth)) & 0xffff;
        PENSTOCK_FOR (int r = 0; r < R; r++) out[r][g] = dot2(out[r][g], bitcast<u32xw>(sums[r][g]), scale);
      }
    }
    if (chunk.end < m.in) return store_acc(out, acc);
    f32xw result[R][G];
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) result[r][g] = to_float(out[r][g]);
    store_acc(result, acc);
  }

  // Sum of a group of a row's inputs, after quantization for a8 formats.
  static auto x_sum(const Linear& a, int64_t at) {
    return ((const std::conditional_t<kIntegers, int32_t, float>*)a.x_sums)[at];
  }

 private:
  // Subtracts `Zero` times the inputs. `x_sums`: index of the first row's input sum; sums of two rows are `stride` apart.
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
      const auto sum = broadcast<f32xw>(x_sum(a, x_sums + r * stride) * x_scale);
      PENSTOCK_FOR (int g = 0; g < G; g++) out[r][g] = fma(sum, offsets[g], out[r][g]);
    }
  }

  template <int R, int G>
  PENSTOCK_INLINE static void add(const Linear& a, int64_t row, const char* panel, InputRange chunk, Prefetch ahead,
                                  typename S::Sum (&sums)[R][G]) {
    using In = typename S::In;
    constexpr int n = S::kInputs;
    const int64_t in = a.matrix.in, width = kIntegers ? (in + 7) / 8 * 8 : in, inputs = chunk.end - chunk.begin;
    // Rows of integers are padded with zeros, so that the last step is complete.
    multiply<S, R, G>((const In*)a.x + row * width + chunk.begin, width, panel + chunk.begin / n * kStride<S>, kStride<S>,
                      kIntegers ? (inputs + n - 1) / n * n : inputs, sums, ahead);
  }
};

struct W8A8Unit {
  using Bits = uint32_t;
  static Bits pack(const int8_t* q) {
    uint32_t bytes;
    memcpy(&bytes, q, 4);
    return bytes ^ 0x80808080;  // adds 128 to each byte
  }
  static int get(Bits unit, int64_t input) { return int(unit >> (8 * input) & 255) - 128; }
};
struct WInt8Unit {
  using Bits = uint16_t;
  static Bits pack(const int8_t* q) {
    uint16_t bytes;
    memcpy(&bytes, q, 2);
    return bytes;
  }
  static int get(Bits unit, int64_t input) { return int8_t(unit >> (8 * input)); }
};
// Eight 4-bit weights. Within a run of `Length` inputs they are `Near` bits apart, and runs are `Far` bits apart.
template <int Length, int Near, int Far>
struct NibbleUnit {
  using Bits = uint32_t;
  static Bits pack(const int8_t* q) {
    uint32_t unit = 0;
    for (int i = 0; i < 8; i++) unit |= uint32_t(q[i] + 8) << bit(i);
    return unit;
  }
  static int get(Bits unit, int64_t input) { return int(unit >> bit(input) & 15) - 8; }
  static int bit(int64_t input) { return int(Near * (input % Length) + Far * (input / Length)); }
};
using W4A8Unit = NibbleUnit<4, 8, 4>;
using WInt4Unit = NibbleUnit<2, 16, 4>;

// e2m1 codes, passed as integers of the code minus 8.
struct WFloat4Unit : WInt4Unit {
  static float get(Bits unit, int64_t input) {
    constexpr float magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int code = WInt4Unit::get(unit, input) + 8;
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code];
  }
};

using W8A8 = Quantized<Int8Step, 8, 128, W8A8Unit>;
using W4A8 = Quantized<Int4Step, 4, 8, W4A8Unit>;
using WInt8 = Quantized<Int8AsBf16Step, 8, 0, WInt8Unit>;
using WInt4 = Quantized<Int4AsBf16Step, 4, 8, WInt4Unit>;
using WFloat4 = Quantized<E2M1AsBf16Step, 4, 0, WFloat4Unit>;

struct alignas(64) CacheLine {
  char bytes[64];
};

// Converts the steps of a panel to steps of a wider format (`Step::widened`), once for all rows. The result is in
// thread-local memory, valid until the next call. Prefetches `ahead` bytes ahead; 0: no prefetch.
template <class Step>
const char* widen(const char* panel, int64_t steps, int64_t ahead = 0) {
  constexpr int parts = sizeof(typename Step::Widened) / sizeof(u32xw), groups = kPanel / kWidth;
  thread_local std::vector<CacheLine> wide;
  char* const to = scratch(wide, steps * parts * kPanel / 16)->bytes;
  for (int64_t i = 0; i < steps; i++)
    for (int g = 0; g < groups; g++) {
      const char* from = panel + (i * groups + g) * Step::kBytes;
      if (ahead) __builtin_prefetch(from + ahead, 0, 3);
      const auto weights = Step::widened(from);
      for (int part = 0; part < parts; part++)
        store_bits(to + ((i * parts + part) * groups + g) * sizeof(u32xw), weights.parts[part]);
    }
  return to;
}

#if defined(PENSTOCK_HAS_DOT4)
// Converts 4-bit weights of a group and G vectors of columns to unsigned 8-bit weights, q * scale + 128.
template <int G>
struct IntegerScales {
  using UInt16s = Vector<uint16_t, 2 * kWidth>;
  u32xw flip[G], factor[G], added[G];

  // (q - 8) * s + 128 is q * s + (128 - 8 * s), or for negative s, (15 - q) * -s + (128 + 7 * s): every byte is below 256.
  PENSTOCK_INLINE IntegerScales(const GroupValues& scales, int64_t at) {
    PENSTOCK_FOR (int g = 0; g < G; g++) {
      const i32xw scale = load_integers<kWidth>(scales, at + g * kWidth), sign = scale >> 31;
      const i32xw size = (scale ^ sign) - sign;
      flip[g] = bitcast<u32xw>(sign & 0x0f0f0f0f);
      factor[g] = bitcast<u32xw>(size | size << 16);
      added[g] = first_bytes(bitcast<u32xw>(128 - (size << 3) + (size & sign)));
    }
  }
  // Four inputs of vector g, each in the low half of a byte.
  PENSTOCK_INLINE u32xw scaled(const u32xw& weights, int g) const {
#if defined(__AVX512F__)
    const auto nibbles = (u32xw)_mm512_ternarylogic_epi32((__m512i)weights, _mm512_set1_epi32(0x0f0f0f0f), (__m512i)flip[g],
                                                          0x6a);  // (a & b) ^ c
#else
    const u32xw nibbles = (weights & 0x0f0f0f0f) ^ flip[g];
#endif
    return bitcast<u32xw>(bitcast<UInt16s>(nibbles) * bitcast<UInt16s>(factor[g])) + added[g];
  }

 private:
  // Repeats the first byte of each lane four times.
  PENSTOCK_INLINE static u32xw first_bytes(const u32xw& v) {
#if defined(__AVX512F__)
    return (u32xw)_mm512_shuffle_epi8((__m512i)v, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
#else
    return (u32xw)_mm256_shuffle_epi8(
        (__m256i)v, _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c));
#endif
  }
};

// Converts a W4A8 panel with int8 group scales to W8A8 in a thread-local buffer, valid until the next call. Prefetches
// kPrefetchDistance bytes ahead.
inline const char* convert_panel_to_w8a8(const Matrix& m, const char* panel, int64_t scales) {
  constexpr int64_t n = Int4Step::kInputs;
  constexpr int groups = kPanel / kWidth;
  thread_local std::vector<CacheLine> wide;
  const int64_t steps = ceil_div(m.in, n), of_group = m.group / n;
  char* const to = scratch(wide, steps * 2 * kPanel / 16)->bytes;
  for (int64_t begin = 0; begin < steps; begin += of_group, scales += kPanel) {
    const IntegerScales<groups> of_columns(m.scales, scales);
    const int64_t end = begin + of_group < steps ? begin + of_group : steps;
    for (int64_t i = begin; i < end; i++)
      PENSTOCK_FOR (int g = 0; g < groups; g++) {
        const char* from = panel + (i * groups + g) * Int4Step::kBytes;
        __builtin_prefetch(from + kPrefetchDistance, 0, 3);
        const u32xw both = load_bits<u32xw>(from);
        PENSTOCK_FOR (int part = 0; part < 2; part++)
          store_bits(to + ((i * 2 + part) * groups + g) * sizeof(u32xw), of_columns.scaled(both >> 4 * part, g));
      }
  }
  return to;
}

// W4A8 with int8 group scales for a few rows: weights are converted to 8 bits in registers, so that groups need no separate
// sums.
struct ScaledW4A8 : Quantized<Int4Step, 4, 8, W4A8Unit, 8, 2> {
  using ManyRows = ScaledW4A8;

  template <int R, int G>
  PENSTOCK_INLINE static void product(const Linear& a, int64_t row, const char* panel, int64_t scales, InputRange chunk,
                                      Prefetch ahead, float* acc) {
    const Matrix& m = a.matrix;
    const int64_t stride = num_sums(m), width = (m.in + 7) / 8 * 8;
    const int8_t* const x = (const int8_t*)a.x + row * width;
    i32xw sums[R][G];
    load_acc(chunk.begin == 0, acc, sums);
    if (chunk.begin == 0)
      PENSTOCK_FOR (int r = 0; r < R; r++)
        PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] -= 128 * x_sum(a, (row + r + 1) * stride - 1);
    scales += chunk.begin / m.group * kPanel;
    for (int64_t begin = chunk.begin, end; begin < chunk.end; begin = end, scales += kPanel) {
      end = begin + m.group < m.in ? begin + m.group : m.in;
      const IntegerScales<G> of_columns(m.scales, scales);
      for (int64_t i = begin; i < end; i += 8) {
        prefetch(ahead);
        u32xw weights[2][G];
        PENSTOCK_FOR (int g = 0; g < G; g++) {
          const auto both = load_bits<u32xw>(panel + i / 8 * kStride<Int4Step> + g * Int4Step::kBytes);
          PENSTOCK_FOR (int part = 0; part < 2; part++) weights[part][g] = of_columns.scaled(both >> 4 * part, g);
        }
        PENSTOCK_FOR (int part = 0; part < 2; part++)
          PENSTOCK_FOR (int r = 0; r < R; r++) {
            const u32xw input = Int8Step::input(x + r * width + i + 4 * part);
            PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] = dot4(sums[r][g], weights[part][g], input);
          }
      }
    }
    if (chunk.end < m.in) return store_acc(sums, acc);
    f32xw result[R][G];
    PENSTOCK_FOR (int r = 0; r < R; r++)
      PENSTOCK_FOR (int g = 0; g < G; g++) result[r][g] = to_float(sums[r][g]);
    store_acc(result, acc);
  }
};
#endif

// Step type that AMX uses in place of a format's step.
template <class Step>
struct AmxStepOf {
  using type = Step;
};
template <>
struct AmxStepOf<Int4Step> {
  using type = Int8Step;
};
template <>
struct AmxStepOf<Int8AsBf16Step> {
  using type = Bf16Step;
};
template <class Numbers>
struct AmxStepOf<FourBitAsBf16Step<Numbers>> {
  using type = Bf16Step;
};

// Calls `f` with the format of a matrix as a template argument.
template <class F>
inline void with_format(const Matrix& m, F&& f) {
  switch (m.format) {
    case Format::w8a8: return f.template operator()<W8A8>();
    case Format::w4a8: return f.template operator()<W4A8>();
    case Format::wint8: return f.template operator()<WInt8>();
    case Format::wint4: return f.template operator()<WInt4>();
    case Format::wfloat4: return f.template operator()<WFloat4>();
    default:
      m.type == Type::float32 ? f.template operator()<Unquantized<float>>() : f.template operator()<Unquantized<bf16>>();
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
