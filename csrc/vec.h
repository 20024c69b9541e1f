// Vectors of 16 lanes, independent of the instruction set (lanes.h).
// Multiplications and additions are fused only if the code calls fma, so that all builds round in the same places.

#pragma once

#include "lanes.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr float kNegInf = -__builtin_inff();

struct bf16 {
  uint16_t bits;
};

// Lane indices 0 to 15.
template <class V = i32x16>
inline V iota() {
  static constexpr int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_bits<V>(numbers);
}

// One value in all lanes. The compiler removes the subtraction of zero, which never changes a value, unlike an addition.
template <class V = f32x16>
inline V broadcast(float value) {
  return value - V{};
}

// a * b + c, fused if the instruction set has FMA.
template <class V>
inline V fma(const V& a, const V& b, const V& c) {
  if constexpr (IsVectorPair<V>::value) {
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
inline auto to_float(const V& v) {
  return convert<Vector<float, kLanesOf<V>>>(v);
}

// Returns b in lanes where a or b is NaN.
template <class V>
inline V max(const V& a, const V& b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && std::is_same_v<Element<V>, float>)
    return (V)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#endif
  return select(a > b, a, b);
}

inline f32x16 load(const float* from) { return load_bits<f32x16>(from); }
template <class V>
inline auto widen(const V& v) {
  constexpr int n = kLanesOf<V>;
  return bitcast<Vector<float, n>>(convert<Vector<uint32_t, n>>(v) << 16);
}
inline f32x16 load(const bf16* from) { return widen(load_bits<u16x16>(from)); }

// Converts float16 bits, which must be zero or normal.
template <class V>
inline auto widen_half(const V& v) {
#if defined(__AVX512F__)
  if constexpr (kLanesOf<V> == 16) return bitcast<f32x16>(_mm512_maskz_cvtph_ps(0xffff, bitcast<__m256i>(v)));
#endif
  using Bits = Vector<uint32_t, kLanesOf<V>>;
  using Floats = Vector<float, kLanesOf<V>>;
  const Bits bits = convert<Bits>(v);
  // The factor corrects the exponent bias, which is larger by 112 in float32.
  const Bits magnitude = bitcast<Bits>(bitcast<Floats>((bits & 0x7fff) << 13) * 0x1p112f);
  return bitcast<Floats>(magnitude | (bits & 0x8000) << 16);
}
inline float widen_half(uint16_t bits) {
  return bitcast<float>(bitcast<uint32_t>(bitcast<float>(uint32_t(bits & 0x7fff) << 13) * 0x1p112f) | uint32_t(bits & 0x8000)
                                                                                                          << 16);
}

// Rounds to nearest, half to even.
inline u16x16 round_to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 bits = bitcast<u32x16>(v);
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  return convert<u16x16>(select((bits & 0x7fffffff) > 0x7f800000, quiet, rounded));
#endif
}

inline void store(float* to, f32x16 v) { store_bits(to, v); }
inline void store(bf16* to, f32x16 v) { store_bits(to, round_to_bf16(v)); }

inline float widen(float v) { return v; }
inline float widen(bf16 v) { return bitcast<float>(uint32_t(v.bits) << 16); }
inline void narrow(float* to, float v) { *to = v; }
inline void narrow(bf16* to, float v) {
  u16x16 rounded = round_to_bf16(broadcast(v));
  to->bits = rounded[0];
}

// Loads and stores of 1 to 15 elements: the other lanes are zero after a load, and are not written by a store.
template <class T>
__attribute__((noinline)) f32x16 load_tail(const T* from, int64_t count) {
  T part[16] = {};
  memcpy(part, from, count * sizeof(T));
  return load(part);
}
template <class T>
__attribute__((noinline)) void store_tail(T* to, f32x16 v, int64_t count) {
  T part[16];
  store(part, v);
  memcpy(to, part, count * sizeof(T));
}

// Loads and stores of the first 16 of `count` elements. `count` may also be less than 16, or not positive (no elements).
template <class T>
inline f32x16 load_n(const T* from, int64_t count) {
  return count >= 16 ? load(from) : count > 0 ? load_tail(from, count) : f32x16{};
}
template <class T>
inline void store_n(T* to, f32x16 v, int64_t count) {
  if (count >= 16)
    store(to, v);
  else if (count > 0)
    store_tail(to, v, count);
}

// Stores consecutive vectors; G is 1 or even.
template <int G>
inline void store_vectors(float* to, const f32x16 (&v)[G]) {
  for (int g = 0; g < G; g++) store(to + g * 16, v[g]);
}
template <int G>
inline void store_vectors(bf16* to, const f32x16 (&v)[G]) {
#if defined(__AVX512BF16__)
  for (int g = 0; g < G; g += 2) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)v[g + 1], (__m512)v[g]);
    memcpy(to + g * 16, &both, sizeof(both));
  }
#else
  for (int g = 0; g < G; g++) store(to + g * 16, v[g]);
#endif
}

// Reduces the lanes, always in the same tree: halves, quarters, and so on.
template <class V, class F>
inline Element<V> reduce(const V& v, F&& f) {
  if constexpr (kLanesOf<V> == 4) {
    return f(f(v[0], v[2]), f(v[1], v[3]));
  } else {
    const auto parts = halves(v);
    return reduce(f(parts.low, parts.high), f);
  }
}
template <class V>
inline Element<V> sum(const V& v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}
inline float reduce_max(f32x16 v) {
  return reduce(v, [](auto a, auto b) {
    if constexpr (std::is_same_v<decltype(a), float>)
      return a > b ? a : b;
    else
      return select(a > b, a, b);
  });
}

// True if a lane has at least this value. No lane may be NaN.
inline bool any_at_least(f32x16 v, float lower_bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)broadcast(lower_bound), _CMP_GE_OQ);
#else
  return reduce_max(v) >= lower_bound;
#endif
}

// 2^x for x <= 100, with a relative error of 1e-7, or 1e-4 if `coarse`. The result is zero for x below -150 (below -126
// without AVX-512), and for NaN.
template <bool coarse>
inline f32x16 exp2(f32x16 x) {
  // adding `magic` rounds to an integer
  const f32x16 clamped = max(x, broadcast(-200.0f)), magic = broadcast(12582912.0f);
  const f32x16 n = (clamped + magic) - magic, r = clamped - n;
  f32x16 p = broadcast(coarse ? 9.6181291076e-3f : 1.5403530393e-4f);  // coefficients log(2)^k / k!
  if (!coarse) {
    p = fma(p, r, broadcast(1.3333558146e-3f));
    p = fma(p, r, broadcast(9.6181291076e-3f));
  }
  p = fma(p, r, broadcast(5.5504108665e-2f));
  p = fma(p, r, broadcast(2.4022650696e-1f));
  p = fma(p, r, broadcast(6.9314718056e-1f));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const i32x16 exponent = (convert<i32x16>(n) + 127) << 23;
  return select(n < -126.0f, broadcast(0.0f), p * bitcast<f32x16>(exponent));
#endif
}

// e^x within 2 ulp; x is clamped to [-87.3, 87.3].
inline f32x16 exp(f32x16 x) {
  // adding `magic` rounds to an integer
  const f32x16 limit = broadcast(87.3f), magic = broadcast(12582912.0f);
  const f32x16 low = max(x, -limit), clamped = select(low < limit, low, limit);
  const f32x16 n = fma(clamped, broadcast(1.44269504088896341f), magic) - magic;
  f32x16 r = fma(n, broadcast(-0.693359375f), clamped);  // subtracts n * log(2), with log(2) in two parts
  r = fma(n, broadcast(2.12194440e-4f), r);
  f32x16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  return p * bitcast<f32x16>((convert<i32x16>(n) + 127) << 23);
#endif
}

// 1 / x within 2 ulp, for x in [1, 2^126].
inline f32x16 inverse(f32x16 x) {
#if defined(__AVX512F__)
  const f32x16 about = (f32x16)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);  // approximation, refined by a Newton step
  return about * fma(-x, about, broadcast(2.0f));
#else
  return 1.0f / x;
#endif
}

// tanh(x) with an error of at most 1e-7.
inline f32x16 tanh(f32x16 x) {
  const f32x16 square = x * x;
  f32x16 p = broadcast(-5.70498872745e-3f);  // polynomial for small x (Cephes; Moshier, 1984)
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const f32x16 small = fma(p * square, x, x);
  const f32x16 positive = 1.0f - 2.0f * inverse(exp(max(x, -x) * 2.0f) + 1.0f);
  return select(square < 0.390625f, small, select(x < 0.0f, -positive, positive));
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
