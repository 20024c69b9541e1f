// Recurrences with one state per channel: the selective scan (Mamba), and the real-gated linear recurrent unit (RG-LRU).

#pragma once

#include "states.h"

namespace penstock {
namespace PENSTOCK_ISA {

inline f32x16 sigmoid(f32x16 x) { return inverse(exp(-x) + 1.0f); }

inline f32x16 square_root(f32x16 x) {
  float lanes[16];
  store(lanes, x);
  for (float& lane : lanes) lane = __builtin_sqrtf(lane);
  return load(lanes);
}

constexpr int64_t kScanTask = 64;  // channels of a task

// A task is a sequence and kScanTask channels. Each lane is a channel, whose states are added in order.
template <class T>
void selective_scan_task(const SelectiveScan& a, int64_t task) {
  const int64_t tasks = ceil_div(a.channels, kScanTask), sequence = task / tasks, slot = a.rows.slots[sequence];
  const int64_t first = task % tasks * kScanTask, count = std::min(kScanTask, a.channels - first);
  static thread_local std::vector<float> memory;
  float* const state = scratch(memory, a.size * kScanTask);
  auto row_of = [&](int64_t slot, int64_t i) { return a.state + (slot * a.size + i) * a.channels + first; };
  auto save = [&](int64_t to) {
    for (int64_t i = 0; i < a.size; i++) memcpy(row_of(to, i), state + i * kScanTask, count * sizeof(float));
  };
  for (int64_t i = 0; i < a.size; i++) memcpy(state + i * kScanTask, row_of(slot, i), count * sizeof(float));
  auto apply = [&](int64_t token, bool is_kept, bool has_output) {
    const int64_t kept = slot * a.max_drafts + token;
    const T* x = (is_kept ? (const T*)a.kept_x + kept * a.channels : (const T*)a.x + token * a.x_stride) + first;
    const T* steps =
        (is_kept ? (const T*)a.kept_steps + kept * a.channels : (const T*)a.steps + token * a.steps_stride) + first;
    const T* b = is_kept ? (const T*)a.kept_b + kept * a.size : (const T*)a.b + token * a.b_stride;
    const T* c = (const T*)a.c + token * a.c_stride;
    for_each_16(count, [&](int64_t i, auto n) {
      const f32x16 input = get(x + i, n), step = softplus(get(steps + i, n) + get(a.step_bias + first + i, n));
      const f32x16 scaled = step * input;
      f32x16 sum = {};
      for (int64_t k = 0; k < a.size; k++) {
        float* const row = state + k * kScanTask + i;
        const f32x16 decay = exp(step * get(a.rates + k * a.channels + first + i, n));
        const f32x16 next = fma(decay, load(row), scaled * widen(b[k]));
        store(row, next);
        if (has_output) sum = fma(next, broadcast(widen(c[k])), sum);
      }
      if (!has_output) return;
      sum = fma(input, get(a.skip + first + i, n), sum);
      const f32x16 gate = get((const T*)a.gate + token * a.gate_stride + first + i, n);
      put((T*)a.out + token * a.out_stride + first + i, sum * activated<Activation::silu>(gate), n);
    });
  };
  scan(a.rows, sequence, apply, save, [&] { save(slot); });
}

// A task is a sequence and a head, the channels of a block of the gates' matrices.
template <class T>
void rg_lru_task(const RgLru& a, int64_t task) {
  const int64_t sequence = task / a.heads, head = task % a.heads, first = head * a.width, slot = a.rows.slots[sequence];
  const int64_t channels = a.heads * a.width;
  static thread_local std::vector<float> memory;
  float* const state = scratch(memory, ceil_div(a.width, 16) * 16);
  auto save = [&](int64_t to) { memcpy(a.state + to * channels + first, state, a.width * sizeof(float)); };
  memcpy(state, a.state + slot * channels + first, a.width * sizeof(float));
  const float *input_bias = a.bias + 2 * first, *decay_bias = input_bias + a.width;
  auto apply = [&](int64_t token, bool is_kept, bool has_output) {
    const int64_t kept = slot * a.max_drafts + token;
    const T* x = (is_kept ? (const T*)a.kept_x + kept * channels : (const T*)a.x + token * a.x_stride) + first;
    const T* gates = (is_kept ? (const T*)a.kept_gates + kept * 2 * channels : (const T*)a.gates + token * a.gates_stride);
    gates += 2 * first;
    const bool is_first = !is_kept && a.positions[token] == 0;
    for_each_16(a.width, [&](int64_t i, auto n) {
      const f32x16 input = get(x + i, n) * sigmoid(get(gates + i, n) + get(input_bias + i, n));
      const f32x16 log_decay = sigmoid(get(gates + a.width + i, n) + get(decay_bias + i, n)) * get(a.rates + first + i, n);
      f32x16 next = input;  // the first token of a sequence is neither scaled nor added to a state
      if (!is_first) {
        const f32x16 scale = square_root(max(1.0f - exp(log_decay * 2.0f), f32x16{}));
        next = fma(exp(log_decay), load(state + i), input * scale);
      }
      store(state + i, next);
      if (has_output) put((T*)a.out + token * a.out_stride + first + i, next, n);
    });
  };
  scan(a.rows, sequence, apply, save, [&] { save(slot); });
}

// A row times another, to which an activation may be applied first.
template <class T>
void multiply_row(const MultiplyRows& a, int64_t row) {
  const T *x = (const T*)a.x + row * a.stride, *gate = (const T*)a.gate + row * a.gate_stride;
  T* out = (T*)a.out + row * a.out_stride;
  if (!a.activated) {
    for_each_16(a.size, [&](int64_t i, auto n) { put(out + i, get(x + i, n) * get(gate + i, n), n); });
    return;
  }
  with_activation(a.activation, [&]<Activation known>() {
    for_each_16(a.size, [&](int64_t i, auto n) { put(out + i, get(x + i, n) * activated<known>(get(gate + i, n)), n); });
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
