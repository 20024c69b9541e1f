// The one product that everything is made of: a few rows by a panel, one output column a lane.
//
// Each output is summed over the inputs in their order, whatever the number of rows. A step is what a vector of weights
// holds: some inputs of 16 outputs.

#pragma once

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

#if defined(__AVX512F__)
constexpr int kGroups = 4;  // vectors of columns held at a time: 6 rows of 4 fill 24 of 32 registers
#else
constexpr int kGroups = 1;  // 6 rows of one, two registers each
#endif

// Whether there is a matrix unit (amx.h).
#if defined(__AMX_TILE__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// One input of float32.
struct FloatStep {
  using X = float;
  using Sum = f32x16;
  static constexpr int kInputs = 1, kBytes = 64;
  static f32x16 weights(const char* at) { return load((const float*)at); }
  static f32x16 last(const char* at) { return weights(at); }
  static f32x16 input(const float* x) { return all(*x); }
  static f32x16 add(f32x16 sum, f32x16 x, f32x16 w) { return fma(x, w, sum); }
};

// Two inputs of bfloat16, the first and then the second added.
struct PairStep {
  using X = bf16;
  using Sum = f32x16;
  static constexpr int kInputs = 2, kBytes = 64;
  static u32x16 weights(const char* at) { return load_bits<u32x16>(at); }
  // Where the number of inputs is odd, the second of the last pair is not there: whatever lies in its place is void.
  static u32x16 last(const char* at) { return weights(at) & 0xffff; }
  static u32x16 input(const bf16* x) { return all_of_four(x); }
  static f32x16 add(f32x16 sum, u32x16 x, u32x16 w) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, as<__m512bh>(x), as<__m512bh>(w));
#else
    sum = fma(as<f32x16>(x << 16), as<f32x16>(w << 16), sum);
    return fma(as<f32x16>(x & 0xffff0000), as<f32x16>(w & 0xffff0000), sum);
#endif
  }
};

template <class T>
struct StepOf;
template <>
struct StepOf<float> {
  using Step = FloatStep;
};
template <>
struct StepOf<bf16> {
  using Step = PairStep;
};

// Unrolled before anything else is decided: else sums that fit into registers end up on the stack.
#define PENSTOCK_UNROLL _Pragma("GCC unroll 32")
#define PENSTOCK_INLINE __attribute__((always_inline))

// What will be read before long: with each step its next `lines` are asked for; by two of them, since a line's neighbour
// comes with it, and into the second cache, as in the first they would wait for their place before what is read now.
// Processors with a matrix unit want every line asked for, and are fastest where that is the first cache.
struct Soon {
  const char* at = nullptr;
  int64_t lines = 0;
  bool near = false;
};

// sums[R][G] += x[R][inputs] * panel[inputs][G * 16]; rows of x lie `ldx` apart, steps of the panel `stride` bytes.
template <class Step, int R, int G>
PENSTOCK_INLINE inline void multiply(const typename Step::X* x, int64_t ldx, const char* panel, int64_t stride, int64_t inputs,
                     typename Step::Sum (&sums)[R][G], Soon soon = {}) {
  using X = typename Step::X;
  constexpr int n = Step::kInputs, bytes = Step::kBytes;
  const int64_t steps = inputs / n;
  for (int64_t i = 0; i < steps; i++) {
    const char* at = panel + i * stride;
    if (soon.lines) {
      if constexpr (kHasTiles) {
        for (int64_t line = 0; line < soon.lines; line++) __builtin_prefetch(soon.at + line * 64, 0, 3);
      } else {
        __builtin_prefetch(soon.at, 0, 2);
        __builtin_prefetch(soon.at + soon.lines / 2 * 64, 0, 2);
      }
      soon.at += soon.lines * 64;
    }
    decltype(Step::weights(at)) w[G];
    PENSTOCK_UNROLL for (int g = 0; g < G; g++) w[g] = Step::weights(at + g * bytes);
    PENSTOCK_UNROLL for (int r = 0; r < R; r++) {
      const auto input = Step::input(x + r * ldx + i * n);
      PENSTOCK_UNROLL for (int g = 0; g < G; g++) sums[r][g] = Step::add(sums[r][g], input, w[g]);
    }
  }
  if (const int64_t rest = inputs % n) {
    const char* at = panel + steps * stride;
    for (int r = 0; r < R; r++) {
      X padded[n] = {};
      memcpy(padded, x + r * ldx + steps * n, rest * sizeof(X));
      const auto input = Step::input(padded);
      for (int g = 0; g < G; g++) sums[r][g] = Step::add(sums[r][g], input, Step::last(at + g * bytes));
    }
  }
}

// Calls `f` with the number of rows, or `Most` if there are more, as a constant.
template <int Most = kTileRows, class F>
inline void with_rows(int64_t rows, F&& f) {
  if constexpr (Most > 1)
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  f.template operator()<Most>();
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
