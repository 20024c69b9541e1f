// The one product that everything is made of: a few rows by a panel, one output column a lane.
//
// Each output is summed over the inputs in their order, whatever the number of rows.

#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

#if defined(__AVX512F__)
constexpr int kGroups = 4;  // vectors of columns held at a time: 6 rows of 4 fill 24 of 32 registers
#else
constexpr int kGroups = 1;  // 6 rows of one, two registers each
#endif

// One input of 16 outputs (float32).
struct FloatStep {
  using T = float;
  static constexpr int kInputs = 1;
  static f32x16 weights(const float* panel) { return load(panel); }
  static f32x16 last(const float* panel) { return load(panel); }
  static f32x16 input(const float* x) { return all(*x); }
  static f32x16 last_input(const float* x) { return all(*x); }
  static f32x16 add(f32x16 acc, f32x16 x, f32x16 w) { return fma(x, w, acc); }
};

// Two inputs of 16 outputs (bfloat16), the first and then the second added.
struct PairStep {
  using T = bf16;
  static constexpr int kInputs = 2;
  static u32x16 weights(const bf16* panel) { return load_bits<u32x16>(panel); }
  // Where the number of inputs is odd, the second of the last pair is not there: whatever lies in its place is void.
  static u32x16 last(const bf16* panel) { return weights(panel) & 0xffff; }
  static u32x16 input(const bf16* x) {
    uint32_t pair;
    memcpy(&pair, x, sizeof(pair));
    return u32x16{} + pair;
  }
  static u32x16 last_input(const bf16* x) { return u32x16{} + uint32_t(x->bits); }
  static f32x16 add(f32x16 acc, u32x16 x, u32x16 w) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, as<__m512bh>(x), as<__m512bh>(w));
#else
    acc = fma(as<f32x16>(x << 16), as<f32x16>(w << 16), acc);
    return fma(as<f32x16>(x & 0xffff0000), as<f32x16>(w & 0xffff0000), acc);
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

// acc[R][G] += x[R][inputs] * panel[inputs][G * 16]; rows of x lie `ldx` apart, the panel has `width` columns. What lies
// `ahead` bytes behind what is read is asked for, so that it is there when its time comes.
template <class T, int R, int G>
inline void multiply(const T* x, int64_t ldx, const T* panel, int64_t width, int64_t inputs, f32x16 (&acc)[R][G],
                     int64_t ahead = 0) {
  using Step = typename StepOf<T>::Step;
  constexpr int n = Step::kInputs;
  const int64_t steps = inputs / n;
  for (int64_t i = 0; i < steps; i++) {
    const T* row = panel + i * width * n;
    if (ahead)
      for (int g = 0; g < G; g++) __builtin_prefetch((const char*)(row + g * 16 * n) + ahead);
    decltype(Step::weights(row)) w[G];
    for (int g = 0; g < G; g++) w[g] = Step::weights(row + g * 16 * n);
    for (int r = 0; r < R; r++) {
      auto input = Step::input(x + r * ldx + i * n);
      for (int g = 0; g < G; g++) acc[r][g] = Step::add(acc[r][g], input, w[g]);
    }
  }
  if (inputs % n) {
    const T* row = panel + steps * width * n;
    for (int g = 0; g < G; g++) {
      auto w = Step::last(row + g * 16 * n);
      for (int r = 0; r < R; r++) acc[r][g] = Step::add(acc[r][g], Step::last_input(x + r * ldx + steps * n), w);
    }
  }
}

// Calls `f` with the number of rows, 1 to 6, as a constant.
template <class F>
inline void with_rows(int64_t rows, F&& f) {
  switch (rows) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    case 4: return f.template operator()<4>();
    case 5: return f.template operator()<5>();
    default: return f.template operator()<6>();
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
