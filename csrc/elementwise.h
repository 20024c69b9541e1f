// Norms, rotation and the gate: row by row.

#pragma once

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Calls `f(i, count)` for each run of up to 16 elements from the i-th one on.
template <class F>
inline void by_sixteen(int64_t size, F&& f, int64_t i = 0) {
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

// Sum of the squares of what `get(i, count)` returns, in four times sixteen lanes, so that sums need not wait for each other.
template <class F>
inline float squares(int64_t size, F&& get) {
  f32x16 sums[4] = {};
  auto add = [&](f32x16& sum, f32x16 v) { sum = fma(v, v, sum); };
  const int64_t even = size / 64 * 64;
  for (int64_t i = 0; i < even; i += 64)
    for (int g = 0; g < 4; g++) add(sums[g], get(i + g * 16, std::integral_constant<int64_t, 16>()));
  by_sixteen(size, [&](int64_t i, auto n) { add(sums[0], get(i, n)); }, even);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
void norm_row(const Norm& a, int64_t row) {
  const T* weight = (const T*)a.weight;
  for (int64_t group = 0; group < a.groups; group++) {
    const T* x = (const T*)a.x + row * a.stride + group * a.size;
    T* out = (T*)a.out + (row * a.groups + group) * a.size;
    float total;
    if (a.residual) {
      T* residual = (T*)a.residual + row * a.size;
      total = squares(a.size, [&](int64_t i, auto n) {
        const f32x16 both = get(residual + i, n) + get(x + i, n);
        put(residual + i, both, n);
        return rounded<T>(both);
      });
      if (!weight) return;
      x = residual;
    } else {
      total = squares(a.size, [&](int64_t i, auto n) { return get(x + i, n); });
    }
    const float scale = 1.0f / __builtin_sqrtf(total / float(a.size) + a.eps);
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
    put(out + i, g * inverse(exp(-g) + 1.0f) * get(up + i, n), n);
  });
}

template <class T>
void silu_mul_row(const SiluMul& a, int64_t row) {
  const T* both = (const T*)a.gate_up + row * 2 * a.size;
  silu_mul(both, both + a.size, (T*)a.out + row * a.out_stride, a.size);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
