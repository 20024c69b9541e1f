// Steps of quantized weights: layout of a vector of weights, and multiplication by inputs.

#pragma once

#include "tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Widens the first and third of four bytes in each lane to 16 bits; `odd_bytes` widens the second and fourth.
template <bool is_signed, class V>
inline V even_bytes(const V& v) {
  if constexpr (!is_signed) return v & 0x00ff00ff;
  using Int16s = Vector<int16_t, sizeof(V) / 2>;
  return bitcast<V>((bitcast<Int16s>(v) << 8) >> 8);
}
template <bool is_signed, class V>
inline V odd_bytes(const V& v) {
  using Int16s = Vector<std::conditional_t<is_signed, int16_t, uint16_t>, sizeof(V) / 2>;
  return bitcast<V>(bitcast<Int16s>(v) >> 8);
}

#if defined(__AVX2__)
// sum + v, with lanes of `bits` bits. Inline assembly fixes the place of the addition: GCC would postpone additions until it
// runs out of registers.
template <int bits>
PENSTOCK_INLINE inline __m256i add_now(__m256i sum, __m256i v) {
  if constexpr (bits == 16)
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(v));
  else
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(v));
  return sum;
}
#endif

// sum + x0 * w0 + x1 * w1, for two 16-bit integers per lane.
template <class V>
inline V dot2(const V& sum, const Vector<uint32_t, kLanesOf<V>>& x, const Vector<uint32_t, kLanesOf<V>>& w) {
  if constexpr (IsVectorPair<V>::value) {
    return {dot2(sum.low, x.low, w.low), dot2(sum.high, x.high, w.high)};
  } else {
#if defined(__AVX512VNNI__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    if constexpr (sizeof(V) == 32) return (V)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
#if defined(__AVX512BW__)
    if constexpr (sizeof(V) == 64) return sum + (V)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(V) == 32) return (V)add_now<32>((__m256i)sum, _mm256_madd_epi16((__m256i)w, (__m256i)x));
#endif
#if defined(__SSE2__)
    if constexpr (sizeof(V) == 16) return sum + (V)_mm_madd_epi16((__m128i)w, (__m128i)x);
#endif
    const auto a = bitcast<V>(w), b = bitcast<V>(x);
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
  }
}

// Widens rows of bytes to 16 bits, in the order in which `even_bytes` and `odd_bytes` return weights.
template <class X>
inline void prepare_int16(const X* x, int64_t count, int16_t* out) {
  using Int16s = Vector<uint32_t, 4>;
  for (int64_t i = 0; i < count; i += 16) {
    X padded[16] = {};
    if (count - i < 16) memcpy(padded, x + i, count - i);
    const auto four = load_bits<Int16s>(count - i < 16 ? padded : x + i);
    const auto even = even_bytes<std::is_signed_v<X>>(four), odd = odd_bytes<std::is_signed_v<X>>(four);
    const Int16s both[2] = {__builtin_shufflevector(even, odd, 0, 4, 1, 5), __builtin_shufflevector(even, odd, 2, 6, 3, 7)};
    memcpy(out + i, both, (count - i < 16 ? count - i : 16) * sizeof(int16_t));
  }
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PENSTOCK_HAS_DOT4  // dot products of four bytes
inline i32xw dot4(const i32xw& sum, const u32xw& bytes, const u32xw& signed_bytes) {
#if defined(__AVX512VNNI__)
  return (i32xw)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)signed_bytes);
#else
  return (i32xw)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes, (__m256i)signed_bytes);
#endif
}
#endif

// Four 8-bit inputs. One operand of a product is signed, the other is unsigned. Sums of integers are exact, so that all
// instruction sets give the same result.
template <class T>
struct ByteStep {
  using X = T;
  using Sum = i32xw;
  static constexpr int kInputs = 4, kBytes = 4 * kWidth;
  static constexpr bool kSigned = std::is_signed_v<T>;  // true: signed inputs and unsigned weights; false: the opposite
#if defined(PENSTOCK_HAS_DOT4)
  using In = T;
  static constexpr int kParts = 1;
  template <int part = 0>
  static u32xw weights(const char* at) {
    return load_bits<u32xw>(at);
  }
  template <int part = 0>
  static u32xw input(const T* x) {
    return u32xw{} + load_bits<uint32_t>(x);
  }
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) { return kSigned ? dot4(sum, w, x) : dot4(sum, x, w); }
#else
  using In = int16_t;
  static constexpr int kParts = 2;
  template <int part = 0>
  static u32xw weights(const char* at) {
    const u32xw four = load_bits<u32xw>(at);
    return part ? odd_bytes<!kSigned>(four) : even_bytes<!kSigned>(four);
  }
  template <int part = 0>
  static u32xw input(const int16_t* x) {
    return u32xw{} + load_bits<uint32_t>(x + 2 * part);
  }
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) { return dot2(sum, x, w); }
  static void prepare(const T* x, int64_t count, int16_t* out) { prepare_int16(x, count, out); }
#endif
};
using Int8Step = ByteStep<int8_t>;  // signed inputs, weights with 128 added
using UInt8Step = ByteStep<uint8_t>;  // unsigned inputs, signed weights: softmax weights and values of attention

// Eight 4-bit weights: the low halves of four bytes are the weights of inputs 0 to 3, the high halves those of inputs 4 to
// 7.
struct Int4Step {
  using X = int8_t;
  using Sum = i32xw;
  static constexpr int kInputs = 8, kBytes = 4 * kWidth;
  struct Widened {
    u32xw parts[2];  // four inputs each, in the layout of Int8Step
  };
  static Widened widened(const char* at) {
    const u32xw both = load_bits<u32xw>(at);
    return {{both & 0x0f0f0f0f, (both >> 4) & 0x0f0f0f0f}};
  }
#if defined(__AVX512VNNI__)
  using In = int8_t;
  static constexpr int kParts = 1;
  template <int part = 0>
  static Widened weights(const char* at) {
    return widened(at);
  }
  template <int part = 0>
  static Widened input(const int8_t* x) {
    return {{Int8Step::input(x), Int8Step::input(x + 4)}};
  }
  static i32xw add(const i32xw& sum, const Widened& x, const Widened& w) {
    return Int8Step::add(Int8Step::add(sum, x.parts[0], w.parts[0]), x.parts[1], w.parts[1]);
  }
#elif defined(__AVX2__)
  using In = int8_t;
  static constexpr int kParts = 2;
  template <int part = 0>
  static u32xw weights(const char* at) {
    const u32xw both = load_bits<u32xw>(at);
    return (part ? both >> 4 : both) & 0x0f0f0f0f;
  }
  template <int part = 0>
  static u32xw input(const int8_t* x) {
    return u32xw{} + load_bits<uint32_t>(x + 4 * part);
  }
#if defined(PENSTOCK_HAS_DOT4)
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) { return Int8Step::add(sum, x, w); }
#else
  // Two products of at most 15 * 127 are added in 16 bits; four steps sum up to 30,480.
  using Sum16 = Vector<int16_t, 2 * kWidth>;
  static constexpr int kSum16Steps = 4;
  static Sum16 add(const Sum16& sums, const u32xw& x, const u32xw& w) {
#if defined(__AVX512BW__)
    return sums + (Sum16)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
#else
    return (Sum16)add_now<16>((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#endif
  }
  static i32xw total(const Sum16& sums) { return dot2(i32xw{}, u32xw{} + 0x00010001u, bitcast<u32xw>(sums)); }
#endif
#else
  using In = int16_t;
  static constexpr int kParts = 4;
  template <int part = 0>
  static u32xw weights(const char* at) {
    return (load_bits<u32xw>(at) >> (part % 2 * 8 + part / 2 * 4)) & 0x000f000f;
  }
  template <int part = 0>
  static u32xw input(const int16_t* x) {
    return u32xw{} + load_bits<uint32_t>(x + 2 * part);
  }
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) { return dot2(sum, x, w); }
  static void prepare(const int8_t* x, int64_t count, int16_t* out) { prepare_int16(x, count, out); }
#endif
};

// Packs two vectors of floats, which bfloat16 represents exactly, into pairs of bfloat16.
inline u32xw pack_bf16_pair(const f32xw& first, const f32xw& second) {
  return (bitcast<u32xw>(first) >> 16) | (bitcast<u32xw>(second) & 0xffff0000);
}

// Two signed 8-bit weights, multiplied as floats.
struct Int8AsBf16Step : Bf16Inputs {
  static constexpr int kInputs = 2, kBytes = 2 * kWidth;
  struct Widened {
    u32xw parts[1];  // in the layout of Bf16Step
  };
  template <int part>
  static f32xw floats(const char* at) {
    const auto both = convert<i32xw>(load_bits<Vector<int16_t, kWidth>>(at));
    return convert<f32xw>(part ? both >> 8 : (both << 24) >> 24);
  }
  static Widened widened(const char* at) { return {{pack_bf16_pair(floats<0>(at), floats<1>(at))}}; }
  template <int part = 0>
  static auto weights(const char* at) {
#if defined(__AVX512BF16__)
    return widened(at).parts[0];
#else
    return floats<part>(at);
#endif
  }
};

// 4-bit codes of integers: the integer plus 8.
struct Int4Codes {
  // Values as bfloat16, by code.
  static constexpr uint16_t kValues[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                           0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  static f32xw floats(const u32xw& codes) { return convert<f32xw>(bitcast<i32xw>(codes & 15) - 8); }
};

// 4-bit codes of floating-point numbers: a sign, two exponent bits and a mantissa bit, with the magnitudes 0, 0.5, 1, 1.5,
// 2, 3, 4, 6 (e2m1; OCP Microscaling Formats, 2023).
struct E2M1Codes {
  static constexpr uint16_t kValues[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                           0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  static f32xw floats(const u32xw& codes) {
#if defined(__AVX2__)
    static constexpr float magnitudes[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const auto table = load_bits<f32xw>(magnitudes);
#if defined(__AVX512F__)
    const auto result = bitcast<u32xw>(_mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, (__m512)table));
#else
    const auto result = bitcast<u32xw>(_mm256_permutevar8x32_ps((__m256)table, (__m256i)codes));
#endif
    return bitcast<f32xw>(result | ((codes & 8) << 28));
#else
    const i32xw code = bitcast<i32xw>(codes & 7);  // twice the value: codes above 4 are in steps of two, above 6 of four
    const i32xw twice = code + max(code - 4, i32xw{}) + 2 * max(code - 6, i32xw{});
    return bitcast<f32xw>(bitcast<u32xw>(convert<f32xw>(twice) * 0.5f) | ((codes & 8) << 28));
#endif
  }
};

// Eight 4-bit weights, multiplied as floats. Bits 4n to 4n + 3 of the two 16-bit halves are the two weights of pair n.
template <class Numbers>
struct FourBitAsBf16Step : Bf16Inputs {
  static constexpr int kInputs = 8, kBytes = 4 * kWidth;
  struct Widened {
    u32xw parts[4];  // pairs, in the layout of Bf16Step
  };
#if defined(__AVX512BF16__)
  static Widened widened(const char* at) {
    const u32xw all = load_bits<u32xw>(at);
    Widened result;
    PENSTOCK_FOR (int n = 0; n < 4; n++)
      result.parts[n] = bitcast<u32xw>(
          _mm512_permutexvar_epi16((__m512i)((all >> (4 * n)) & 0x000f000f), (__m512i)load_bits<u32xw>(Numbers::kValues)));
    return result;
  }
  template <int part = 0>
  static Widened weights(const char* at) {
    return widened(at);
  }
  template <int part = 0>
  static Widened input(const bf16* x) {
    Widened result;
    PENSTOCK_FOR (int n = 0; n < 4; n++) result.parts[n] = Bf16Step::input(x + 2 * n);
    return result;
  }
  static f32xw add(f32xw sum, const Widened& x, const Widened& w) {
    PENSTOCK_FOR (int n = 0; n < 4; n++) sum = Bf16Step::add(sum, x.parts[n], w.parts[n]);
    return sum;
  }
#else
  static constexpr int kParts = 8;
  template <int part = 0>
  static f32xw weights(const char* at) {
    return Numbers::floats(load_bits<u32xw>(at) >> (part / 2 * 4 + part % 2 * 16));
  }
  static Widened widened(const char* at) {
    return Widened{pack_bf16_pair(weights<0>(at), weights<1>(at)), pack_bf16_pair(weights<2>(at), weights<3>(at)),
                   pack_bf16_pair(weights<4>(at), weights<5>(at)), pack_bf16_pair(weights<6>(at), weights<7>(at))};
  }
#endif
};
using Int4AsBf16Step = FourBitAsBf16Step<Int4Codes>;
using E2M1AsBf16Step = FourBitAsBf16Step<E2M1Codes>;

}  // namespace PENSTOCK_ISA
}  // namespace penstock
