// Rounding to integers of 8 bits: a row is divided by its largest magnitude over 127.

#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The largest magnitude of what is as good as zero, for whose inverse there is no float.
constexpr float kNothing = 1e-30f;

// Rounds to nearest, to even in the middle; for what is far below 2^22.
inline i32x16 to_integers(f32x16 v) {
  const f32x16 magic = all(12582912.0f);
  return as<i32x16>(v + magic) - as<i32x16>(magic);
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
  Bits most = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const Bits v = load_bits<Bits>(x + i) & (wide ? 0x7fffffff : 0x7fff);
    most = choose(v > most, v, most);
  }
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
  i32x16 total = {};
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t some = count - i < 16 ? count - i : 16;
    const i32x16 q = to_integers((some < 16 ? load_part(x + i, some) : load(x + i)) * inverse);
    const i8x16 narrow = convert<i8x16>(q);
    memcpy(out + i, &narrow, some);
    total += q;
  }
  return sum(total);
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
