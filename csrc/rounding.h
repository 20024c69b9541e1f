// Rounding to integers of 8 bits: a row is divided by its largest magnitude over 127.

#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The largest magnitude of what is as good as zero, for whose inverse there is no float.
constexpr float kNothing = 1e-30f;

// Rounds to nearest, to even in the middle; for what is far below 2^22.
inline i32x16 to_integers(f32x16 v) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#else
  const f32x16 magic = all(12582912.0f);
  return as<i32x16>(v + magic) - as<i32x16>(magic);
#endif
}

// Writes 64 integers as bytes, which hold them.
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

// The same, within 4 bits.
inline i32x16 to_nibbles(f32x16 v) {
  const i32x16 q = to_integers(v), low = choose(q < -8, i32x16{} - 8, q);
  return choose(low > 7, i32x16{} + 7, low);
}

// The largest magnitude; NaN where something is none, or infinite.
template <class T>
inline float magnitude(const T* x, int64_t count) {
  constexpr bool wide = sizeof(T) == 4;
  using Bits = std::conditional_t<wide, u32x16, u16x16>;  // those of magnitudes are in their order
  auto more = [&](const Bits& most, int64_t i) {
    const Bits v = load_bits<Bits>(x + i) & (wide ? 0x7fffffff : 0x7fff);
    return choose(v > most, v, most);
  };
  Bits most = {}, parts[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int g = 0; g < 4; g++) parts[g] = more(parts[g], i + g * 16);
  for (; i + 16 <= count; i += 16) most = more(most, i);
  for (const Bits& part : parts) most = choose(part > most, part, most);
  f32x16 lanes, rest = load_some(x + i, count - i);
  if constexpr (wide)
    lanes = as<f32x16>(most);
  else
    lanes = widen(most);
  rest = max(rest, -rest);
  return largest(max(lanes, rest)) + sum(lanes * 0.0f + rest * 0.0f);
}

// x * inverse as integers; returns their sum.
template <class T>
inline int32_t round_run(const T* x, int64_t count, float inverse, int8_t* out) {
  i32x16 totals[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    i32x16 q[4];
    for (int g = 0; g < 4; g++) {
      q[g] = to_integers(load(x + i + g * 16) * inverse);
      totals[g] += q[g];
    }
    store_bytes(out + i, q);
  }
  i32x16 total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
  for (; i + 16 <= count; i += 16) {
    const i32x16 q = to_integers(load(x + i) * inverse);
    store_bits(out + i, convert<i8x16>(q));
    total += q;
  }
  if (i < count) {
    const i32x16 q = to_integers(load_part(x + i, count - i) * inverse);
    const i8x16 narrow = convert<i8x16>(q);
    memcpy(out + i, &narrow, count - i);
    total += q;
  }
  return sum(total);
}

// Sums of the lanes of four vectors.
inline i32x4 sums_of_lanes(const i32x16 (&q)[4]) {
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

// As `round_run`, of whole 64 inputs; writes the sum of each `group` inputs, 16 or 32.
template <class T>
inline void round_groups(const T* x, int64_t count, float inverse, int64_t group, int8_t* out, int32_t* sums) {
  for (int64_t i = 0; i < count; i += 64) {
    i32x16 q[4];
    for (int g = 0; g < 4; g++) q[g] = to_integers(load(x + i + g * 16) * inverse);
    store_bytes(out + i, q);
    const i32x4 four = sums_of_lanes(q);
    if (group == 16)
      store_bits(sums + i / 16, four);
    else
      sums[i / 32] = four[0] + four[1], sums[i / 32 + 1] = four[2] + four[3];
  }
}

// How a row was rounded. A scale that is no number says that something in it was none.
struct Rounding {
  float scale;
  int32_t sum;
};

template <class T>
inline Rounding round_row(const T* x, int64_t count, int8_t* out) {
  const float most = magnitude(x, count), scale = most / 127.0f;
  if (most > kNothing) return {scale, round_run(x, count, 127.0f / most, out)};
  memset(out, 0, count);
  return {scale, 0};
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
