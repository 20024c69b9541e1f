// Walsh-Hadamard transforms of blocks of a row, which spread outliers over the block (QuaRot, Ashkboos et al., 2024).
//
// If the rows of a matrix are transformed and divided by the block size, their products with transformed inputs do not
// change: H H is the block size times the identity. The float32 additions have strides 1, 2, 4, ... in this order, so that
// all instruction sets give the same bits; `penstock.ops.hadamard` is the definition.

#pragma once

#include <utility>

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int64_t kMaxRotation = 64;  // maximum block size; block sizes are powers of two

// Sums and differences of lanes `half` apart, stored in both lanes.
template <int half, int n, size_t... i>
inline auto butterfly_native(const Vector<float, n>& v, std::index_sequence<i...>) {
  static constexpr float signs[n] = {(i & half ? -1.0f : 1.0f)...};
  const Vector<float, n> other = __builtin_shufflevector(v, v, int(i ^ half)...);
  return fma(v, load_bits<Vector<float, n>>(signs), other);
}
template <int half, class V>
inline V butterfly(const V& v) {
  constexpr int n = kLanesOf<V>;
  if constexpr (!IsVectorPair<V>::value)
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

// Transforms 64 inputs, which are one or more blocks.
inline void transform(f32x16 (&v)[4], int64_t block) {
  for (f32x16& vector : v) {
    if (block > 1) vector = butterfly<1>(vector);
    if (block > 2) vector = butterfly<2>(vector);
    if (block > 4) vector = butterfly<4>(vector);
    if (block > 8) vector = butterfly<8>(vector);
  }
  if (block > 16) butterfly(v[0], v[1]), butterfly(v[2], v[3]);
  if (block > 32) butterfly(v[0], v[2]), butterfly(v[1], v[3]);
}

// Transforms blocks of `block` inputs, a power of two that divides `count`. The float32 result is in thread-local memory
// that is valid until the next call.
template <class T>
float* rotate_blocks(const T* x, int64_t count, int64_t block) {
  thread_local std::vector<float> memory;
  float* const out = scratch(memory, ceil_div(count, kMaxRotation) * kMaxRotation);
  f32x16 v[4];
  if (block == kMaxRotation) {  // passes the block size as a compile-time constant
    for (int64_t i = 0; i < count; i += kMaxRotation) {
      for (int g = 0; g < 4; g++) v[g] = load(x + i + g * 16);
      transform(v, kMaxRotation);
      for (int g = 0; g < 4; g++) store(out + i + g * 16, v[g]);
    }
    return out;
  }
  for (int64_t i = 0; i < count; i += kMaxRotation) {
    for (int g = 0; g < 4; g++) v[g] = load_n(x + i + g * 16, count - i - g * 16);
    transform(v, block);
    for (int g = 0; g < 4; g++) store(out + i + g * 16, v[g]);
  }
  return out;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
