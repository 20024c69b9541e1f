// Sixteen lanes, written once for every instruction set (lanes.h).
// Products are fused with sums only where it is written, so that each set always rounds in the same places.

#pragma once

#include "lanes.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr float kNever = -__builtin_inff();

struct bf16 {
  uint16_t bits;
};

// The number of each lane.
template <class V = i32x16>
inline V lanes() {
  static constexpr int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_bits<V>(numbers);
}

// One value in all lanes; taking zero away, unlike adding it, changes no value, so that the compiler leaves it out.
template <class V = f32x16>
inline V all(float value) {
  return value - V{};
}

// a * b + c, fused where the set can.
template <class V>
inline V fma(const V& a, const V& b, const V& c) {
  if constexpr (IsTwo<V>::value) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
    if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    if constexpr (sizeof(V) == 16) return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
    return a * b + c;
  }
}

template <class V>
inline auto as_float(const V& v) {
  return convert<Vector<float, kLanesOf<V>>>(v);
}

// b where one is no number.
template <class V>
inline V max(const V& a, const V& b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && std::is_same_v<Element<V>, float>)
    return (V)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#endif
  return choose(a > b, a, b);
}

inline f32x16 load(const float* from) { return load_bits<f32x16>(from); }
template <class V>
inline auto widen(const V& v) {
  constexpr int n = kLanesOf<V>;
  return as<Vector<float, n>>(convert<Vector<uint32_t, n>>(v) << 16);
}
inline f32x16 load(const bf16* from) { return widen(load_bits<u16x16>(from)); }

// Bits of float16 that are zero or normal.
template <class V>
inline auto widen_half(const V& v) {
#if defined(__AVX512F__)
  if constexpr (kLanesOf<V> == 16) return as<f32x16>(_mm512_maskz_cvtph_ps(0xffff, as<__m256i>(v)));
#endif
  using Bits = Vector<uint32_t, kLanesOf<V>>;
  using Floats = Vector<float, kLanesOf<V>>;
  const Bits bits = convert<Bits>(v);
  const Bits magnitude = as<Bits>(as<Floats>((bits & 0x7fff) << 13) * 0x1p112f);  // whose exponent is 112 more
  return as<Floats>(magnitude | (bits & 0x8000) << 16);
}
inline float widen_half(uint16_t bits) {
  return as<float>(as<uint32_t>(as<float>(uint32_t(bits & 0x7fff) << 13) * 0x1p112f) | uint32_t(bits & 0x8000) << 16);
}

// Rounds to nearest, to even in the middle.
inline u16x16 round_to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 bits = as<u32x16>(v);
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  return convert<u16x16>(choose((bits & 0x7fffffff) > 0x7f800000, quiet, rounded));
#endif
}

inline void store(float* to, f32x16 v) { store_bits(to, v); }
inline void store(bf16* to, f32x16 v) { store_bits(to, round_to_bf16(v)); }

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

// Over the lanes, always in the same tree: the halves, their halves, and so on.
template <class V, class F>
inline Element<V> fold(const V& v, F&& f) {
  if constexpr (kLanesOf<V> == 4) {
    return f(f(v[0], v[2]), f(v[1], v[3]));
  } else {
    const auto parts = halves(v);
    return fold(f(parts.low, parts.high), f);
  }
}
template <class V>
inline Element<V> sum(const V& v) {
  return fold(v, [](auto a, auto b) { return a + b; });
}
inline float largest(f32x16 v) {
  return fold(v, [](auto a, auto b) {
    if constexpr (std::is_same_v<decltype(a), float>)
      return a > b ? a : b;
    else
      return choose(a > b, a, b);
  });
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
  const i32x16 exponent = (convert<i32x16>(n) + 127) << 23;
  return choose(n < -126.0f, all(0.0f), p * as<f32x16>(exponent));
#endif
}

// e^x within two units in the last place; x is taken for -87.3 where it is less and for 87.3 where it is more.
inline f32x16 exp(f32x16 x) {
  const f32x16 most = all(87.3f), magic = all(12582912.0f);  // adding it rounds to an integer
  const f32x16 low = max(x, -most), clamped = choose(low < most, low, most);
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
  return p * as<f32x16>((convert<i32x16>(n) + 127) << 23);
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

// tanh x to about 1 in 10^7.
inline f32x16 tanh(f32x16 x) {
  const f32x16 square = x * x;
  f32x16 p = all(-5.70498872745e-3f);  // for small x (Cephes, Moshier, 1984)
  p = fma(p, square, all(2.06390887954e-2f));
  p = fma(p, square, all(-5.37397155531e-2f));
  p = fma(p, square, all(1.33314422036e-1f));
  p = fma(p, square, all(-3.33332819422e-1f));
  const f32x16 small = fma(p * square, x, x);
  const f32x16 positive = 1.0f - 2.0f * inverse(exp(max(x, -x) * 2.0f) + 1.0f);
  return choose(square < 0.390625f, small, choose(x < 0.0f, -positive, positive));
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
