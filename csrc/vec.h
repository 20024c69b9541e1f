// Sixteen lanes, written once for every instruction set: the compiler splits them where registers are narrower.
// Products are fused with sums only where it is written, so that each set always rounds in the same places.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock {
namespace PENSTOCK_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};

template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V, class T>
inline V load_bits(const T* from) {
  V v;
  memcpy(&v, from, sizeof(v));
  return v;
}

// Four bytes in every lane.
inline u32x16 all_of_four(const void* from) {
  uint32_t four;
  memcpy(&four, from, sizeof(four));
  return u32x16{} + four;
}

constexpr i32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline f32x16 all(float value) { return f32x16{} + value; }

// a * b + c, fused where the set can.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  struct Halves {
    __m256 low, high;
  };
  Halves x = as<Halves>(a), y = as<Halves>(b), z = as<Halves>(c);
  return as<f32x16>(Halves{_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)});
#else
  return a * b + c;
#endif
}

inline f32x16 as_float(f32x16 v) { return v; }
inline f32x16 as_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

// b where one is no number.
inline f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline f32x16 load(const float* from) { return load_bits<f32x16>(from); }
inline f32x16 widen(u16x16 v) { return as<f32x16>(__builtin_convertvector(v, u32x16) << 16); }
inline f32x16 load(const bf16* from) { return widen(load_bits<u16x16>(from)); }

// Rounds to nearest, to even in the middle.
inline u16x16 round_to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 bits = as<u32x16>(v);
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  u32x16 is_nan = as<u32x16>((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), u16x16);
#endif
}

inline void store(float* to, f32x16 v) { memcpy(to, &v, sizeof(v)); }
inline void store(bf16* to, f32x16 v) {
  u16x16 rounded = round_to_bf16(v);
  memcpy(to, &rounded, sizeof(rounded));
}

inline float widen(float v) { return v; }
inline float widen(bf16 v) { return as<float>(uint32_t(v.bits) << 16); }
inline void narrow(float* to, float v) { *to = v; }
inline void narrow(bf16* to, float v) {
  u16x16 rounded = round_to_bf16(all(v));
  to->bits = rounded[0];
}

// Up to 16 elements; what lies beyond is zero when read and left alone when written.
template <class T>
__attribute__((noinline)) f32x16 load_part(const T* from, int64_t count) {
  T part[16] = {};
  memcpy(part, from, count * sizeof(T));
  return load(part);
}
template <class T>
__attribute__((noinline)) void store_part(T* to, f32x16 v, int64_t count) {
  T part[16];
  store(part, v);
  memcpy(to, part, count * sizeof(T));
}

// The same, be it 16, fewer or none.
template <class T>
inline f32x16 load_some(const T* from, int64_t count) {
  return count >= 16 ? load(from) : count > 0 ? load_part(from, count) : f32x16{};
}
template <class T>
inline void store_some(T* to, f32x16 v, int64_t count) {
  if (count >= 16)
    store(to, v);
  else if (count > 0)
    store_part(to, v, count);
}

// Vectors one after another, an even number of them unless it is one.
template <int G>
inline void store_all(float* to, const f32x16 (&v)[G]) {
  for (int g = 0; g < G; g++) store(to + g * 16, v[g]);
}
template <int G>
inline void store_all(bf16* to, const f32x16 (&v)[G]) {
#if defined(__AVX512BF16__)
  for (int g = 0; g < G; g += 2) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)v[g + 1], (__m512)v[g]);
    memcpy(to + g * 16, &both, sizeof(both));
  }
#else
  for (int g = 0; g < G; g++) store(to + g * 16, v[g]);
#endif
}

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

// Over the lanes, always in the same tree: the halves, their halves, and so on.
template <class F>
inline float fold(f32x16 v, F&& f) {
  struct Sixteen {
    f32x8 low, high;
  };
  struct Eight {
    f32x4 low, high;
  };
  const Sixteen a = as<Sixteen>(v);
  const Eight b = as<Eight>(f(a.low, a.high));
  const f32x4 c = f(b.low, b.high);
  return f(f(c[0], c[2]), f(c[1], c[3]));
}
inline float sum(f32x16 v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}
inline int32_t sum(i32x16 v) {
  typedef int32_t i32x8 __attribute__((vector_size(32)));
  typedef int32_t i32x4 __attribute__((vector_size(16)));
  struct Sixteen {
    i32x8 low, high;
  };
  struct Eight {
    i32x4 low, high;
  };
  const Sixteen a = as<Sixteen>(v);
  const Eight b = as<Eight>(a.low + a.high);
  const i32x4 c = b.low + b.high;
  return c[0] + c[1] + c[2] + c[3];
}
inline float largest(f32x16 v) {
  return fold(v, [](auto a, auto b) { return a > b ? a : b; });
}

// 2^x for x of at most 100, to about 1 in 10^7, or to 1 in 10^4 where `coarse`; zero below -150, where there is no AVX-512
// below -126, and where x is no number.
template <bool coarse>
inline f32x16 exp2(f32x16 x) {
  const f32x16 clamped = max(x, all(-200.0f)), magic = all(12582912.0f);  // adding it rounds to an integer
  const f32x16 n = (clamped + magic) - magic, r = clamped - n;
  f32x16 p = all(coarse ? 9.6181291076e-3f : 1.5403530393e-4f);  // powers of log 2 over factorials
  if (!coarse) {
    p = fma(p, r, all(1.3333558146e-3f));
    p = fma(p, r, all(9.6181291076e-3f));
  }
  p = fma(p, r, all(5.5504108665e-2f));
  p = fma(p, r, all(2.4022650696e-1f));
  p = fma(p, r, all(6.9314718056e-1f));
  p = fma(p, r, all(1.0f));
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
  return n < -126.0f ? all(0.0f) : p * as<f32x16>(exponent);
#endif
}

// e^x within two units in the last place; x is taken for -87.3 where it is less and for 87.3 where it is more.
inline f32x16 exp(f32x16 x) {
  const f32x16 most = all(87.3f), magic = all(12582912.0f);  // adding it rounds to an integer
  const f32x16 low = max(x, -most), clamped = low < most ? low : most;
  const f32x16 n = fma(clamped, all(1.44269504088896341f), magic) - magic;
  f32x16 r = fma(n, all(-0.693359375f), clamped);  // log 2 in two parts
  r = fma(n, all(2.12194440e-4f), r);
  f32x16 p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  return p * as<f32x16>((__builtin_convertvector(n, i32x16) + 127) << 23);
#endif
}

// 1 / x within two units in the last place, for x from 1 to 2^126.
inline f32x16 inverse(f32x16 x) {
#if defined(__AVX512F__)
  const f32x16 about = (f32x16)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);  // and a step of Newton's
  return about * fma(-x, about, all(2.0f));
#else
  return 1.0f / x;
#endif
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
