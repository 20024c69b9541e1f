// Walsh-Hadamard transforms of blocks of a row, which spread its largest values over the block (QuaRot, Ashkboos et al., 2024).
//
// A matrix whose rows were transformed, over the length of a block, gives the same products with a transformed row: H H is
// that length times the identity. Butterflies are added from neighbours to halves of a block, in float32, so that every
// instruction set has the same bits; `penstock.ops.hadamard` is the definition.

#pragma once

#include <utility>

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int64_t kMaxRotation = 64;  // longest block; lengths are powers of two

// Sums and differences of lanes that are `half` lanes apart, in the places of both.
template <int half, int n, size_t... i>
inline auto butterfly_native(const Vector<float, n>& v, std::index_sequence<i...>) {
  static constexpr float signs[n] = {(i & half ? -1.0f : 1.0f)...};
  const Vector<float, n> other = __builtin_shufflevector(v, v, int(i ^ half)...);
  return fma(v, load_bits<Vector<float, n>>(signs), other);
}
template <int half, class V>
inline V butterfly(const V& v) {
  constexpr int n = kLanesOf<V>;
  if constexpr (!IsTwo<V>::value)
    return butterfly_native<half, n>(v, std::make_index_sequence<n>());
  else if constexpr (half == n / 2)
    return {v.low + v.high, v.low - v.high};
  else
    return {butterfly<half>(v.low), butterfly<half>(v.high)};
}

inline void butterfly(f32x16& a, f32x16& b) {
  const f32x16 sum = a + b;
  b = a - b, a = sum;
}

// 64 inputs, of one block or several.
inline void transform(f32x16 (&v)[4], int64_t block) {
  for (f32x16& each : v) {
    if (block > 1) each = butterfly<1>(each);
    if (block > 2) each = butterfly<2>(each);
    if (block > 4) each = butterfly<4>(each);
    if (block > 8) each = butterfly<8>(each);
  }
  if (block > 16) butterfly(v[0], v[1]), butterfly(v[2], v[3]);
  if (block > 32) butterfly(v[0], v[2]), butterfly(v[1], v[3]);
}

// Transforms of blocks of `block` inputs, a power of two that divides their number: in float32, in memory of this thread's
// that lasts until the next call.
template <class T>
float* rotated(const T* x, int64_t count, int64_t block) {
  thread_local std::vector<float> memory;
  float* const out = with_room(memory, ceil_div(count, kMaxRotation) * kMaxRotation);
  f32x16 v[4];
  if (block == kMaxRotation) {  // known to the compiler
    for (int64_t i = 0; i < count; i += kMaxRotation) {
      for (int g = 0; g < 4; g++) v[g] = load(x + i + g * 16);
      transform(v, kMaxRotation);
      for (int g = 0; g < 4; g++) store(out + i + g * 16, v[g]);
    }
    return out;
  }
  for (int64_t i = 0; i < count; i += kMaxRotation) {
    for (int g = 0; g < 4; g++) v[g] = load_some(x + i + g * 16, count - i - g * 16);
    transform(v, block);
    for (int g = 0; g < 4; g++) store(out + i + g * 16, v[g]);
  }
  return out;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
