// Ops with recurrent state: short convolution, linear attention, and gates.

#pragma once

#include <vector>

#include "elementwise.h"
#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

inline float exp_of(float x) {
  float lanes[16];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// log(1 + e^x), with a relative error of 1e-7.
inline float softplus_of(float x) {
  const float y = exp_of(-__builtin_fabsf(x)), s = y / (2.0f + y), square = s * s;  // log(1 + y) = 2 artanh(s), s <= 1/3
  float p = 1.0f / 15.0f;
  for (float term : {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f, 1.0f})
    p = p * square + term;
  return __builtin_fmaxf(x, 0.0f) + 2.0f * s * p;
}

// The same for 16 numbers.
inline f32x16 softplus(f32x16 x) {
  const f32x16 y = exp(-max(x, -x)), s = y / (y + 2.0f), square = s * s;
  f32x16 p = broadcast(1.0f / 15.0f);
  for (float term : {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f, 1.0f})
    p = p * square + term;
  return max(x, f32x16{}) + 2.0f * s * p;
}

// Applies the inputs of a sequence to its state, in order: kept inputs of accepted drafts, tokens, and drafts. `apply(token,
// is_kept, has_output)` applies one; `save(slot)` copies the state to another slot; `write()` writes the state, before the
// drafts are applied.
template <class Apply, class Save, class Write>
inline void scan(const StateRows& rows, int64_t sequence, Apply&& apply, Save&& save, Write&& write) {
  const int64_t start = rows.starts[sequence], end = rows.starts[sequence + 1], kept_end = end - rows.drafts[sequence];
  int64_t next_save = rows.save_starts[sequence];
  const int64_t saves_end = rows.save_starts[sequence + 1];
  for (int64_t i = 0; i < rows.accepted[sequence]; i++) apply(i, true, false);
  for (int64_t token = start; token < kept_end; token++) {
    apply(token, false, true);
    for (; next_save < saves_end && rows.save_after[next_save] == token + 1 - start; next_save++)
      save(rows.save_slots[next_save]);
  }
  write();
  for (int64_t token = kept_end; token < end; token++) apply(token, false, true);
}

constexpr int64_t kConvolutionTask = 128;  // channels of a task
constexpr int64_t kMaxKernel = 8;

// A task is a sequence and kConvolutionTask channels.
template <class T>
void convolution_task(const Convolution& a, int64_t task) {
  const int64_t tasks = ceil_div(a.channels, kConvolutionTask), sequence = task / tasks;
  const int64_t first = task % tasks * kConvolutionTask, size = std::min(kConvolutionTask, a.channels - first);
  const int64_t before = a.kernel - 1, slot = a.rows.slots[sequence];
  float history[kMaxKernel][kConvolutionTask];  // a ring of the last `before` inputs, the oldest at `oldest`
  int64_t oldest = 0;
  T* state = (T*)a.state + first;
  auto row_of = [&](int64_t slot, int64_t i) { return state + (slot * before + i) * a.channels; };
  for (int64_t i = 0; i < before; i++)
    for_each_16(size, [&](int64_t c, auto n) { put(history[i] + c, get(row_of(slot, i) + c, n), n); });
  auto save = [&](int64_t to) {
    for (int64_t i = 0; i < before; i++) {
      const float* row = history[(oldest + i) % before];
      for_each_16(size, [&](int64_t c, auto n) { put(row_of(to, i) + c, get(row + c, n), n); });
    }
  };
  auto apply = [&](int64_t token, bool is_kept, bool has_output) {
    const T* x =
        (is_kept ? (const T*)a.kept + (slot * a.max_drafts + token) * a.channels : (const T*)a.x + token * a.x_stride);
    x += first;
    T* out = (T*)a.out + token * a.out_stride + first;
    for_each_16(size, [&](int64_t c, auto n) {
      const f32x16 input = get(x + c, n);
      if (has_output) {
        f32x16 sum = a.bias ? get(a.bias + first + c, n) : f32x16{};
        for (int64_t i = 0; i < before; i++)
          sum = fma(get(a.weight + i * a.channels + first + c, n), get(history[(oldest + i) % before] + c, n), sum);
        sum = fma(get(a.weight + before * a.channels + first + c, n), input, sum);
        put(out + c, a.silu ? activated<Activation::silu>(sum) : sum, n);
      }
      put(history[oldest] + c, input, n);
    });
    oldest = (oldest + 1) % before;
  };
  scan(a.rows, sequence, apply, save, [&] { save(slot); });
}

// Applies one token to `vectors` times 16 columns of a head's state [key_dim, value_dim]. Without the delta rule, the
// change does not depend on the state, so that one pass is enough.
template <int vectors, class T, class N>
inline void update_columns(const LinearAttention& a, const float* q, const float* k, const float* decay, float qk,
                           float beta, float skip, float* state, const T* v, T* out, N count) {
  f32x16 change[vectors], result[vectors] = {};
  auto decayed = [&](int64_t i, int g) { return get(state + i * a.value_dim + 16 * g, count) * decay[i]; };
  auto update = [&](int64_t i, int g) {
    const f32x16 updated = fma(broadcast(k[i]), change[g], decayed(i, g));
    put(state + i * a.value_dim + 16 * g, updated, count);
    return updated;
  };
  if (a.delta) {
    f32x16 old[vectors] = {};
    for (int64_t i = 0; i < a.key_dim; i++)
      for (int g = 0; g < vectors; g++) {
        const f32x16 row = decayed(i, g);
        old[g] = fma(broadcast(k[i]), row, old[g]);
        result[g] = fma(broadcast(q[i]), row, result[g]);
      }
    for (int g = 0; g < vectors; g++) {
      change[g] = (get(v + 16 * g, count) - old[g]) * beta;
      result[g] = fma(change[g], broadcast(qk), result[g]);
    }
    for (int64_t i = 0; i < a.key_dim; i++)
      for (int g = 0; g < vectors; g++) update(i, g);
  } else {
    for (int g = 0; g < vectors; g++) change[g] = get(v + 16 * g, count) * beta;
    for (int64_t i = 0; i < a.key_dim; i++)
      for (int g = 0; g < vectors; g++) result[g] = fma(broadcast(q[i]), update(i, g), result[g]);
  }
  if (!out) return;
  for (int g = 0; g < vectors; g++) put(out + 16 * g, fma(get(v + 16 * g, count), broadcast(skip), result[g]), count);
}

// A task is a sequence and a value head.
template <class T>
void linear_attention_task(const LinearAttention& a, int64_t task) {
  const int64_t sequence = task / a.heads, head = task % a.heads, slot = a.rows.slots[sequence];
  const int64_t key_head = head / a.groups, size = a.key_dim * a.value_dim;
  auto state_of = [&](int64_t slot) { return a.state + (slot * a.heads + head) * size; };
  static thread_local std::vector<float> memory;
  float *state = state_of(slot), *drafted = scratch(memory, size);
  const float rate = a.log_decay ? exp_of(a.log_decay[head]) : 0.0f;
  auto apply = [&](int64_t token, bool is_kept, bool has_output) {
    const T *x, *gates;
    if (is_kept) {
      x = (const T*)a.kept + (slot * a.max_drafts + token) * a.width;
      gates = (const T*)a.kept_gates + (slot * a.max_drafts + token) * a.gates_width;
    } else {
      x = (const T*)a.x + token * a.x_stride;
      gates = (const T*)a.gates + token * a.gates_stride;
    }
    float q[kMaxHead], k[kMaxHead], decay[kMaxHead];
    auto read = [&](float* to, int64_t offset, float factor) {
      const T* from = x + offset + key_head * a.key_dim;
      if (a.delta) {
        const float square = sum_of_squares(a.key_dim, [&](int64_t i, auto n) { return get(from + i, n); });
        factor /= __builtin_sqrtf(square + a.l2_eps);
      }
      for_each_16(a.key_dim, [&](int64_t i, auto n) { put(to + i, get(from + i, n) * factor, n); });
    };
    read(q, a.q_offset, a.scale);
    read(k, a.k_offset, 1.0f);
    float beta = 1.0f;
    if (a.decay_dim > 1) {
      const T* steps = gates + a.step_offset + head * a.decay_dim;
      const float* bias = a.gate_bias + head * a.decay_dim;
      for_each_16(a.key_dim, [&](int64_t i, auto n) {
        put(decay + i, exp(softplus(get(steps + i, n) + get(bias + i, n)) * -rate), n);
      });
    } else {
      float shared;
      if (a.decay) {
        shared = a.decay[head];
      } else {
        float step = softplus_of(widen(gates[a.step_offset + head]) + a.gate_bias[head]);
        step = __builtin_fminf(__builtin_fmaxf(step, a.min_step), a.max_step);
        shared = exp_of(-rate * step);
        if (!a.delta) beta = step;
      }
      for (int64_t i = 0; i < a.key_dim; i++) decay[i] = shared;
    }
    if (a.delta) beta = sigmoid_of(widen(gates[head])) * a.beta_scale;
    f32x16 products = {};
    for_each_16(a.key_dim, [&](int64_t i, auto n) { products = fma(get(q + i, n), get(k + i, n), products); });
    const float qk = sum(products), skip = a.skip ? a.skip[head] : 0.0f;
    const T* v = x + a.v_offset + head * a.value_dim;
    T* out = has_output ? (T*)a.out + token * a.out_stride + head * a.value_dim : nullptr;
    int64_t c = 0;
    auto update = [&](auto vectors, auto count) {
      update_columns<decltype(vectors)::value>(a, q, k, decay, qk, beta, skip, state + c, v + c, out ? out + c : nullptr,
                                               count);
    };
    for (; c + 64 <= a.value_dim; c += 64) update(std::integral_constant<int, 4>(), std::integral_constant<int64_t, 16>());
    for (; c + 16 <= a.value_dim; c += 16) update(std::integral_constant<int, 1>(), std::integral_constant<int64_t, 16>());
    if (c < a.value_dim) update(std::integral_constant<int, 1>(), a.value_dim - c);
  };
  auto save = [&](int64_t to) { memcpy(state_of(to), state, size * sizeof(float)); };
  scan(a.rows, sequence, apply, save, [&] {
    if (!a.rows.drafts[sequence]) return;
    memcpy(drafted, state, size * sizeof(float));
    state = drafted;
  });
}

// RMS norm of each group of a row, multiplied by SiLU or the sigmoid of the gate after, or before the norm.
template <class T>
void gated_norm_row(const GatedNorm& a, int64_t row) {
  for (int64_t group = 0; group < a.groups; group++) {
    const T* x = (const T*)a.x + row * a.stride + group * a.size;
    const T* gate = (const T*)a.gate + row * a.gate_stride + group * a.size;
    const T* weight = (const T*)a.weight + group * a.weight_stride;
    T* out = (T*)a.out + row * a.out_stride + group * a.size;
    auto gate_at = [&](int64_t i, auto n) {
      const f32x16 x = get(gate + i, n);
      return a.sigmoid ? broadcast(1.0f) / (exp(-x) + 1.0f) : activated<Activation::silu>(x);
    };
    auto value = [&](int64_t i, auto n) { return a.gate_first ? get(x + i, n) * gate_at(i, n) : get(x + i, n); };
    const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(a.size, value) / float(a.size) + a.eps);
    for_each_16(a.size, [&](int64_t i, auto n) {
      const f32x16 normed = round_to<T>(round_to<T>(value(i, n) * scale) * get(weight + i, n));
      put(out + i, a.gate_first ? normed : normed * gate_at(i, n), n);
    });
  }
}

// A row times the sigmoid of its gate.
template <class T>
void multiply_gate_row(const MultiplyGate& a, int64_t row) {
  const T *x = (const T*)a.x + row * a.stride, *gate = (const T*)a.gate + row * a.gate_stride;
  T* out = (T*)a.out + row * a.out_stride;
  for_each_16(a.size, [&](int64_t i, auto n) { put(out + i, get(x + i, n) / (exp(-get(gate + i, n)) + 1.0f), n); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
