// Quantization to 8-bit integers: vectors are scaled so that their largest magnitude is 127.

#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Vectors up to this magnitude are quantized to zeros, since their inverse scale would overflow.
constexpr float kMinMagnitude = 1e-30f;

// Rounds to nearest, half to even. Magnitudes must be far below 2^22.
inline i32x16 round_to_int(f32x16 v) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#else
  const f32x16 magic = broadcast(12582912.0f);
  return bitcast<i32x16>(v + magic) - bitcast<i32x16>(magic);
#endif
}

// Writes 64 integers as bytes. Each must be in [-128, 127].
inline void store_bytes(int8_t* to, const i32x16 (&q)[4]) {
#if defined(__AVX512BW__)
  const __m512i low = _mm512_packs_epi32((__m512i)q[0], (__m512i)q[1]);
  const __m512i high = _mm512_packs_epi32((__m512i)q[2], (__m512i)q[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_packs_epi16(low, high));
  memcpy(to, &bytes, sizeof(bytes));
#else
  for (int g = 0; g < 4; g++) {
    const i8x16 bytes = convert<i8x16>(q[g]);
    memcpy(to + g * 16, &bytes, sizeof(bytes));
  }
#endif
}

// Rounds and clamps to [-8, 7].
inline i32x16 round_to_int4(f32x16 v) {
  const i32x16 q = round_to_int(v), low = select(q < -8, i32x16{} - 8, q);
  return select(low > 7, i32x16{} + 7, low);
}

// Returns the largest magnitude; NaN if a value is NaN or infinite.
template <class T>
inline float max_magnitude(const T* x, int64_t count) {
  constexpr bool wide = sizeof(T) == 4;
  using Bits = std::conditional_t<wide, u32x16, u16x16>;  // magnitudes have the same order as their bits
  auto maximum_of = [&](const Bits& maximum, int64_t i) {
    const Bits v = load_bits<Bits>(x + i) & (wide ? 0x7fffffff : 0x7fff);
    return select(v > maximum, v, maximum);
  };
  Bits maximum = {}, partial[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int g = 0; g < 4; g++) partial[g] = maximum_of(partial[g], i + g * 16);
  for (; i + 16 <= count; i += 16) maximum = maximum_of(maximum, i);
  for (const Bits& each : partial) maximum = select(each > maximum, each, maximum);
  f32x16 lanes, rest = load_n(x + i, count - i);
  if constexpr (wide)
    lanes = bitcast<f32x16>(maximum);
  else
    lanes = widen(maximum);
  rest = max(rest, -rest);
  return reduce_max(max(lanes, rest)) + sum(lanes * 0.0f + rest * 0.0f);
}

// Rounds x * inverse to integers. Returns their sum.
template <class T>
inline int32_t quantize_run(const T* x, int64_t count, float inverse, int8_t* out) {
  i32x16 totals[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    i32x16 q[4];
    for (int g = 0; g < 4; g++) {
      q[g] = round_to_int(load(x + i + g * 16) * inverse);
      totals[g] += q[g];
    }
    store_bytes(out + i, q);
  }
  i32x16 total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
  for (; i + 16 <= count; i += 16) {
    const i32x16 q = round_to_int(load(x + i) * inverse);
    store_bits(out + i, convert<i8x16>(q));
    total += q;
  }
  if (i < count) {
    const i32x16 q = round_to_int(load_tail(x + i, count - i) * inverse);
    const i8x16 narrow = convert<i8x16>(q);
    memcpy(out + i, &narrow, count - i);
    total += q;
  }
  return sum(total);
}

// Returns the sum of the lanes of each of four vectors.
inline i32x4 lane_sums(const i32x16 (&q)[4]) {
#if defined(__AVX512F__)
  const auto pairs = [](__m512i a, __m512i b) {
    return (i32x16)_mm512_unpacklo_epi32(a, b) + (i32x16)_mm512_unpackhi_epi32(a, b);
  };
  const __m512i first = (__m512i)pairs((__m512i)q[0], (__m512i)q[1]), second = (__m512i)pairs((__m512i)q[2], (__m512i)q[3]);
  const i32x16 four = (i32x16)_mm512_unpacklo_epi64(first, second) + (i32x16)_mm512_unpackhi_epi64(first, second);
  const i32x8 half = load_bits<i32x8>(&four) + load_bits<i32x8>((const char*)&four + 32);
  return load_bits<i32x4>(&half) + load_bits<i32x4>((const char*)&half + 16);
#else
  return i32x4{sum(q[0]), sum(q[1]), sum(q[2]), sum(q[3])};
#endif
}

// Quantizes a multiple of 64 inputs like `quantize_run`, and writes the sum of each group of `group` (16 or 32) inputs.
template <class T>
inline void quantize_groups(const T* x, int64_t count, float inverse, int64_t group, int8_t* out, int32_t* sums) {
  for (int64_t i = 0; i < count; i += 64) {
    i32x16 q[4];
    for (int g = 0; g < 4; g++) q[g] = round_to_int(load(x + i + g * 16) * inverse);
    store_bytes(out + i, q);
    const i32x4 four = lane_sums(q);
    if (group == 16)
      store_bits(sums + i / 16, four);
    else
      sums[i / 32] = four[0] + four[1], sums[i / 32 + 1] = four[2] + four[3];
  }
}

// Scale and sum of a quantized vector. The scale is NaN if an element is NaN or infinite.
struct Quantization {
  float scale;
  int32_t sum;
};

template <class T>
inline Quantization quantize_vector(const T* x, int64_t count, int8_t* out) {
  const float maximum = max_magnitude(x, count), scale = maximum / 127.0f;
  if (maximum > kMinMagnitude) return {scale, quantize_run(x, count, 127.0f / maximum, out)};
  memset(out, 0, count);
  return {scale, 0};
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
