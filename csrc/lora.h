// LoRA (Hu et al., 2021): products of the rows that use an adapter and its two matrices. The rows are gathered from the
// batch, then multiplied like the rows of linear layers, so that the sums of a row do not depend on other rows.

#pragma once

#include "linear.h"

namespace penstock {
namespace PENSTOCK_ISA {

template <class T, bool up>
void lora_block(const LoRA& a, int64_t task) {
  thread_local std::vector<T> gathered;
  const int64_t in = a.matrix.in;
  Linear product{a.matrix, nullptr, nullptr, nullptr, nullptr, 0, a.count, a.panels, a.matrix.type};
  const TaskRange s = task_range(product, a.matrix.outputs, task);
  const int64_t rows = s.end - s.first;
  T* const x = scratch(gathered, rows * in);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t from = up ? s.first + i : a.rows[s.first + i];
    memcpy(x + i * in, (const T*)a.x + from * a.x_stride, in * sizeof(T));
  }
  product.x = x;
  const Linear ready = convert_rows(product, 0, rows);
  RowSink sink{kNoPrepare, [&](int64_t row, int64_t output, int64_t count, const Outputs& values) {
                 const int64_t to = up ? a.rows[s.first + row] : s.first + row;
                 T* out = (T*)a.out + to * a.out_stride + output;
                 for (int g = 0; g * 16 < count; g++) {
                   f32x16 value = values[g];
                   if (up) value = load_n(out + g * 16, count - g * 16) + value * a.scale;
                   store_n(out + g * 16, value, count - g * 16);
                 }
               }};
  for (int64_t column = s.column; column < s.column_end; column += kPanel)
    multiply_rows(ready, 0, rows, column, column + kPanel, sink);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
