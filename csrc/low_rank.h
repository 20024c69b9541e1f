// What adapters add to linear layers (Hu et al., 2021): rows of one adapter, wherever they are in the batch, by its two
// matrices. They are brought together first; from there on it is the product that all layers are made of, so that a row's
// sums do not depend on the others.

#pragma once

#include "linear.h"

namespace penstock {
namespace PENSTOCK_ISA {

template <class T, bool up>
void low_rank_block(const LowRank& a, int64_t task) {
  thread_local std::vector<T> near;
  const int64_t in = a.matrix.in;
  Linear product{a.matrix, nullptr, nullptr, nullptr, nullptr, 0, a.count, a.panels, a.matrix.type};
  const Share s = share_of(product, a.matrix.outputs, task);
  const int64_t rows = s.end - s.first;
  T* const x = with_room(near, rows * in);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t from = up ? s.first + i : a.rows[s.first + i];
    memcpy(x + i * in, (const T*)a.x + from * a.x_stride, in * sizeof(T));
  }
  product.x = x;
  const Linear ready = prepared(product, 0, rows);
  RowSink sink{kUnprepared, [&](int64_t row, int64_t output, int64_t count, const Outputs& values) {
                 const int64_t to = up ? a.rows[s.first + row] : s.first + row;
                 T* out = (T*)a.out + to * a.out_stride + output;
                 for (int g = 0; g * 16 < count; g++) {
                   f32x16 value = values[g];
                   if (up) value = load_some(out + g * 16, count - g * 16) + value * a.scale;
                   store_some(out + g * 16, value, count - g * 16);
                 }
               }};
  for (int64_t column = s.column; column < s.until; column += kPanel)
    multiply_rows(ready, 0, rows, column, column + kPanel, sink);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
