// Mixture of experts (Shazeer et al., 2017): the router, the products of each expert with the rows that chose it, wherever
// these are in the batch, and the sum of a token's experts.
//
// Rows of an expert are brought together first; from there on it is the product that all layers are made of, so that a
// row's sums depend neither on the others nor on how many they are. A token's experts are added in the order of its choices.

#pragma once

#include "linear.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Brings some of an expert's rows together, in the order of its matrix's columns, in memory of this thread's that lasts
// until the next call.
inline Linear brought_together(const Choices& a, int64_t first, int64_t end) {
  thread_local std::vector<Line> x_memory;
  thread_local std::vector<float> scales_memory, sums_memory;
  const Matrix& m = a.matrix;
  const int64_t rows = end - first, groups = groups_of(m), stride = sums_of(m);
  Linear near{m, nullptr, nullptr, nullptr, nullptr, 0, rows, a.panels, a.out_type, a.activation};
  with_format(m, [&]<class F>() {
    using X = typename F::Step::X;
    const int64_t width = F::kIntegers ? (m.in + 7) / 8 * 8 : m.in;
    const int64_t of_row = m.x_in_groups ? groups : 1;
    X* const x = (X*)with_room(x_memory, ceil_div(rows * width * sizeof(X), sizeof(Line)));
    float* const scales = with_room(scales_memory, rows * of_row);
    static_assert(sizeof(int32_t) == sizeof(float));
    auto* const of_groups = (int32_t*)with_room(sums_memory, rows * stride);  // or floats
    near.x = x, near.x_scales = scales, near.x_sums = of_groups;
    for (int64_t i = 0; i < rows; i++) {
      const int64_t row = a.choices[first + i] / a.choices_per_row;
      const X* from = (const X*)a.x + row * width;
      X* to = x + i * width;
      if (F::kIntegers) memcpy(scales + i * of_row, a.x_scales + row * of_row, of_row * sizeof(float));
      if (!m.order) {
        memcpy(to, from, width * sizeof(X));
        if (a.x_sums) memcpy(of_groups + i * stride, (const int32_t*)a.x_sums + row * stride, stride * sizeof(int32_t));
        continue;
      }
      for (int64_t j = 0; j < m.in; j++) to[j] = from[m.order[j]];
      for (int64_t j = m.in; j < width; j++) to[j] = X{};
      if constexpr (F::kIntegers) {
        for (int64_t group = 0; group < groups; group++) {
          int32_t sum = 0;
          for (int64_t j = group * m.group; j < m.in && j < (group + 1) * m.group; j++) sum += to[j];
          of_groups[i * groups + group] = sum;
        }
      } else if (m.offsets.at) {
        sum_groups_row<X>({x, (float*)of_groups, m.in, m.group, m.type}, i);
      }
    }
  });
  return near;
}

template <class Out, bool gated>
void expert_block(const Choices& a, int64_t task) {
  const int64_t outputs = a.matrix.outputs / (gated ? 2 : 1);
  const Linear all{a.matrix, nullptr, nullptr, nullptr, nullptr, 0, a.count, a.panels, a.out_type};
  Share s = share_of(all, outputs, task);
  const Linear near = brought_together(a, s.first, s.end);
  const int64_t first = s.first;
  s.first = 0, s.end -= first;
  const Linear ready = prepared(near, 0, s.end);
  auto out = [&](int64_t row) { return (Out*)a.out + a.choices[first + row] * a.out_stride; };
  if constexpr (gated) return gated_panels<Out>(ready, s, out);
  RowSink sink{kUnprepared, [&](int64_t row, int64_t output, int64_t count, const Outputs& values) {
                 for (int g = 0; g * 16 < count; g++) store_some(out(row) + output + g * 16, values[g], count - g * 16);
               }};
  for (int64_t column = s.column; column < s.until; column += kPanel)
    multiply_rows(ready, 0, s.end, column, column + kPanel, sink);
}

// What is no number is never above another, so that each choice is an expert whatever the logits are.
inline int64_t best_of(const float* scores, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++)
    if (scores[i] > scores[best] || (scores[best] != scores[best] && scores[i] == scores[i])) best = i;
  return best;
}

inline float group_score(const Router& a, const float* scores, int64_t count) {
  const int64_t best = best_of(scores, count);
  if (!a.best_two) return scores[best];
  float second = kNever;
  for (int64_t i = 0; i < count; i++)
    if (i != best && scores[i] > second) second = scores[i];
  return scores[best] + second;
}

inline void route_token(const Router& a, int64_t token) {
  thread_local std::vector<float> scores, choice;
  const int64_t n = a.experts, each = n / a.groups;
  const float* logits = a.logits + token * n;
  scores.resize(n), choice.resize(n);
  const float most = a.sigmoid ? 0.0f : logits[best_of(logits, n)];
  f32x16 totals = {};
  by_sixteen(n, [&](int64_t i, auto count) {
    const f32x16 x = get(logits + i, count);
    const f32x16 e = a.sigmoid ? all(1.0f) / (exp(-x) + 1.0f) : exp(x - most);
    put(scores.data() + i, e, count);
    totals += load_some(scores.data() + i, count);
  });
  if (const float total = sum(totals); !a.sigmoid)
    for (float& score : scores) score /= total;
  for (int64_t i = 0; i < n; i++) choice[i] = a.bias ? scores[i] + a.bias[i] : scores[i];
  if (a.top_groups < a.groups) {
    thread_local std::vector<float> of_groups;
    thread_local std::vector<char> kept;
    of_groups.resize(a.groups), kept.assign(a.groups, 0);
    for (int64_t g = 0; g < a.groups; g++) of_groups[g] = group_score(a, choice.data() + g * each, each);
    for (int64_t i = 0; i < a.top_groups; i++) {
      const int64_t g = best_of(of_groups.data(), a.groups);
      kept[g] = 1, of_groups[g] = kNever;
    }
    for (int64_t i = 0; i < n; i++)
      if (!kept[i / each]) choice[i] = kNever;
  }
  float* weights = a.weights + token * a.top_k;
  float total = 0;
  for (int64_t j = 0; j < a.top_k; j++) {
    const int64_t id = best_of(choice.data(), n);
    choice[id] = kNever;
    a.ids[token * a.top_k + j] = id;
    total += weights[j] = scores[id];
  }
  const float divisor = !a.renormalize ? 1.0f : total < a.least_sum ? a.least_sum : total;
  for (int64_t j = 0; j < a.top_k; j++) weights[j] = weights[j] / divisor * a.scale;
}

template <class T>
void combine_token(const Combine& a, int64_t token) {
  const T* x = (const T*)a.x + token * a.top_k * a.size;
  const float* weights = a.weights + token * a.top_k;
  const T* shared = (const T*)a.shared + token * a.shared_stride;
  const float share = a.gate ? 1.0f / (exp(all(-a.gate[token])) + 1.0f)[0] : 1.0f;
  T* out = (T*)a.out + token * a.out_stride;
  by_sixteen(a.size, [&](int64_t i, auto count) {
    f32x16 total = {};
    for (int64_t j = 0; j < a.top_k; j++) total = fma(get(x + j * a.size + i, count), all(weights[j]), total);
    if (a.shared) total += get(shared + i, count) * share;
    put(out + i, total, count);
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
