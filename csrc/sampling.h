// Sampling of a token of each row of logits, with temperature, min-p, top-k and top-p.
//
// The weight of a token is e^((logit - largest logit) / temperature), in float32. Sums are in float64, in an order that depends
// on the row only, and no multiplication is fused with an addition. Therefore a row's token is the same for every instruction
// set.

#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

using f64x8 = Vector<double, 8>;

constexpr int64_t kWeightBlock = 512;  // weights of a block, which is summed separately
constexpr double kMinTemperature = 1e-5;
constexpr float kMinWeight = 0x1.000002p-126f;  // the smallest weight that is not replaced by 0

// Loads 16 logits, with minus infinity in the lanes beyond `count`.
inline f32x16 load_logits(const float* from, int64_t count) {
  return count >= 16 ? load(from) : select(iota() < int32_t(count), load_n(from, count), broadcast(kNegInf));
}

// Largest value of a row; NaN if a value is NaN.
inline float largest_logit(const float* x, int64_t size) {
  constexpr int64_t kVectors = 4;
  f32x16 largest[kVectors];
  i32x16 magnitudes[kVectors] = {};  // largest bits without the sign; a NaN has more than infinity
  for (auto& each : largest) each = broadcast(kNegInf);
  for (int64_t i = 0; i < size; i += 16 * kVectors)
    for (int64_t g = 0; g < kVectors; g++) {
      const f32x16 v = load_logits(x + i + g * 16, size - i - g * 16);
      const i32x16 bits = bitcast<i32x16>(v) & 0x7fffffff;
      largest[g] = max(largest[g], v);
      magnitudes[g] = select(bits > magnitudes[g], bits, magnitudes[g]);
    }
  i32x16 is_nan = magnitudes[0] > 0x7f800000;
  for (int64_t g = 1; g < kVectors; g++) {
    largest[0] = max(largest[0], largest[g]);
    is_nan |= magnitudes[g] > 0x7f800000;
  }
  return reduce(is_nan, [](auto a, auto b) { return a | b; }) ? __builtin_nanf("") : reduce_max(largest[0]);
}

// First position with a value of at least `bound`, which exists.
inline int64_t first_at_least(const float* x, int64_t size, float bound) {
  int64_t i = 0;
  while (i + 16 <= size && !any_at_least(load(x + i), bound)) i += 16;
  while (x[i] < bound) i++;
  return i;
}

// 2^x for x <= 0, within 3 ulp; 2^-126 for x below -126, and for NaN.
inline f32x16 exp2_unfused(f32x16 x) {
  const f32x16 magic = broadcast(12582912.0f);  // adding it rounds to an integer, in the low bits of the sum
  const f32x16 clamped = max(x, broadcast(-126.0f)), shifted = clamped + magic, r = clamped - (shifted - magic);
  f32x16 p = r * 1.5403530393e-4f + 1.3333558146e-3f;  // coefficients log(2)^k / k!
  p = p * r + 9.6181291076e-3f;
  p = p * r + 5.5504108665e-2f;
  p = p * r + 2.4022650696e-1f;
  p = p * r + 6.9314718056e-1f;
  p = p * r + 1.0f;
  return p * bitcast<f32x16>((bitcast<u32x16>(shifted) << 23) + 0x3f800000);
}

// Adds weights in blocks of kWeightBlock. Writes the sum of each block to `sums`, and returns the sum of these in order.
// `get(i)`: weights from number i on, with zeros beyond `count`.
template <class F>
inline double sum_blocks(int64_t count, double* sums, F&& get) {
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kWeightBlock) {
    f64x8 low = {}, high = {};
    for (int64_t i = begin; i < std::min(begin + kWeightBlock, count); i += 16) {
      const auto parts = halves(get(i));
      low += convert<f64x8>(parts.low);
      high += convert<f64x8>(parts.high);
    }
    *sums = sum(low + high);
    total += *sums++;
  }
  return total;
}

// First position at which the cumulative sum of weights exceeds `threshold`, or the last one with a weight above 0 if rounding
// leaves no such position. `sums`: sums of the blocks.
inline int64_t find_position(const float* weights, int64_t count, const double* sums, double threshold) {
  int64_t block = 0;
  double before = 0.0, end = 0.0;
  for (int64_t i = 0; i * kWeightBlock < count && end <= threshold; i++) {
    if (sums[i] > 0.0) {
      block = i;
      before = end;
    }
    end += sums[i];
  }
  int64_t found = block * kWeightBlock;
  for (int64_t i = found; i < std::min((block + 1) * kWeightBlock, count) && before <= threshold; i++)
    if (weights[i] > 0.0f) {
      found = i;
      before += weights[i];
    }
  return found;
}

// --- Truncation ------------------------------------------------------------------------------------------------------

// Weights of tokens in the order of their ids. Weights are 0, or at least `least`.
struct Weights {
  float* weights;
  int32_t* ids;
  int64_t count;
  float least;
};

// Copies the weights from `low` up to but not including `high` to `out`, which may be `from`, and their positions to
// `positions`, unless it is null. Both have space for `count` elements, rounded up to 16. Returns the number of copied weights.
inline int64_t copy_between(const float* from, int64_t count, float low, float high, float* out, int32_t* positions) {
  int64_t copied = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 v = load_n(from + i, count - i);
    if (!any_at_least(v, low)) continue;
#if defined(__AVX512F__)
    const __mmask16 mask = _mm512_cmp_ps_mask((__m512)v, (__m512)broadcast(low), _CMP_GE_OQ) &
                           _mm512_cmp_ps_mask((__m512)v, (__m512)broadcast(high), _CMP_LT_OQ);
    store(out + copied, (f32x16)_mm512_maskz_compress_ps(mask, (__m512)v));
    if (positions) store_bits(positions + copied, _mm512_maskz_compress_epi32(mask, (__m512i)(iota() + int32_t(i))));
    copied += __builtin_popcount(mask);
#else
    float values[16];
    store(values, v);
    for (int64_t lane = 0; lane < 16; lane++) {
      out[copied] = values[lane];
      if (positions) positions[copied] = int32_t(i + lane);
      copied += (values[lane] >= low) & (values[lane] < high);
    }
#endif
  }
  return copied;
}

// Smallest weight of which tokens are kept, and the amount of all larger weights.
struct Edge {
  float weight;
  double above;
};

// Finds the edge at which the amount of the largest weights reaches `limit`: the sum of the weights if `by_mass`, else their
// number. Each pass divides the range of the edge's bits by 4 (numbers that are not negative have the order of their bits), and
// drops the weights outside. If the limit is not reached, the edge is `a.least`.
template <bool by_mass>
inline Edge find_edge(const Weights& a, double limit) {
  thread_local std::vector<float> memory;
  float* const members = scratch(memory, ceil_div(a.count, 16) * 16);  // weights in the range
  uint32_t low = bitcast<uint32_t>(a.least), high = bitcast<uint32_t>(1.0f) + 1;
  double above = 0.0;
  int64_t count = copy_between(a.weights, a.count, a.least, 2.0f, members, nullptr);
  constexpr int kBounds = 3;
  while (high - low > 1) {
    const uint32_t step = std::max<uint32_t>((high - low) / (kBounds + 1), 1);
    f64x8 sums[kBounds] = {}, bounds[kBounds];
    for (int b = 0; b < kBounds; b++) bounds[b] = f64x8{} + double(bitcast<float>(low + (b + 1) * step));
    for (int64_t i = 0; i < count; i += 16) {
      const auto parts = halves(load_n(members + i, count - i));
      for (const f64x8& v : {convert<f64x8>(parts.low), convert<f64x8>(parts.high)})
        for (int b = 0; b < kBounds; b++) sums[b] += select(v >= bounds[b], by_mass ? v : f64x8{} + 1.0, f64x8{});
    }
    const uint32_t first = low;
    for (int b = 0; b < kBounds && low == first + b * step; b++) {
      const double amount = above + sum(sums[b]);
      if (amount >= limit) {
        low += step;
      } else {
        high = std::min(high, low + step);
        above = amount;
      }
    }
    count = copy_between(members, count, bitcast<float>(low), bitcast<float>(high), members, nullptr);
  }
  return {bitcast<float>(low), above};
}

// Keeps the largest weights until their number, or with `by_mass` their sum, reaches `limit`, and sets all others to 0. Ties go
// to the lower token id. Returns the sum of the kept weights; `sums`: see sum_blocks.
template <bool by_mass>
inline double truncate(Weights& a, double limit, double* sums) {
  const Edge edge = find_edge<by_mass>(a, limit);
  const double amount = by_mass ? double(edge.weight) : 1.0;
  int64_t ties = 0;
  a.least = edge.weight;
  return sum_blocks(a.count, sums, [&](int64_t i) {
    const f32x16 v = load_n(a.weights + i, a.count - i);
    f32x16 kept = select(v > edge.weight, v, f32x16{});
    if (any_at_least(v - kept, edge.weight)) {
      float values[16];
      store(values, kept);
      for (int lane = 0; lane < 16; lane++)
        if (v[lane] == edge.weight && edge.above + double(ties++) * amount < limit) values[lane] = edge.weight;
      kept = load(values);
    }
    store_n(a.weights + i, kept, a.count - i);
    return kept;
  });
}

// Lower bound of the k-th largest weight: the k-th largest of the maxima of groups of weights. A group is a lane of a block.
inline float bound_of_top_k(const Weights& a, int64_t k) {
  thread_local std::vector<float> memory;
  const int64_t groups = ceil_div(a.count, kWeightBlock) * 16;
  if (k > groups) return a.least;
  float* const largest = scratch(memory, groups);
  for (int64_t begin = 0; begin < a.count; begin += kWeightBlock) {
    f32x16 lanes = {};
    for (int64_t i = begin; i < std::min(begin + kWeightBlock, a.count); i += 16) lanes = max(lanes, load(a.weights + i));
    store(largest + begin / kWeightBlock * 16, lanes);
  }
  return find_edge<false>({largest, nullptr, groups, a.least}, double(k)).weight;
}

// Applies top-k and top-p to the weights of a vocabulary, with the sum `total`. First selects the weights that may be kept,
// which usually are few. Returns the sum of the kept weights; `sums`: see sum_blocks.
inline double apply_truncation(Weights& a, int64_t k, double p, double total, double* sums) {
  const bool by_count = k > 0 && k < a.count;
  // The weights below this bound have together at most half the mass that top-p removes.
  const double bound = by_count ? bound_of_top_k(a, k) : 0.5 * (1.0 - p) * total / double(a.count);
  a.least = std::max(a.least, float(bound));
  a.count = copy_between(a.weights, a.count, a.least, 2.0f, a.weights, a.ids);
  if (by_count) total = truncate<false>(a, double(k), sums);
  return p < 1.0 ? truncate<true>(a, std::max(p * total, double(kMinWeight)), sums) : total;
}

// Samples a token. With temperature 0, this is the first one with the largest logit.
inline void sample_row(const SampleRandom& s, int64_t row) {
  const float* logits = s.logits + row * s.stride;
  const float largest = s.largest[row] = largest_logit(logits, s.size);
  s.out[row] = 0;  // any token, if there is no distribution
  if (!std::isfinite(largest)) return;
  if (s.temperature[row] == 0.0) {
    s.out[row] = first_at_least(logits, s.size, largest);
    return;
  }
  thread_local std::vector<float> weight_memory;
  thread_local std::vector<int32_t> id_memory;
  thread_local std::vector<double> sum_memory;
  const int64_t padded = ceil_div(s.size, 16) * 16;
  float* const weights = scratch(weight_memory, padded);
  double* const sums = scratch(sum_memory, ceil_div(s.size, kWeightBlock));
  const float scale = float(1.4426950408889634 / std::max(s.temperature[row], kMinTemperature));  // log2(e) / temperature
  const float min_weight = std::max(float(s.min_p[row]), kMinWeight);
  double total = sum_blocks(s.size, sums, [&](int64_t i) {
    const f32x16 w = exp2_unfused((load_logits(logits + i, s.size - i) - largest) * scale);
    const f32x16 kept = select(w >= min_weight, w, f32x16{});
    store(weights + i, kept);
    return kept;
  });
  if (total == 0.0) return;
  const int64_t k = int64_t(s.top_k[row]);
  const double p = std::max(s.top_p[row], 0.0);
  if ((k <= 0 || k >= s.size) && p >= 1.0) {
    s.out[row] = find_position(weights, s.size, sums, s.uniform[row] * total);
    return;
  }
  Weights a = {weights, scratch(id_memory, padded), s.size, kMinWeight};
  total = apply_truncation(a, k, p, total, sums);
  s.out[row] = a.ids[find_position(a.weights, a.count, sums, s.uniform[row] * total)];
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
