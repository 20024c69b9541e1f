// Products with a separate matrix per head, for latent attention. The rows of a head are gathered, then multiplied like the
// rows of linear layers, so that the sums of a row do not depend on other rows.

#pragma once

#include "linear.h"

namespace penstock {
namespace PENSTOCK_ISA {

template <class T>
void linear_by_head_block(const LinearByHead& a, int64_t task) {
  thread_local std::vector<T> gathered;
  const int64_t in = a.matrix.in, blocks = ceil_div(a.rows, kRowBlock), head = task / blocks;
  const int64_t first = task % blocks * kRowBlock, rows = a.rows - first < kRowBlock ? a.rows - first : kRowBlock;
  T* const x = scratch(gathered, rows * in);
  for (int64_t r = 0; r < rows; r++)
    memcpy(x + r * in, (const T*)a.x + (first + r) * a.x_stride + head * a.x_head, in * sizeof(T));
  const Linear product{a.matrix, x, nullptr, nullptr, nullptr, 0, rows, 1, a.matrix.type};
  const Linear ready = convert_rows(product, 0, rows);
  const int64_t begin = head * a.padded;
  T* const to = (T*)a.out + first * a.out_stride + head * a.out_head;
  RowSink sink{kNoPrepare, [&](int64_t row, int64_t output, int64_t, const Outputs& values) {
                 T* out = to + row * a.out_stride;
                 for (int g = 0; g < kPanel / 16; g++) {
                   const int64_t at = output - begin + g * 16;
                   store_n(out + at, values[g], a.outputs - at);
                 }
               }};
  for (int64_t column = begin; column < begin + a.padded; column += kPanel)
    multiply_rows(ready, 0, rows, column, column + kPanel, sink);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
