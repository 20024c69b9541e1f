// Several residual streams: hyper-connections (Xie et al., 2026) and AltUp (Baykal et al., 2023). The rotation of the last
// elements of heads (DeepSeek-V4).

#pragma once

#include "states.h"

namespace penstock {
namespace PENSTOCK_ISA {

inline void hyper_weights_row(const HyperWeights& a, int64_t row) {
  const int64_t n = a.streams;
  const float* logits = a.logits + row * a.width;
  float* out = a.out + row * a.width;
  auto logit = [&](int64_t i, int64_t kind) { return logits[i] * a.scale[kind] + a.base[i]; };
  for (int64_t i = 0; i < n; i++) out[i] = sigmoid_of(logit(i, 0)) + a.eps;
  if (a.width == n) return;
  for (int64_t i = n; i < 2 * n; i++) out[i] = 2.0f * sigmoid_of(logit(i, 1));
  float* matrix = out + 2 * n;
  // Divides each row or column by its sum. `step`: distance of its elements, `next`: of rows or columns.
  auto normalize = [&](int64_t step, int64_t next, float added) {
    for (int64_t i = 0; i < n; i++) {
      float total = 0.0f;
      for (int64_t j = 0; j < n; j++) total += matrix[i * next + j * step];
      for (int64_t j = 0; j < n; j++) matrix[i * next + j * step] /= total + added;
    }
  };
  for (int64_t i = 0; i < n; i++) {
    float maximum = kNegInf;
    for (int64_t j = 0; j < n; j++) {
      const float x = matrix[i * n + j] = logit(2 * n + i * n + j, 2);
      maximum = x > maximum ? x : maximum;
    }
    for (int64_t j = 0; j < n; j++) matrix[i * n + j] = exp_of(matrix[i * n + j] - maximum);
  }
  normalize(1, n, 0.0f);  // softmax
  for (int64_t i = 0; i < n * n; i++) matrix[i] += a.eps;
  normalize(n, 1, a.eps);
  for (int64_t i = 1; i < a.iterations; i++) {
    normalize(1, n, a.eps);
    normalize(n, 1, a.eps);
  }
}

template <class T>
void collapse_row(const CollapseStreams& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.streams * a.size;
  const float* weights = a.weights + row * a.stride;
  for_each_16(a.size, [&](int64_t i, auto n) {
    f32x16 total = {};
    for (int64_t j = 0; j < a.streams; j++) total = fma(get(x + j * a.size + i, n), broadcast(weights[j]), total);
    put((T*)a.out + row * a.size + i, total, n);
  });
}

template <class T>
void mix_row(const MixStreams& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.size;
  T* streams = (T*)a.residual + row * a.streams * a.size;
  const float *expand = a.weights + row * a.stride + a.streams, *matrix = expand + a.streams;
  for_each_16(a.size, [&](int64_t i, auto n) {
    f32x16 before[kMaxStreams];
    for (int64_t j = 0; j < a.streams; j++) before[j] = get(streams + j * a.size + i, n);
    for (int64_t k = 0; k < a.streams; k++) {
      f32x16 total = get(x + i, n) * expand[k];
      for (int64_t j = 0; j < a.streams; j++) total = fma(before[j], broadcast(matrix[j * a.streams + k]), total);
      put(streams + k * a.size + i, total, n);
    }
  });
}

template <class T>
void equalize_row(const EqualizeStreams& a, int64_t row) {
  T* first = (T*)a.x + row * a.streams * a.size;
  auto mean_square = [&](const T* x) {
    return sum_of_squares(a.size, [&](int64_t i, auto n) { return get(x + i, n); }) / float(a.size);
  };
  const float target = __builtin_sqrtf(mean_square(first));
  for (int64_t j = 1; j < a.streams; j++) {
    T* x = first + j * a.size;
    const float square = mean_square(x);
    const float factor = target / __builtin_sqrtf(square < a.min_square ? a.min_square : square);
    for_each_16(a.size, [&](int64_t i, auto n) { put(x + i, get(x + i, n) * factor, n); });
  }
}

template <class T>
void rotate_tail_token(const RotateTail& a, int64_t token) {
  const int64_t half = a.rotary / 2;
  const float* cos = a.table + a.positions[token] * a.rotary;
  float sin[kMaxLatentKey / 2];
  for (int64_t i = 0; i < half; i++) sin[i] = a.inverse ? -cos[half + i] : cos[half + i];
  for (int64_t head = 0; head < a.heads; head++) {
    T* tail = (T*)a.x + (token * a.heads + head + 1) * a.dim - a.rotary;
    rotate_head_interleaved<kMaxLatentKey>(tail, cos, sin, tail, half);
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
