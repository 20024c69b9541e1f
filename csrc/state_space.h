// Ops of state space models (Mamba) that linear attention does not have.

#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// A row times SiLU of its gate.
template <class T>
void multiply_silu_row(const MultiplyGate& a, int64_t row) {
  const T *x = (const T*)a.x + row * a.stride, *gate = (const T*)a.gate + row * a.gate_stride;
  T* out = (T*)a.out + row * a.out_stride;
  for_each_16(a.size, [&](int64_t i, auto n) {
    put(out + i, get(x + i, n) * activated<Activation::silu>(get(gate + i, n)), n);
  });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
