// Products with the processor's matrix unit (AMX).
//
// A tile has up to 16 rows of 64 bytes. A packed matrix consists of such rows: a row is the vector of a step for 16 columns,
// and a tile is 16 steps. An instruction adds the products of 16 steps to an output, in an internal order. Therefore results
// do not depend on the number of rows in an instruction, but floating-point results differ from those of vector kernels, and
// bfloat16 products use AMX even for a single row.

#pragma once

#include "steps.h"

namespace penstock {
namespace PENSTOCK_ISA {

// True if products of a step use AMX.
template <class Step>
struct UsesAmx : std::false_type {};

constexpr int64_t kAmxTileRows = 16;  // steps, rows and columns of a tile
constexpr int64_t kMaxAmxRows = 2 * kAmxTileRows;  // maximum number of rows of an AMX product
template <class Step>
constexpr int64_t kAmxTileInputs = kAmxTileRows * Step::kInputs;

constexpr int64_t kRowBlock = kHasAmx ? 256 : 96;  // rows of a linear layer's task
constexpr int64_t kTaskRows = kHasAmx ? kMaxAmxRows : 24;  // query rows of an attention task

// sums[rows][columns] += x[rows][inputs] * panel[inputs][columns], for at most kMaxAmxRows rows. With `from_zero`, the sums
// start from zero. Rows of x are `ldx` elements apart, rows of sums `lds` elements, steps of the panel `stride` bytes. The
// number of columns is a multiple of 16. Prefetches `ahead` with each tile step. Requires an AmxScope.
template <class Step>
void multiply_amx(const typename Step::X* x, int64_t ldx, int64_t rows, const void* panel, int64_t stride, int64_t columns,
                  int64_t inputs, typename UsesAmx<Step>::Sum* sums, int64_t lds, bool from_zero, Prefetch ahead = {});

// Benchmark of AMX products. Returns the number of operations, two per multiply-add.
template <class Step>
int64_t run_dots_amx(int64_t products);

#if defined(__AMX_TILE__)

template <>
struct UsesAmx<Bf16Step> : std::true_type {
  using Sum = float;
  template <int sum, int x, int w>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(w), "i"(x), "i"(sum));
  }
};
template <>
struct UsesAmx<Int8Step> : std::true_type {
  using Sum = int32_t;
  template <int sum, int x, int w>
  static void add() {
    asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(w), "i"(x), "i"(sum));
  }
};
template <>
struct UsesAmx<UInt8Step> : std::true_type {
  using Sum = int32_t;
  template <int sum, int x, int w>
  static void add() {
    asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(w), "i"(x), "i"(sum));
  }
};

// Number of rows for which the tiles of this thread are configured; 0: not configured.
inline thread_local int configured_rows = 0;

// A scope in which a thread may use AMX. Other code on the same thread may configure tiles differently. Therefore the scope
// assumes no configuration at its beginning, and releases the tiles at its end.
struct AmxScope {
  AmxScope() { configured_rows = 0; }
  ~AmxScope() {
    if (configured_rows) asm volatile("tilerelease");
  }
};

// Configures the tiles. Up to 16 rows: tiles 0 to 3 are sums of adjacent columns, 4 is inputs, 5 to 7 are weights. More
// rows: tiles 0 and 1 are sums of the first 16 rows, 2 and 3 sums of the other rows, 4 and 5 the inputs of the first and the
// other rows, 6 and 7 are weights.
inline void configure_tiles(int rows) {
  if (rows == configured_rows) return;
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } layout = {};
  layout.palette = 1;
  for (int tile = 0; tile < 8; tile++) {
    const bool weights = tile >= (rows > kAmxTileRows ? 6 : 5), second = tile == 2 || tile == 3 || tile == 5;
    layout.bytes[tile] = 64;
    layout.rows[tile] = uint8_t(weights || (rows > kAmxTileRows && !second) ? kAmxTileRows
                                : rows > kAmxTileRows                       ? rows - kAmxTileRows
                                                                            : rows);
  }
  asm volatile("ldtilecfg %0" ::"m"(layout) : "memory");
  configured_rows = rows;
}

template <int t>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(t));
}
template <int t>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(t) : "memory");
}
template <int t>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(t) : "memory");
}
template <class Step, int sum, int x, int w>
inline void tile_add() {
  UsesAmx<Step>::template add<sum, x, w>();
}

// Prefetches `lines` cache lines, into the L1 cache if they are read next (`near`).
PENSTOCK_INLINE inline void prefetch_lines(Prefetch& ahead) {
  if (ahead.near)
    for (int64_t i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.at + i * 64, 0, 3);
  else
    for (int64_t i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.at + i * 64, 0, 2);
  ahead.at += ahead.lines * 64;
}

// A tile step: 64 bytes of each row's inputs times C adjacent tiles of weights.
template <class Step, bool two, int C>
PENSTOCK_INLINE inline void tile_step(const char* x, int64_t ldx, const char* w, int64_t stride) {
  if constexpr (two) {
    tile_load<4>(x, ldx);
    tile_load<6>(w, stride);
    tile_add<Step, 0, 4, 6>();
    if constexpr (C > 1) {
      tile_load<7>(w + 64, stride);
      tile_add<Step, 1, 4, 7>();
    }
    tile_load<5>(x + kAmxTileRows * ldx, ldx);
    tile_add<Step, 2, 5, 6>();
    if constexpr (C > 1) tile_add<Step, 3, 5, 7>();
  } else {
    tile_load<4>(x, ldx);
    [&]<int... c>(std::integer_sequence<int, c...>) PENSTOCK_INLINE {
      ((tile_load<5 + c % 3>(w + 64 * c, stride), tile_add<Step, c, 4, 5 + c % 3>()), ...);
    }(std::make_integer_sequence<int, C>());
  }
}

// Calls `f.operator()<tile>(address)` for each tile of sums.
template <bool two, int C, class Sum, class F>
PENSTOCK_INLINE inline void each_sum(Sum* sums, int64_t lds, F&& f) {
  [&]<int... c>(std::integer_sequence<int, c...>) PENSTOCK_INLINE {
    (f.template operator()<c>(sums + 16 * c), ...);
    if constexpr (two) (f.template operator()<2 + c>(sums + kAmxTileRows * lds + 16 * c), ...);
  }(std::make_integer_sequence<int, C>());
}

template <class Step, bool two, int C>
void tile_block(const typename Step::X* x, int64_t ldx, int64_t rows, const char* panel, int64_t stride, int64_t inputs,
                typename UsesAmx<Step>::Sum* sums, int64_t lds, bool from_zero, Prefetch ahead) {
  constexpr int64_t n = kAmxTileInputs<Step>, bytes = sizeof(typename Step::X);
  each_sum<two, C>(sums, lds, [&]<int t>(auto* at) {
    if (from_zero)
      tile_zero<t>();
    else
      tile_load<t>(at, lds * 4);
  });
  const int64_t steps = inputs / n;
  for (int64_t i = 0; i < steps; i++) {
    prefetch_lines(ahead);
    tile_step<Step, two, C>((const char*)(x + i * n), ldx * bytes, panel + i * kAmxTileRows * stride, stride);
  }
  if (const int64_t rest = inputs % n) {  // the last inputs are padded with zeros, which do not change the sums
    alignas(64) char padded_x[kMaxAmxRows * 64] = {}, padded_w[kAmxTileRows * C * 64] = {};
    for (int64_t r = 0; r < rows; r++) memcpy(padded_x + r * 64, x + r * ldx + steps * n, rest * bytes);
    const char* from = panel + steps * kAmxTileRows * stride;
    for (int64_t i = 0; i * Step::kInputs < rest; i++)
      for (int c = 0; c < C; c++) {
        const char* at = from + i * stride + c * 64;
        const auto w = (i + 1) * Step::kInputs > rest ? last_weights<Step>(at) : Step::weights(at);
        memcpy(padded_w + (i * C + c) * 64, &w, 64);
      }
    tile_step<Step, two, C>(padded_x, 64, padded_w, C * 64);
  }
  each_sum<two, C>(sums, lds, [&]<int t>(auto* at) { tile_store<t>(at, lds * 4); });
}

template <class Step>
void multiply_amx(const typename Step::X* x, int64_t ldx, int64_t rows, const void* panel, int64_t stride, int64_t columns,
                  int64_t inputs, typename UsesAmx<Step>::Sum* sums, int64_t lds, bool from_zero, Prefetch ahead) {
  configure_tiles(int(rows));
  const int64_t prefetched = inputs / kAmxTileInputs<Step> * ahead.lines * 64;
  int64_t c = 0;
  auto columns_at_once = [&]<bool two, int C>() {
    for (; c + C * 16 <= columns; c += C * 16) {
      tile_block<Step, two, C>(x, ldx, rows, (const char*)panel + c / 16 * 64, stride, inputs, sums + c, lds, from_zero,
                               ahead);
      ahead.at += prefetched;
    }
  };
  if (rows > kAmxTileRows) {
    columns_at_once.template operator()<true, 2>();
    columns_at_once.template operator()<true, 1>();
  } else {
    columns_at_once.template operator()<false, 4>();
    columns_at_once.template operator()<false, 2>();
    columns_at_once.template operator()<false, 1>();
  }
}

template <class Step>
int64_t run_dots_amx(int64_t products) {
  const AmxScope use;
  configure_tiles(kMaxAmxRows);
  for (int64_t i = 0; i < products; i += 4) {
    tile_add<Step, 0, 4, 6>();
    tile_add<Step, 1, 4, 7>();
    tile_add<Step, 2, 5, 6>();
    tile_add<Step, 3, 5, 7>();
  }
  return ceil_div(products, 4) * 4 * kAmxTileRows * kAmxTileRows * kAmxTileInputs<Step> * 2;
}

#else

// A scope without effect. Its destructor prevents warnings about unused variables.
struct AmxScope {
  ~AmxScope() {}
};

#endif  // __AMX_TILE__

}  // namespace PENSTOCK_ISA
}  // namespace penstock
