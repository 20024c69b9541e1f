// Benchmarks of this machine's limits: arithmetic on registers only, and memory reads only.

#pragma once

#include "amx.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Prevents the compiler from removing the computation of a value.
template <class V>
inline void opaque(V& v) {
  if constexpr (IsVectorPair<V>::value) {
    opaque(v.low);
    opaque(v.high);
  } else {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(v));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(v));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(v));
#else
    asm volatile("" : "+m"(v));
#endif
  }
}

// Benchmark of products. Returns the number of operations, two per multiply-add.
template <class Step>
int64_t run_dots(int64_t steps) {
  if constexpr (UsesAmx<Step>::value) {
    return run_dots_amx<Step>(steps / 4);  // an AMX step does much more work than a vector step
  } else {
    constexpr int n = 12;
    alignas(64) static const char panel[64] = {};
    typename Step::In x[Step::kInputs] = {};
    auto w = Step::weights(panel);  // weights of the first part of a step
    auto input = Step::input(x);
    opaque(input);
    typename Step::Sum sums[n] = {};
    for (int64_t i = 0; i < steps; i++) {
      PENSTOCK_FOR (int j = 0; j < n; j++) {
        opaque(w);  // prevents the compiler from moving loop-invariant work out of the loop
        sums[j] = Step::add(sums[j], input, w);
        opaque(sums[j]);
      }
    }
    return steps * n * kWidth * (Step::kInputs / Step::kParts) * 2;
  }
}

inline void read(const Read& a, int64_t task) {
  u32x16 sums[4] = {};
  const char* from = (const char*)a.from + task * a.size;
  for (int64_t i = 0; i < a.size; i += 256) {
    PENSTOCK_FOR (int j = 0; j < 4; j++) {
      __builtin_prefetch(from + i + j * 64 + kPrefetchDistance, 0, kHasAmx ? 3 : 2);
      sums[j] += load_bits<u32x16>(from + i + j * 64);
    }
  }
  for (auto& sum : sums) opaque(sum);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
