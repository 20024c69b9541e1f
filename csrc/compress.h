// Compressed entries of a KV cache: compressed attention (DeepSeek-AI, 2026, "DeepSeek-V4").

#pragma once

#include "states.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Computes and stores one entry. A channel's sums are in the order of its tokens.
template <class T>
void compress_entry(const Compress& a, int64_t task) {
  const int64_t sequence = a.tasks[2 * task], last = a.tasks[2 * task + 1], start = a.rows.starts[sequence];
  const int64_t channels = a.channels(), span = a.span(), position = a.positions[last], dim = a.dim;
  const T* state = (const T*)a.state + a.rows.slots[sequence] * span * 2 * channels;
  auto token_at = [&](int64_t back) {
    const int64_t token = last - back;
    return token >= start ? (const T*)a.x + token * a.x_stride : state + (position - back) % span * 2 * channels;
  };
  const int64_t count = std::min(span, position + 1);  // the first entry has no tokens before its own
  float entry[kMaxLatent];
  for_each_16(dim, [&](int64_t i, auto n) {
    // Calls f(values, gates) for each token.
    auto for_each_token = [&](auto&& f) {
      for (int64_t back = count - 1; back >= 0; back--) {
        const int64_t column = i + (a.overlap && back < a.rate ? dim : 0);
        const T* token = token_at(back) + column;
        f(token, get(token + channels, n) + get(a.bias + (span - 1 - back) % a.rate * channels + column, n));
      }
    };
    f32x16 maximum = broadcast(kNegInf), weights = {}, total = {};
    for_each_token([&](const T*, f32x16 gate) { maximum = max(maximum, gate); });
    for_each_token([&](const T* values, f32x16 gate) {
      const f32x16 weight = exp(gate - maximum);
      weights += weight;
      total = fma(get(values, n), weight, total);
    });
    put(entry + i, total / weights, n);
  });
  const float factor =
      1.0f / __builtin_sqrtf(sum_of_squares(dim, [&](int64_t i, auto n) { return get(entry + i, n); }) / float(dim) + a.eps);
  T* out = (T*)a.cache + a.slots[last] * a.row + a.offset;
  for_each_16(dim, [&](int64_t i, auto n) { put(out + i, get(entry + i, n) * factor * get(a.norm + i, n), n); });
  const float *cos = a.table + (position + 1 - a.rate) * a.rope, *sin = cos + a.rope / 2;
  T* tail = out + dim - a.rope;
  rotate_head_interleaved<kMaxLatent>(tail, cos, sin, tail, a.rope / 2);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
