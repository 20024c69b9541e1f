// Norms, rotary embedding, activations and scaling, row by row.

#pragma once

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Calls `f(i, count)` for each run of up to 16 elements, starting at element i.
template <class F>
inline void for_each_16(int64_t size, F&& f, int64_t i = 0) {
  for (; i + 16 <= size; i += 16) f(i, std::integral_constant<int64_t, 16>());
  if (i < size) f(i, size - i);
}

template <class T, class N>
inline f32x16 get(const T* from, N count) {
  return load_n(from, count);
}
template <class T, class N>
inline void put(T* to, f32x16 v, N count) {
  store_n(to, v, count);
}
// Rounds values to a type.
template <class T>
inline f32x16 round_to(f32x16 v) {
  if constexpr (std::is_same_v<T, float>)
    return v;
  else
    return widen(round_to_bf16(v));
}

// Sum of squares of the vectors that `get(i, count)` returns, in four independent accumulators to hide latency.
template <class F>
inline float sum_of_squares(int64_t size, F&& get) {
  f32x16 sums[4] = {};
  auto add = [&](f32x16& sum, f32x16 v) { sum = fma(v, v, sum); };
  const int64_t even = size / 64 * 64;
  for (int64_t i = 0; i < even; i += 64)
    for (int g = 0; g < 4; g++) add(sums[g], get(i + g * 16, std::integral_constant<int64_t, 16>()));
  for_each_16(size, [&](int64_t i, auto n) { add(sums[0], get(i, n)); }, even);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Norm of a row. The normalized value is rounded before the multiplication only if the weights have the type of x.
template <class T, class Weight>
void norm_row_with(const Norm& a, int64_t row) {
  for (int64_t group = 0; group < a.groups; group++) {
    const T* x = (const T*)a.x + row * a.stride + group * a.size;
    T* out = (T*)a.out + (row * a.groups + group) * a.size;
    const Weight* weight = (const Weight*)a.weight + group * a.weight_stride;
    if (a.residual) {
      T* residual = (T*)a.residual + row * a.size;
      for_each_16(a.size, [&](int64_t i, auto n) { put(residual + i, get(residual + i, n) + get(x + i, n), n); });
      if (!a.weight) return;
      x = residual;
    }
    float mean = 0.0f;
    if (a.centered) {
      f32x16 sums = {};
      for_each_16(a.size, [&](int64_t i, auto n) { sums += get(x + i, n); });
      mean = sum(sums) / float(a.size);
    }
    auto centered = [&](int64_t i, auto n) {  // zero beyond the end of the row
      return get(x + i, n) - select(iota() < int32_t(n), broadcast(mean), f32x16{});
    };
    const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(a.size, centered) / float(a.size) + a.eps);
    for_each_16(a.size, [&](int64_t i, auto n) {
      f32x16 normed = centered(i, n) * scale;
      if constexpr (std::is_same_v<T, Weight>) normed = round_to<T>(normed);
      normed *= get(weight + i, n);
      put(out + i, a.bias ? normed + get(a.bias + i, n) : normed, n);
    });
  }
}
template <class T>
void norm_row(const Norm& a, int64_t row) {
  a.wide ? norm_row_with<T, float>(a, row) : norm_row_with<T, T>(a, row);
}

template <int64_t max_dim, class T>
void rotate_head_interleaved(const T* x, const float* cos, const float* sin, T* out, int64_t pairs) {
  float input[max_dim], result[max_dim];
  for_each_16(2 * pairs, [&](int64_t i, auto n) { put(input + i, get(x + i, n), n); });
  for (int64_t i = 0; i < pairs; i++) {
    const float even = input[2 * i], odd = input[2 * i + 1];
    result[2 * i] = even * cos[i] - odd * sin[i];
    result[2 * i + 1] = odd * cos[i] + even * sin[i];
  }
  for_each_16(2 * pairs, [&](int64_t i, auto n) { put(out + i, get(result + i, n), n); });
}

// Rotates the halves of a head of at most `max_dim` elements against each other, or adjacent elements.
template <int64_t max_dim, class T>
inline void rotate_head(const T* x, const float* cos, const float* sin, T* out, int64_t half, bool interleaved) {
  if (interleaved) return rotate_head_interleaved<max_dim>(x, cos, sin, out, half);
  const T *low = x, *high = x + half;
  for_each_16(half, [&](int64_t i, auto n) {
    f32x16 x = get(low + i, n), y = get(high + i, n), c = get(cos + i, n), s = get(sin + i, n);
    put(out + i, x * c - y * s, n);
    put(out + half + i, y * c + x * s, n);
  });
}

template <class T>
void rope_token(const Rope& a, int64_t token) {
  const int64_t half = a.rotary / 2;
  const float *cos = a.table + a.positions[token] * a.rotary, *sin = cos + half;
  for (int64_t head = 0; head < a.heads; head++) {
    const T* x = (const T*)a.x + token * a.stride + head * a.dim;
    T* out = (T*)a.out + (token * a.heads + head) * a.dim;
    for_each_16(a.dim - a.rotary, [&](int64_t i, auto n) { put(out + a.rotary + i, get(x + a.rotary + i, n), n); });
    rotate_head<kMaxHead>(x, cos, sin, out, half, a.interleaved);
  }
}

// The error function, with an error of at most 2e-7 (Abramowitz and Stegun, 1964, 7.1.26).
inline f32x16 erf(f32x16 x) {
  const f32x16 size = max(x, -x), t = inverse(fma(size, broadcast(0.3275911f), broadcast(1.0f)));
  f32x16 p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f));
  const f32x16 above = broadcast(1.0f) - p * t * exp(-size * size);
  return select(x < 0.0f, -above, above);
}

template <Activation activation>
inline f32x16 activated(f32x16 x) {
  if constexpr (activation == Activation::gelu) return 0.5f * x * (erf(x * 0.70710678118654752f) + 1.0f);
  if constexpr (activation == Activation::relu) return max(x, f32x16{});
  if constexpr (activation == Activation::tanh) return tanh(x);
  if constexpr (activation == Activation::relu2) {
    const f32x16 positive = max(x, f32x16{});
    return positive * positive;
  }
  f32x16 exponent = -x;
  if constexpr (activation == Activation::gelu_tanh) {  // x * (1 + tanh(y)) / 2 = x * sigmoid(2 * y)
    const f32x16 cubed = x * x * x;
    exponent = (x + cubed * 0.044715f) * -1.5957691216057308f;  // -2 * sqrt(2 / pi)
  }
  return x * inverse(exp(exponent) + 1.0f);
}

// Calls `work` with the activation as a template argument, so that it is dispatched once per row.
template <class Work>
inline void with_activation(Activation activation, Work&& work) {
  switch (activation) {
    case Activation::silu: return work.template operator()<Activation::silu>();
    case Activation::gelu: return work.template operator()<Activation::gelu>();
    case Activation::gelu_tanh: return work.template operator()<Activation::gelu_tanh>();
    case Activation::relu: return work.template operator()<Activation::relu>();
    case Activation::tanh: return work.template operator()<Activation::tanh>();
    case Activation::relu2: return work.template operator()<Activation::relu2>();
    case Activation::swigluoai: return work.template operator()<Activation::swigluoai>();
    case Activation::swiglu10: return work.template operator()<Activation::swiglu10>();
  }
}

// Clamps a gate to at most `limit`, and the value that it gates to [-limit, limit]. Keeps NaN.
inline void clamp_gated(f32x16& x, f32x16& up, float limit) {
  x = select(x > limit, broadcast(limit), x);
  up = select(up > limit, broadcast(limit), select(up < -limit, broadcast(-limit), up));
}

// Gated activation: activation(x) * up, or clamped SwiGLU (swigluoai, swiglu10).
template <Activation activation>
inline f32x16 gated(f32x16 x, f32x16 up) {
  if constexpr (activation == Activation::swigluoai) {
    clamp_gated(x, up, 7.0f);
    return (up + 1.0f) * x * inverse(exp(x * -1.702f) + 1.0f);
  }
  if constexpr (activation == Activation::swiglu10) {
    clamp_gated(x, up, 10.0f);
    return activated<Activation::silu>(x) * up;
  }
  return activated<activation>(x) * up;
}

template <class T>
inline void gate(Activation activation, const T* gates, const T* ups, T* out, int64_t size) {
  with_activation(activation, [&]<Activation known>() {
    for_each_16(size, [&](int64_t i, auto n) { put(out + i, gated<known>(get(gates + i, n), get(ups + i, n)), n); });
  });
}

template <class T>
void activate_row(const Activate& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.stride;
  T* out = (T*)a.out + row * a.out_stride;
  if (a.gated) return gate(a.activation, x, x + a.size, out, a.size);
  with_activation(a.activation, [&]<Activation known>() {
    for_each_16(a.size, [&](int64_t i, auto n) { put(out + i, activated<known>(get(x + i, n)), n); });
  });
}

template <class T>
void gaussian_topk_row(const GaussianTopK& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.stride;
  T* out = (T*)a.out + row * a.size;
  f32x16 sums = {};
  for_each_16(a.size, [&](int64_t i, auto n) { sums += get(x + i, n); });
  const float mean = sum(sums) / float(a.size);
  const float variance = sum_of_squares(a.size,
                                        [&](int64_t i, auto n) {
                                          return get(x + i, n) - select(iota() < int32_t(n), broadcast(mean),
                                                                        f32x16{});  // zero beyond the end of the row
                                        }) /
                         float(a.size);
  const f32x16 cutoff = broadcast(mean + __builtin_sqrtf(variance) * a.multiplier);
  for_each_16(a.size, [&](int64_t i, auto n) { put(out + i, max(f32x16{}, get(x + i, n) - cutoff), n); });
}

template <class T>
void scale_row(const Scale& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.size;
  T* out = (T*)a.out + row * a.size;
  for_each_16(a.size, [&](int64_t i, auto n) {
    const f32x16 v = get(x + i, n) * a.factor;
    put(out + i, a.cap ? tanh(v / a.cap) * a.cap : v, n);
  });
}

template <class T>
void to_float32_row(const ToFloat32& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.size;
  for_each_16(a.size, [&](int64_t i, auto n) { put(a.out + row * a.size + i, get(x + i, n), n); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
