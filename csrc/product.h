// The product of some rows and a panel, compiled once for each format: what becomes of the outputs is a `Sink`'s matter.

#pragma once

#include "formats.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The outputs of a row and a panel: up to kPanel of them.
using Outputs = f32x16[kPanel / 16];

// Takes what a product makes: of `rows` rows from `row` on, `count` outputs from `output` on, which is a panel's first.
// Called once for some rows and a panel, so that a call by address costs next to nothing.
struct Sink {
  void* self;
  void (*prepare)(void* self, int64_t row, int64_t rows, int64_t output, int64_t count);  // shortly before
  void (*finish)(void* self, int64_t row, int64_t rows, int64_t output, int64_t count, const Outputs* values);
};

// A sink that calls `finish(row, output, count, values)` for each row, and before their product `prepare(row, output, count)`.
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

constexpr auto kUnprepared = [](int64_t, int64_t, int64_t) {};

// Rows from `first` to `end` (at most kRowBlock) by the panel that begins at a column; `next` is where the panel begins that
// will be wanted after it. Each format has a function of its own, compiled in products.cc.
template <class F>
void multiply_format(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, const Sink& sink);

inline void multiply_rows(const Linear& a, int64_t first, int64_t end, int64_t column, int64_t next, const Sink& sink) {
  with_format(a.matrix, [&]<class F>() { multiply_format<F>(a, first, end, column, next, sink); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
