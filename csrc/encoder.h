// Activation functions, as encoders have them: row by row.

#pragma once

#include "elementwise.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The error function, to 2 in 10^7 (Abramowitz and Stegun, 1964, 7.1.26).
inline f32x16 erf(f32x16 x) {
  const f32x16 size = max(x, -x), t = inverse(fma(size, all(0.3275911f), all(1.0f)));
  f32x16 p = all(1.061405429f);
  p = fma(p, t, all(-1.453152027f));
  p = fma(p, t, all(1.421413741f));
  p = fma(p, t, all(-0.284496736f));
  p = fma(p, t, all(0.254829592f));
  const f32x16 above = all(1.0f) - p * t * exp(-size * size);
  return choose(x < 0.0f, -above, above);
}

inline f32x16 apply(Function function, f32x16 x) {
  switch (function) {
    case Function::gelu: return 0.5f * x * (erf(x * 0.70710678118654752f) + 1.0f);
    case Function::gelu_tanh: return 0.5f * x * (tanh(0.79788456080286536f * fma(0.044715f * x * x, x, x)) + 1.0f);
    case Function::relu: return max(x, f32x16{});
    case Function::silu: return x * inverse(exp(-x) + 1.0f);
    default: return tanh(x);
  }
}

template <class T>
void pointwise_row(const Pointwise& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.stride;
  T* out = (T*)a.out + row * a.out_stride;
  by_sixteen(a.size, [&](int64_t i, auto n) {
    const f32x16 y = apply(a.function, get(x + i, n));
    put(out + i, a.gated ? y * get(x + a.size + i, n) : y, n);
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
