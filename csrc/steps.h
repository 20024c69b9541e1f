// Steps of integers: what a vector of weights holds, and how inputs are multiplied with it.

#pragma once

#include "tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Of four bytes in each lane the first and the third as 16 bits each, and the second and the fourth.
template <bool is_signed, class V>
inline V even_bytes(const V& v) {
  if constexpr (!is_signed) return v & 0x00ff00ff;
  using Words = Vector<int16_t, sizeof(V) / 2>;
  return as<V>((as<Words>(v) << 8) >> 8);
}
template <bool is_signed, class V>
inline V odd_bytes(const V& v) {
  using Words = Vector<std::conditional_t<is_signed, int16_t, uint16_t>, sizeof(V) / 2>;
  return as<V>(as<Words>(v) >> 8);
}

#if defined(__AVX2__)
// sum + v, whose lanes have so many bits, now and in a register: GCC would put additions off until it runs out of these.
template <int bits>
PENSTOCK_INLINE inline __m256i add_here(__m256i sum, __m256i v) {
  if constexpr (bits == 16)
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(v));
  else
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(v));
  return sum;
}
#endif

// sum + the product of two numbers of 16 bits in each lane, and that of the other two.
template <class V>
inline V add_pairs(const V& sum, const Vector<uint32_t, kLanesOf<V>>& x, const Vector<uint32_t, kLanesOf<V>>& w) {
  if constexpr (IsTwo<V>::value) {
    return {add_pairs(sum.low, x.low, w.low), add_pairs(sum.high, x.high, w.high)};
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
    if constexpr (sizeof(V) == 32) return (V)add_here<32>((__m256i)sum, _mm256_madd_epi16((__m256i)w, (__m256i)x));
#endif
#if defined(__SSE2__)
    if constexpr (sizeof(V) == 16) return sum + (V)_mm_madd_epi16((__m128i)w, (__m128i)x);
#endif
    const auto a = as<V>(w), b = as<V>(x);
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
  }
}

// Rows of bytes as 16 bits each, in the order in which `even_bytes` and `odd_bytes` give weights.
template <class X>
inline void prepare_words(const X* x, int64_t count, int16_t* out) {
  using Words = Vector<uint32_t, 4>;
  for (int64_t i = 0; i < count; i += 16) {
    X padded[16] = {};
    if (count - i < 16) memcpy(padded, x + i, count - i);
    const auto four = load_bits<Words>(count - i < 16 ? padded : x + i);
    const auto even = even_bytes<std::is_signed_v<X>>(four), odd = odd_bytes<std::is_signed_v<X>>(four);
    const Words both[2] = {__builtin_shufflevector(even, odd, 0, 4, 1, 5), __builtin_shufflevector(even, odd, 2, 6, 3, 7)};
    memcpy(out + i, both, (count - i < 16 ? count - i : 16) * sizeof(int16_t));
  }
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define PENSTOCK_QUADS  // four products of bytes are added at once
inline i32xw add_quads(const i32xw& sum, const u32xw& bytes, const u32xw& signed_bytes) {
#if defined(__AVX512VNNI__)
  return (i32xw)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)signed_bytes);
#else
  return (i32xw)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes, (__m256i)signed_bytes);
#endif
}
#endif

// Four inputs of 8 bits: one side signed, the other one not. Sums of integers are exact, so that every instruction set gives
// the same.
template <class T>
struct ByteStep {
  using X = T;
  using Sum = i32xw;
  static constexpr int kInputs = 4, kBytes = 4 * kWidth;
  static constexpr bool kSigned = std::is_signed_v<T>;  // inputs; weights are what these are not
#if defined(PENSTOCK_QUADS)
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
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) {
    return kSigned ? add_quads(sum, w, x) : add_quads(sum, x, w);
  }
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
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) { return add_pairs(sum, x, w); }
  static void prepare(const T* x, int64_t count, int16_t* out) { prepare_words(x, count, out); }
#endif
};
using QuadStep = ByteStep<int8_t>;     // weights with 128 added
using WeightStep = ByteStep<uint8_t>;  // of attention's values

// Eight inputs of 4 bits: a byte's low half is one of the first four, its high half one of the others.
struct OctetStep {
  using X = int8_t;
  using Sum = i32xw;
  static constexpr int kInputs = 8, kBytes = 4 * kWidth;
  struct Wide {
    u32xw of[2];  // four inputs each, as a QuadStep has them
  };
  static Wide wide(const char* at) {
    const u32xw both = load_bits<u32xw>(at);
    return {{both & 0x0f0f0f0f, (both >> 4) & 0x0f0f0f0f}};
  }
#if defined(__AVX512VNNI__)
  using In = int8_t;
  static constexpr int kParts = 1;
  template <int part = 0>
  static Wide weights(const char* at) {
    return wide(at);
  }
  template <int part = 0>
  static Wide input(const int8_t* x) {
    return {{QuadStep::input(x), QuadStep::input(x + 4)}};
  }
  static i32xw add(const i32xw& sum, const Wide& x, const Wide& w) {
    return QuadStep::add(QuadStep::add(sum, x.of[0], w.of[0]), x.of[1], w.of[1]);
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
#if defined(PENSTOCK_QUADS)
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) { return QuadStep::add(sum, x, w); }
#else
  // Two products of at most 15 * 127 are added in 16 bits, and eight such sums hold at most 30,480.
  using Words = Vector<int16_t, 2 * kWidth>;
  static constexpr int kSteps = 4;
  static Words add(const Words& words, const u32xw& x, const u32xw& w) {
#if defined(__AVX512BW__)
    return words + (Words)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
#else
    return (Words)add_here<16>((__m256i)words, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#endif
  }
  static i32xw total(const Words& words) { return add_pairs(i32xw{}, u32xw{} + 0x00010001u, as<u32xw>(words)); }
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
  static i32xw add(const i32xw& sum, const u32xw& x, const u32xw& w) { return add_pairs(sum, x, w); }
  static void prepare(const int8_t* x, int64_t count, int16_t* out) { prepare_words(x, count, out); }
#endif
};

// Two lanes of floats as bfloat16 side by side, which holds them exactly.
inline u32xw side_by_side(const f32xw& first, const f32xw& second) {
  return (as<u32xw>(first) >> 16) | (as<u32xw>(second) & 0xffff0000);
}

// Two inputs of 8 bits, signed, multiplied as floats.
struct WidePairStep : BrainInputs {
  static constexpr int kInputs = 2, kBytes = 2 * kWidth;
  struct Wide {
    u32xw of[1];  // as a PairStep has them
  };
  template <int part>
  static f32xw floats(const char* at) {
    const auto both = convert<i32xw>(load_bits<Vector<int16_t, kWidth>>(at));
    return convert<f32xw>(part ? both >> 8 : (both << 24) >> 24);
  }
  static Wide wide(const char* at) { return {{side_by_side(floats<0>(at), floats<1>(at))}}; }
  template <int part = 0>
  static auto weights(const char* at) {
#if defined(__AVX512BF16__)
    return wide(at).of[0];
#else
    return floats<part>(at);
#endif
  }
};

// What four bits say: an integer and 8 more.
struct Nibbles {
  // In bfloat16.
  static constexpr uint16_t kValues[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                           0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  static f32xw floats(const u32xw& codes) { return convert<f32xw>(as<i32xw>(codes & 15) - 8); }
};

// Or a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (e2m1; OCP Microscaling Formats, 2023).
struct TinyFloats {
  static constexpr uint16_t kValues[32] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                           0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  static f32xw floats(const u32xw& codes) {
#if defined(__AVX2__)
    static constexpr float magnitudes[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const auto table = load_bits<f32xw>(magnitudes);
#if defined(__AVX512F__)
    const auto found = as<u32xw>(_mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, (__m512)table));
#else
    const auto found = as<u32xw>(_mm256_permutevar8x32_ps((__m256)table, (__m256i)codes));
#endif
    return as<f32xw>(found | ((codes & 8) << 28));
#else
    const i32xw code = as<i32xw>(codes & 7);  // twice the number: above 4 steps are of two, above 6 of four
    const i32xw twice = code + max(code - 4, i32xw{}) + 2 * max(code - 6, i32xw{});
    return as<f32xw>(as<u32xw>(convert<f32xw>(twice) * 0.5f) | ((codes & 8) << 28));
#endif
  }
};

// Eight inputs of 4 bits, multiplied as floats: the n-th four bits of 16 bits are an input of the n-th pair.
template <class Numbers>
struct WideOctets : BrainInputs {
  static constexpr int kInputs = 8, kBytes = 4 * kWidth;
  struct Wide {
    u32xw of[4];  // pairs, as a PairStep has them
  };
#if defined(__AVX512BF16__)
  static Wide wide(const char* at) {
    const u32xw all = load_bits<u32xw>(at);
    Wide found;
    PENSTOCK_FOR (int n = 0; n < 4; n++)
      found.of[n] = as<u32xw>(
          _mm512_permutexvar_epi16((__m512i)((all >> (4 * n)) & 0x000f000f), (__m512i)load_bits<u32xw>(Numbers::kValues)));
    return found;
  }
  template <int part = 0>
  static Wide weights(const char* at) {
    return wide(at);
  }
  template <int part = 0>
  static Wide input(const bf16* x) {
    Wide found;
    PENSTOCK_FOR (int n = 0; n < 4; n++) found.of[n] = PairStep::input(x + 2 * n);
    return found;
  }
  static f32xw add(f32xw sum, const Wide& x, const Wide& w) {
    PENSTOCK_FOR (int n = 0; n < 4; n++) sum = PairStep::add(sum, x.of[n], w.of[n]);
    return sum;
  }
#else
  static constexpr int kParts = 8;
  template <int part = 0>
  static f32xw weights(const char* at) {
    return Numbers::floats(load_bits<u32xw>(at) >> (part / 2 * 4 + part % 2 * 16));
  }
  static Wide wide(const char* at) {
    return Wide{side_by_side(weights<0>(at), weights<1>(at)), side_by_side(weights<2>(at), weights<3>(at)),
                side_by_side(weights<4>(at), weights<5>(at)), side_by_side(weights<6>(at), weights<7>(at))};
  }
#endif
};
using WideOctetStep = WideOctets<Nibbles>;
using TinyOctetStep = WideOctets<TinyFloats>;

}  // namespace PENSTOCK_ISA
}  // namespace penstock
