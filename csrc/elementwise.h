// Norms, rotation and the gate: row by row.

#pragma once

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Sum of squares in sixteen lanes, then over the lanes; what is too short for a vector is padded with zeros.
template <class T>
float squares(const T* x, int64_t size) {
  f32x16 acc = {};
  for (int64_t i = 0; i + 16 <= size; i += 16) {
    f32x16 v = load(x + i);
    acc = fma(v, v, acc);
  }
  if (size % 16) {
    f32x16 v = load_part(x + size / 16 * 16, size % 16);
    acc = fma(v, v, acc);
  }
  return sum(acc);
}

// Calls `f(i, count)` for each run of up to 16 elements.
template <class F>
inline void by_sixteen(int64_t size, F&& f) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) f(i, std::integral_constant<int64_t, 16>());
  if (i < size) f(i, size - i);
}

template <class T, class N>
inline f32x16 get(const T* from, N count) {
  return load_some(from, count);
}
template <class T, class N>
inline void put(T* to, f32x16 v, N count) {
  store_some(to, v, count);
}
// A value as the type would keep it.
template <class T>
inline f32x16 rounded(f32x16 v) {
  if constexpr (std::is_same_v<T, float>)
    return v;
  else
    return widen(round_to_bf16(v));
}

template <class T>
void norm_row(const Norm& a, int64_t row) {
  const T* weight = (const T*)a.weight;
  for (int64_t group = 0; group < a.groups; group++) {
    const T* x = (const T*)a.x + row * a.stride + group * a.size;
    T* out = (T*)a.out + (row * a.groups + group) * a.size;
    if (a.residual) {
      T* residual = (T*)a.residual + row * a.size;
      by_sixteen(a.size, [&](int64_t i, auto n) { put(residual + i, get(residual + i, n) + get(x + i, n), n); });
      x = residual;
    }
    const float scale = 1.0f / __builtin_sqrtf(squares(x, a.size) / float(a.size) + a.eps);
    by_sixteen(a.size, [&](int64_t i, auto n) {
      put(out + i, rounded<T>(get(x + i, n) * scale) * get(weight + i, n), n);
    });
  }
}

template <class T>
void rope_token(const Rope& a, int64_t token) {
  const int64_t half = a.dim / 2;
  const float *cos = a.table + a.positions[token] * a.dim, *sin = cos + half;
  for (int64_t head = 0; head < a.heads; head++) {
    const T *low = (const T*)a.x + token * a.stride + head * a.dim, *high = low + half;
    T* out = (T*)a.out + (token * a.heads + head) * a.dim;
    by_sixteen(half, [&](int64_t i, auto n) {
      f32x16 x = get(low + i, n), y = get(high + i, n), c = get(cos + i, n), s = get(sin + i, n);
      put(out + i, x * c - y * s, n);
      put(out + half + i, y * c + x * s, n);
    });
  }
}

// silu(gate) * up.
template <class T>
inline void silu_mul(const T* gate, const T* up, T* out, int64_t size) {
  by_sixteen(size, [&](int64_t i, auto n) {
    f32x16 g = get(gate + i, n);
    put(out + i, g / (exp(-g) + 1.0f) * get(up + i, n), n);
  });
}

template <class T>
void silu_mul_row(const SiluMul& a, int64_t row) {
  const T* both = (const T*)a.gate_up + row * 2 * a.size;
  silu_mul(both, both + a.size, (T*)a.out + row * a.size, a.size);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
