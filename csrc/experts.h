// Mixture of experts (Shazeer et al., 2017): router, products of each expert with its assigned rows, and weighted sum of the
// outputs of a token's experts.
//
// The rows of an expert are gathered from the batch, then multiplied like the rows of linear layers, so that the sums of a
// row do not depend on other rows or their number. The outputs of a token's experts are added in the order of its expert
// ids.

#pragma once

#include "linear.h"
#include "states.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Gathers some of an expert's rows, with inputs in the order of its matrix's columns, in thread-local memory that is valid
// until the next call.
inline Linear gather_expert_rows(const ExpertLinear& a, int64_t first, int64_t end) {
  thread_local std::vector<CacheLine> x_memory;
  thread_local std::vector<float> scales_memory, sums_memory;
  const Matrix& m = a.matrix;
  const int64_t rows = end - first, groups = num_groups(m), stride = num_sums(m);
  Linear gathered{m, nullptr, nullptr, nullptr, nullptr, 0, rows, a.panels, a.out_type, a.activation};
  with_format(m, [&]<class F>() {
    using X = typename F::Step::X;
    const int64_t width = F::kIntegers ? (m.in + 7) / 8 * 8 : m.in;
    const int64_t scales_per_row = m.x_in_groups ? groups : 1;
    X* const x = (X*)scratch(x_memory, ceil_div(rows * width * sizeof(X), sizeof(CacheLine)));
    float* const scales = scratch(scales_memory, rows * scales_per_row);
    static_assert(sizeof(int32_t) == sizeof(float));
    auto* const group_sums = (int32_t*)scratch(sums_memory, rows * stride);  // floats if the format has no integers
    gathered.x = x, gathered.x_scales = scales, gathered.x_sums = group_sums;
    for (int64_t i = 0; i < rows; i++) {
      const int64_t row = a.assignments[first + i] / a.assignments_per_row;
      const X* from = (const X*)a.x + row * width;
      X* to = x + i * width;
      if (F::kIntegers)
        memcpy(scales + i * scales_per_row, a.x_scales + row * scales_per_row, scales_per_row * sizeof(float));
      if (!m.order) {
        memcpy(to, from, width * sizeof(X));
        if (a.x_sums) memcpy(group_sums + i * stride, (const int32_t*)a.x_sums + row * stride, stride * sizeof(int32_t));
        continue;
      }
      for (int64_t j = 0; j < m.in; j++) to[j] = from[m.order[j]];
      for (int64_t j = m.in; j < width; j++) to[j] = X{};
      if constexpr (F::kIntegers) {
        for (int64_t group = 0; group < groups; group++) {
          int32_t sum = 0;
          for (int64_t j = group * m.group; j < m.in && j < (group + 1) * m.group; j++) sum += to[j];
          group_sums[i * groups + group] = sum;
        }
      } else if (m.offsets.data) {
        sum_groups_row<X>({x, (float*)group_sums, m.in, m.group, m.type}, i);
      }
    }
  });
  return gathered;
}

template <class Out, bool gated>
void expert_block(const ExpertLinear& a, int64_t task) {
  const int64_t outputs = a.matrix.outputs / (gated ? 2 : 1);
  const Linear whole{a.matrix, nullptr, nullptr, nullptr, nullptr, 0, a.count, a.panels, a.out_type};
  TaskRange s = task_range(whole, outputs, task);
  const Linear gathered = gather_expert_rows(a, s.first, s.end);
  const int64_t first = s.first;
  s.first = 0, s.end -= first;
  const Linear ready = convert_rows(gathered, 0, s.end);
  auto out = [&](int64_t row) { return (Out*)a.out + a.assignments[first + row] * a.out_stride; };
  if constexpr (gated) return gated_panels<Out>(ready, s, out);
  RowSink sink{kNoPrepare, [&](int64_t row, int64_t output, int64_t count, const Outputs& values) {
                 for (int g = 0; g * 16 < count; g++) store_n(out(row) + output + g * 16, values[g], count - g * 16);
               }};
  for (int64_t column = s.column; column < s.column_end; column += kPanel)
    multiply_rows(ready, 0, s.end, column, column + kPanel, sink);
}

// Index of the maximum, ignoring NaN, so that each selected id is valid for any logits.
inline int64_t index_of_max(const float* scores, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++)
    if (scores[i] > scores[best] || (scores[best] != scores[best] && scores[i] == scores[i])) best = i;
  return best;
}

inline float group_score(const Router& a, const float* scores, int64_t count) {
  const int64_t best = index_of_max(scores, count);
  if (!a.sum_top2) return scores[best];
  float second = kNegInf;
  for (int64_t i = 0; i < count; i++)
    if (i != best && scores[i] > second) second = scores[i];
  return scores[best] + second;
}

inline void route_token(const Router& a, int64_t token) {
  thread_local std::vector<float> scores, biased;
  const int64_t n = a.experts, group_size = n / a.groups;
  const float* logits = a.logits + token * n;
  scores.resize(n), biased.resize(n);
  const float maximum = a.function == Scores::softmax ? logits[index_of_max(logits, n)] : 0.0f;
  f32x16 totals = {};
  for_each_16(n, [&](int64_t i, auto count) {
    const f32x16 x = get(logits + i, count);
    const f32x16 e = a.function == Scores::softmax   ? exp(x - maximum)
                     : a.function == Scores::sigmoid ? broadcast(1.0f) / (exp(-x) + 1.0f)
                                                     : softplus(x);
    put(scores.data() + i, e, count);
    totals += load_n(scores.data() + i, count);
  });
  if (const float total = sum(totals); a.function == Scores::softmax)
    for (float& score : scores) score /= total;
  if (a.function == Scores::sqrtsoftplus)
    for (float& score : scores) score = __builtin_sqrtf(score);
  for (int64_t i = 0; i < n; i++) biased[i] = a.bias ? scores[i] + a.bias[i] : scores[i];
  if (a.top_groups < a.groups) {
    thread_local std::vector<float> group_scores;
    thread_local std::vector<char> kept;
    group_scores.resize(a.groups), kept.assign(a.groups, 0);
    for (int64_t g = 0; g < a.groups; g++) group_scores[g] = group_score(a, biased.data() + g * group_size, group_size);
    for (int64_t i = 0; i < a.top_groups; i++) {
      const int64_t g = index_of_max(group_scores.data(), a.groups);
      kept[g] = 1, group_scores[g] = kNegInf;
    }
    for (int64_t i = 0; i < n; i++)
      if (!kept[i / group_size]) biased[i] = kNegInf;
  }
  float* weights = a.weights + token * a.top_k;
  float total = 0;
  for (int64_t j = 0; j < a.top_k; j++) {
    const int64_t id = a.table ? a.table[a.token_ids[token] * a.top_k + j] : index_of_max(biased.data(), n);
    biased[id] = kNegInf;
    a.ids[token * a.top_k + j] = id;
    total += weights[j] = scores[id];
  }
  const float divisor = !a.renormalize ? 1.0f : (total < a.min_sum ? a.min_sum : total) + a.added_sum;
  for (int64_t j = 0; j < a.top_k; j++) {
    const float factor = a.factors ? a.factors[a.ids[token * a.top_k + j]] : 1.0f;
    weights[j] = weights[j] / divisor * a.scale * factor;
  }
}

template <class T>
void combine_token(const Combine& a, int64_t token) {
  const T* x = (const T*)a.x + token * a.top_k * a.size;
  const float* weights = a.weights + token * a.top_k;
  const T* shared = (const T*)a.shared + token * a.shared_stride;
  const float share = a.gate ? 1.0f / (exp(broadcast(-a.gate[token])) + 1.0f)[0] : 1.0f;
  T* out = (T*)a.out + token * a.out_stride;
  for_each_16(a.size, [&](int64_t i, auto count) {
    f32x16 total = {};
    for (int64_t j = 0; j < a.top_k; j++) total = fma(get(x + j * a.size + i, count), broadcast(weights[j]), total);
    if (a.shared) total += get(shared + i, count) * share;
    put(out + i, total, count);
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
