// The product of some rows and a panel, compiled once per format. A `Sink` receives the outputs.

#pragma once

#include "formats.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Outputs of a row and a panel, up to kPanel.
using Outputs = f32x16[kPanel / 16];

// Receives the results of a product: `count` outputs of a panel, which begins at output `output`, for `rows` rows from `row`
// on. The functions are called once per tile of rows and panel, so that the cost of an indirect call is negligible.
struct Sink {
  void* self;
  void (*prepare)(void* self, int64_t row, int64_t rows, int64_t output, int64_t count);  // before the product
  void (*finish)(void* self, int64_t row, int64_t rows, int64_t output, int64_t count, const Outputs* values);
};

// A sink that calls `prepare(row, output, count)` for each row before the product, and `finish(row, output, count, values)`
// after it.
template <class Prepare, class Finish>
struct RowSink {
  Prepare prepare;
  Finish finish;

  operator Sink() {
    return {this,
            [](void* self, int64_t row, int64_t rows, int64_t output, int64_t count) {
              for (int64_t r = 0; r < rows; r++) ((RowSink*)self)->prepare(row + r, output, count);
            },
            [](void* self, int64_t row, int64_t rows, int64_t output, int64_t count, const Outputs* values) {
              for (int64_t r = 0; r < rows; r++) ((RowSink*)self)->finish(row + r, output, count, values[r]);
            }};
  }
};
template <class Prepare, class Finish>
RowSink(Prepare, Finish) -> RowSink<Prepare, Finish>;

constexpr auto kNoPrepare = [](int64_t, int64_t, int64_t) {};

// Multiplies rows `first` to `end` (at most kRowBlock) by the panel at `column`. `next`: first column of the next panel,
// which is prefetched. Instantiated in products.cc.
template <class F>
void multiply_format(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, const Sink& sink);

inline void multiply_rows(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, const Sink& sink) {
  with_format(a.matrix, [&]<class F>() { multiply_format<F>(a, first, end, column, next, sink); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
