// How matrices are kept: where an element lies in a panel, and how rows are multiplied with it.
//
// Rounded formats keep integers q and a scale for each output and group of inputs, so that a weight is q * scale. A
// group is summed by itself and then joins the output, which costs little next to the group and keeps the order of
// sums in every format the same for one row and for a thousand.

#pragma once

#include <vector>

#include "kernels.h"
#include "tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

// --- Steps of integers -----------------------------------------------------------------------------------------------

// Four inputs of 8 bits: unsigned weights by signed inputs. Sums of integers are exact, so that every instruction set
// gives the same.
struct QuadStep {
  using X = int8_t;
  using Sum = i32x16;
  static constexpr int kInputs = 4, kBytes = 64;
  static u32x16 weights(const char* at) { return load_bits<u32x16>(at); }
  static u32x16 last(const char* at) { return weights(at); }
#if defined(__AVX512VNNI__)
  static u32x16 input(const int8_t* x) { return all_of_four(x); }
  static i32x16 add(i32x16 sum, u32x16 x, u32x16 w) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
  }
#else
  struct Input {
    i32x16 even, odd;  // inputs 0 and 2, 1 and 3, as 16 bits each
  };
  static Input input(const int8_t* x) {
    auto pair = [](int low, int high) { return i32x16{} + int32_t((uint32_t(low) & 0xffff) | uint32_t(high) << 16); };
    return {pair(x[0], x[2]), pair(x[1], x[3])};
  }
  static i32x16 add(i32x16 sum, const Input& x, u32x16 w) {
    return sum + pairs(w & 0x00ff00ff, x.even) + pairs((w >> 8) & 0x00ff00ff, x.odd);
  }
  // Of 16 bits each: the low ones' product and the high ones'.
  static i32x16 pairs(u32x16 w, i32x16 x) {
#if defined(__AVX512BW__)
    return (i32x16)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    struct Halves {
      __m256i low, high;
    };
    const Halves a = as<Halves>(w), b = as<Halves>(x);
    return as<i32x16>(Halves{_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)});
#else
    return ((as<i32x16>(w) << 16) >> 16) * ((x << 16) >> 16) + (as<i32x16>(w) >> 16) * (x >> 16);
#endif
  }
#endif
};

// Eight inputs of 4 bits: a byte's low half is one of the first four, its high half one of the others.
struct OctetStep {
  using X = int8_t;
  using Sum = i32x16;
  static constexpr int kInputs = 8, kBytes = 64;
  struct Weights {
    u32x16 low, high;
  };
  static Weights weights(const char* at) {
    const u32x16 both = load_bits<u32x16>(at);
    return {both & 0x0f0f0f0f, (both >> 4) & 0x0f0f0f0f};
  }
  static Weights last(const char* at) { return weights(at); }
  struct Input {
    decltype(QuadStep::input(nullptr)) low, high;
  };
  static Input input(const int8_t* x) { return {QuadStep::input(x), QuadStep::input(x + 4)}; }
  static i32x16 add(i32x16 sum, const Input& x, const Weights& w) {
    return QuadStep::add(QuadStep::add(sum, x.low, w.low), x.high, w.high);
  }
};

// Two inputs of 8 bits, signed, as bfloat16, which holds them exactly.
struct WidePairStep {
  using X = bf16;
  using Sum = f32x16;
  static constexpr int kInputs = 2, kBytes = 32;
  static u32x16 weights(const char* at) {
    const i32x16 both = __builtin_convertvector(load_bits<i16x16>(at), i32x16);
    const f32x16 first = __builtin_convertvector((both << 24) >> 24, f32x16);
    const f32x16 second = __builtin_convertvector(both >> 8, f32x16);
    return (as<u32x16>(first) >> 16) | (as<u32x16>(second) & 0xffff0000);
  }
  static u32x16 last(const char* at) { return weights(at); }
  static u32x16 input(const bf16* x) { return PairStep::input(x); }
  static f32x16 add(f32x16 sum, u32x16 x, u32x16 w) { return PairStep::add(sum, x, w); }
};

// Eight inputs of 4 bits as bfloat16: the n-th four bits of 16 bits are an input of the n-th pair.
struct WideOctetStep {
  using X = bf16;
  using Sum = f32x16;
  static constexpr int kInputs = 8, kBytes = 64;
  struct Pairs {
    u32x16 of[4];
  };
  static u32x16 widened(u32x16 nibbles) {
#if defined(__AVX512BW__)
    return as<u32x16>(_mm512_permutexvar_epi16((__m512i)nibbles, (__m512i)load_bits<u32x16>(kValues)));
#else
    const f32x16 first = __builtin_convertvector(as<i32x16>(nibbles & 15) - 8, f32x16);
    const f32x16 second = __builtin_convertvector(as<i32x16>(nibbles >> 16) - 8, f32x16);
    return (as<u32x16>(first) >> 16) | (as<u32x16>(second) & 0xffff0000);
#endif
  }
  static Pairs weights(const char* at) {
    const u32x16 all = load_bits<u32x16>(at);
    Pairs found;
    for (int n = 0; n < 4; n++) found.of[n] = widened((all >> (4 * n)) & 0x000f000f);
    return found;
  }
  static Pairs last(const char* at) { return weights(at); }
  static Pairs input(const bf16* x) {
    Pairs found;
    for (int n = 0; n < 4; n++) found.of[n] = PairStep::input(x + 2 * n);
    return found;
  }
  static f32x16 add(f32x16 sum, const Pairs& x, const Pairs& w) {
    for (int n = 0; n < 4; n++) sum = PairStep::add(sum, x.of[n], w.of[n]);
    return sum;
  }
  // -8 to 7 in bfloat16.
  static constexpr uint16_t kValues[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                           0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
};

// A run of inputs: whole groups, or a part of the only one.
struct Piece {
  int64_t begin, end;
};

// Sums of a few rows, from zero or from what is kept of them: [rows][kPanel / 16].
template <class Sum, int R, int G>
PENSTOCK_INLINE inline void resume(bool anew, const f32x16* kept, Sum (&sums)[R][G]) {
  PENSTOCK_UNROLL for (int r = 0; r < R; r++)
    PENSTOCK_UNROLL for (int g = 0; g < G; g++) sums[r][g] = anew ? Sum{} : as<Sum>(kept[r * (kPanel / 16) + g]);
}
template <class Sum, int R, int G>
PENSTOCK_INLINE inline void keep(const Sum (&sums)[R][G], f32x16* kept) {
  PENSTOCK_UNROLL for (int r = 0; r < R; r++)
    PENSTOCK_UNROLL for (int g = 0; g < G; g++) kept[r * (kPanel / 16) + g] = as<f32x16>(sums[r][g]);
}

// --- Formats ---------------------------------------------------------------------------------------------------------

// The weights as they are.
template <class T>
struct Plain {
  using Step = typename StepOf<T>::Step;
  using X = T;
  using Many = Plain;
  static constexpr int kRows = kTileRows, kGroups = PENSTOCK_ISA::kGroups;

  static float get(const Matrix&, const char* panel, const float*, int64_t output, int64_t input) {
    constexpr int n = Step::kInputs;
    return widen(((const T*)panel)[(input / n * kPanel + output) * n + input % n]);
  }

  // Adds a piece to what is kept of those before it; whether it was the last, with the outputs then.
  template <int R>
  PENSTOCK_INLINE static bool product(const Linear& a, int64_t row, const char* panel, const float*, Piece piece, Soon soon,
                      f32x16* kept, f32x16 (&out)[R][kGroups]) {
    constexpr int64_t stride = kPanel / 16 * Step::kBytes;
    const int64_t in = a.matrix.in;
    const bool last = piece.end == in;
    resume(piece.begin == 0, kept, out);
    multiply<Step, R, kGroups>((const T*)a.x + row * in + piece.begin, in, panel + piece.begin / Step::kInputs * stride,
                               stride, piece.end - piece.begin, out, soon);
    if (!last) keep(out, kept);
    return last;
  }
};

// Integers of `Bits` bits, kept with `Zero` added; a unit holds those of a step for one output. A product holds up to
// `Rows` rows of G vectors of columns.
template <class S, int Bits, int Zero, class U, int Rows = kTileRows, int G = kGroups>
struct Rounded {
  using Step = S;
  using X = typename S::X;
  using Unit = U;
  static constexpr bool kIntegers = sizeof(X) == 1;
  static constexpr int kBits = Bits, kRows = Rows, kGroups = G;
  // What kMany rows and more are multiplied with: integers as bfloat16, made once for all of them; or, where groups are
  // summed by themselves, fewer columns at a time, so that both the groups' sums and the outputs stay in registers.
  static constexpr bool kNarrow = std::is_same_v<S, OctetStep> && G == 4;
  using Many = std::conditional_t<!kIntegers, Rounded<PairStep, Bits, 0, U>,
                                  std::conditional_t<kNarrow, Rounded<S, Bits, Zero, U, 7, 2>, Rounded>>;
  static constexpr int kMany = kNarrow ? 18 : kRows + 1;

  static float get(const Matrix& m, const char* panel, const float* scales, int64_t output, int64_t input) {
    const auto unit = ((const typename U::Bits*)panel)[input / S::kInputs * kPanel + output];
    return float(U::get(unit, input % S::kInputs)) * scales[input / m.group * kPanel + output];
  }

  // With one group its sums are kept between pieces, else the outputs so far.
  template <int R>
  PENSTOCK_INLINE static bool product(const Linear& a, int64_t row, const char* panel, const float* scales, Piece piece,
                      Soon soon, f32x16* kept, f32x16 (&out)[R][kGroups]) {
    const Matrix& m = a.matrix;
    const bool last = piece.end == m.in;
    if (m.group >= m.in) {
      typename S::Sum sums[R][kGroups];
      resume(piece.begin == 0, kept, sums);
      if (piece.begin == 0) shift(a, row, 0, sums);
      add(a, row, panel, piece, soon, sums);
      if (!last) {
        keep(sums, kept);
        return false;
      }
      PENSTOCK_UNROLL for (int g = 0; g < kGroups; g++) {
        const f32x16 scale = load(scales + g * 16);
        PENSTOCK_UNROLL for (int r = 0; r < R; r++) out[r][g] = as_float(sums[r][g]) * scale;
      }
    } else {
      resume(piece.begin == 0, kept, out);
      for (int64_t begin = piece.begin, end; begin < piece.end; begin = end) {
        end = begin + m.group < m.in ? begin + m.group : m.in;
        typename S::Sum sums[R][kGroups];
        resume(true, kept, sums);
        shift(a, row, begin / m.group, sums);
        add(a, row, panel, {begin, end}, soon, sums);
        soon.at += m.group / S::kInputs * soon.lines * 64;
        PENSTOCK_UNROLL for (int g = 0; g < kGroups; g++) {
          const f32x16 scale = load(scales + begin / m.group * kPanel + g * 16);
          PENSTOCK_UNROLL for (int r = 0; r < R; r++) out[r][g] = fma(as_float(sums[r][g]), scale, out[r][g]);
        }
      }
      if (!last) {
        keep(out, kept);
        return false;
      }
    }
    if constexpr (kIntegers)
      PENSTOCK_UNROLL for (int r = 0; r < R; r++)
        PENSTOCK_UNROLL for (int g = 0; g < kGroups; g++) out[r][g] *= a.x_scales[row + r];
    return true;
  }

 private:
  template <int R>
  PENSTOCK_INLINE static void shift(const Linear& a, int64_t row, int64_t group, typename S::Sum (&sums)[R][kGroups]) {
    const int64_t groups = groups_of(a.matrix);
    if constexpr (kIntegers)
      PENSTOCK_UNROLL for (int r = 0; r < R; r++)
        PENSTOCK_UNROLL for (int g = 0; g < kGroups; g++) sums[r][g] -= Zero * a.x_sums[(row + r) * groups + group];
  }

  template <int R>
  PENSTOCK_INLINE static void add(const Linear& a, int64_t row, const char* panel, Piece piece, Soon soon,
                                  typename S::Sum (&sums)[R][kGroups]) {
    constexpr int n = S::kInputs;
    constexpr int64_t stride = kPanel / 16 * S::kBytes;
    const int64_t in = a.matrix.in, width = kIntegers ? (in + 7) / 8 * 8 : in, inputs = piece.end - piece.begin;
    // Integers are padded with zeros, so that there is no last part of a step.
    multiply<S, R, kGroups>((const X*)a.x + row * width + piece.begin, width, panel + piece.begin / n * stride, stride,
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

using W8A8 = Rounded<QuadStep, 8, 128, QuadUnit>;
using W4A8 = Rounded<OctetStep, 4, 8, OctetUnit>;
using WInt8 = Rounded<WidePairStep, 8, 0, PairUnit>;
using WInt4 = Rounded<WideOctetStep, 4, 8, WideOctetUnit>;

// A panel's integers as bfloat16, in the order of `Many`: it is cheaper to do that once than for each few rows.
template <class F>
void widen_panel(const Matrix& m, const char* panel, std::vector<char>& wide) {
  using Step = typename F::Step;
  constexpr int pairs = Step::kInputs / 2, groups = kPanel / 16;
  const int64_t steps = ceil_div(m.in, Step::kInputs);
  wide.resize(steps * pairs * groups * PairStep::kBytes);
  for (int64_t i = 0; i < steps; i++)
    for (int g = 0; g < groups; g++) {
      const auto weights = Step::weights(panel + (i * groups + g) * Step::kBytes);
      for (int pair = 0; pair < pairs; pair++)
        memcpy(wide.data() + ((i * pairs + pair) * groups + g) * PairStep::kBytes, (const u32x16*)&weights + pair, 64);
    }
}

// Calls `f` with the format of a matrix as a type.
template <class F>
inline void with_format(const Matrix& m, F&& f) {
  switch (m.format) {
    case Format::w8a8: return f.template operator()<W8A8>();
    case Format::w4a8: return f.template operator()<W4A8>();
    case Format::wint8: return f.template operator()<WInt8>();
    case Format::wint4: return f.template operator()<WInt4>();
    default: m.type == Type::float32 ? f.template operator()<Plain<float>>() : f.template operator()<Plain<bf16>>();
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
