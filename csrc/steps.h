// Steps of integers: what a vector of weights holds, and how inputs are multiplied with it.

#pragma once

#include "tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

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

// Four inputs of 8 bits, unsigned, by signed ones.
struct WeightStep {
  using X = uint8_t;
  using Sum = i32x16;
  static constexpr int kInputs = 4, kBytes = 64;
  static u32x16 weights(const char* at) { return load_bits<u32x16>(at); }
  static u32x16 last(const char* at) { return weights(at); }
#if defined(__AVX512VNNI__)
  static u32x16 input(const uint8_t* x) { return all_of_four(x); }
  static i32x16 add(i32x16 sum, u32x16 x, u32x16 w) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
  }
#else
  static QuadStep::Input input(const uint8_t* x) {
    auto pair = [](uint32_t low, uint32_t high) { return i32x16{} + int32_t(low | high << 16); };
    return {pair(x[0], x[2]), pair(x[1], x[3])};
  }
  static i32x16 add(i32x16 sum, const QuadStep::Input& x, u32x16 w) {
    typedef int16_t i16x32 __attribute__((vector_size(64)));
    const i16x32 odd = as<i16x32>(w) >> 8, even = (as<i16x32>(w) << 8) >> 8;
    return sum + QuadStep::pairs(as<u32x16>(even), x.even) + QuadStep::pairs(as<u32x16>(odd), x.odd);
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

}  // namespace PENSTOCK_ISA
}  // namespace penstock
