// Products by the processor's matrix unit (AMX), where the instruction set has one.
//
// A tile is up to sixteen rows of 64 bytes. A packed matrix is made of such rows already: a step's vector of sixteen
// columns is one, sixteen steps are a tile. What the unit adds to an output in one instruction are the inputs of sixteen
// steps, in an order of its own; so the result does not depend on how many rows share an instruction, but where sums are
// rounded it is not that of vectors. Sums of bfloat16 are therefore made by tiles for one row, too.

#pragma once

#include "steps.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Whether products of a step's inputs are made by tiles.
template <class Step>
struct ByTiles : std::false_type {};

constexpr int64_t kTileHeight = 16;            // steps, rows and columns of a tile
constexpr int64_t kTallest = 2 * kTileHeight;  // rows of a product by tiles
template <class Step>
constexpr int64_t kTileInputs = kTileHeight * Step::kInputs;

constexpr int64_t kRowBlock = kHasTiles ? 256 : 96;      // rows of a linear layer's task
constexpr int64_t kTaskRows = kHasTiles ? kTallest : 24;  // query rows of an attention's task

// sums[rows][columns] = x[rows][inputs] * panel[inputs][columns], or that is added to them unless they are begun anew, of at
// most kTallest rows; rows of x lie `ldx` elements apart, those of sums `lds`, steps of the panel `stride` bytes. Columns
// are a multiple of 16. With each step of tiles `soon` is asked for. Only while a TileUse lives.
template <class Step>
void multiply_tiles(const typename Step::X* x, int64_t ldx, int64_t rows, const void* panel, int64_t stride, int64_t columns,
                    int64_t inputs, typename ByTiles<Step>::Sum* sums, int64_t lds, bool anew, Soon soon = {});

// Nothing but products of tiles; returns products and sums made, two for each weight.
template <class Step>
int64_t dots_by_tiles(int64_t products);

#if defined(__AMX_TILE__)

template <>
struct ByTiles<PairStep> : std::true_type {
  using Sum = float;
  template <int sum, int x, int w>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(w), "i"(x), "i"(sum));
  }
};
template <>
struct ByTiles<QuadStep> : std::true_type {
  using Sum = int32_t;
  template <int sum, int x, int w>
  static void add() {
    asm volatile("tdpbsud %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(w), "i"(x), "i"(sum));
  }
};
template <>
struct ByTiles<WeightStep> : std::true_type {
  using Sum = int32_t;
  template <int sum, int x, int w>
  static void add() {
    asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(w), "i"(x), "i"(sum));
  }
};

// How this thread's tiles are laid out: 0 for not at all, else the rows that a product has.
inline thread_local int tiles_hold = 0;

// For as long as it lives a thread may use tiles. Others that work on the same thread lay them out their own way, so that
// nothing is known at the beginning, and nothing is left at the end.
struct TileUse {
  TileUse() { tiles_hold = 0; }
  ~TileUse() {
    if (tiles_hold) asm volatile("tilerelease");
  }
};

// Up to 16 rows: tiles 0 to 3 are sums side by side, 4 holds inputs and 5 to 7 weights. More: 0 and 1 are sums of the first
// sixteen rows, 2 and 3 of the others, 4 and 5 are both's inputs, 6 and 7 weights.
inline void lay_out_tiles(int rows) {
  if (rows == tiles_hold) return;
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } layout = {};
  layout.palette = 1;
  for (int tile = 0; tile < 8; tile++) {
    const bool weights = tile >= (rows > kTileHeight ? 6 : 5), second = tile == 2 || tile == 3 || tile == 5;
    layout.bytes[tile] = 64;
    layout.rows[tile] = uint8_t(weights || (rows > kTileHeight && !second) ? kTileHeight
                                : rows > kTileHeight                       ? rows - kTileHeight
                                                                           : rows);
  }
  asm volatile("ldtilecfg %0" ::"m"(layout) : "memory");
  tiles_hold = rows;
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
  ByTiles<Step>::template add<sum, x, w>();
}

// Asks for `lines` of what will be read before long; where it is read next, into the first cache.
PENSTOCK_INLINE inline void ask(Soon& soon) {
  if (soon.near)
    for (int64_t i = 0; i < soon.lines; i++) __builtin_prefetch(soon.at + i * 64, 0, 3);
  else
    for (int64_t i = 0; i < soon.lines; i++) __builtin_prefetch(soon.at + i * 64, 0, 2);
  soon.at += soon.lines * 64;
}

// One step of tiles: 64 bytes of each row's inputs by C tiles of weights that lie side by side.
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
    tile_load<5>(x + kTileHeight * ldx, ldx);
    tile_add<Step, 2, 5, 6>();
    if constexpr (C > 1) tile_add<Step, 3, 5, 7>();
  } else {
    tile_load<4>(x, ldx);
    [&]<int... c>(std::integer_sequence<int, c...>) PENSTOCK_INLINE {
      ((tile_load<5 + c % 3>(w + 64 * c, stride), tile_add<Step, c, 4, 5 + c % 3>()), ...);
    }(std::make_integer_sequence<int, C>());
  }
}

// Calls `f.operator()<tile>(place)` for each tile of sums.
template <bool two, int C, class Sum, class F>
PENSTOCK_INLINE inline void each_sum(Sum* sums, int64_t lds, F&& f) {
  [&]<int... c>(std::integer_sequence<int, c...>) PENSTOCK_INLINE {
    (f.template operator()<c>(sums + 16 * c), ...);
    if constexpr (two) (f.template operator()<2 + c>(sums + kTileHeight * lds + 16 * c), ...);
  }(std::make_integer_sequence<int, C>());
}

template <class Step, bool two, int C>
void tile_block(const typename Step::X* x, int64_t ldx, int64_t rows, const char* panel, int64_t stride, int64_t inputs,
                typename ByTiles<Step>::Sum* sums, int64_t lds, bool anew, Soon soon) {
  constexpr int64_t n = kTileInputs<Step>, bytes = sizeof(typename Step::X);
  each_sum<two, C>(sums, lds, [&]<int t>(auto* at) {
    if (anew)
      tile_zero<t>();
    else
      tile_load<t>(at, lds * 4);
  });
  const int64_t steps = inputs / n;
  for (int64_t i = 0; i < steps; i++) {
    ask(soon);
    tile_step<Step, two, C>((const char*)(x + i * n), ldx * bytes, panel + i * kTileHeight * stride, stride);
  }
  if (const int64_t rest = inputs % n) {  // with zeros in the place of what is not there, by which nothing is changed
    alignas(64) char some_x[kTallest * 64] = {}, some_w[kTileHeight * C * 64] = {};
    for (int64_t r = 0; r < rows; r++) memcpy(some_x + r * 64, x + r * ldx + steps * n, rest * bytes);
    const char* from = panel + steps * kTileHeight * stride;
    for (int64_t i = 0; i * Step::kInputs < rest; i++)
      for (int c = 0; c < C; c++) {
        const char* at = from + i * stride + c * 64;
        const auto w = (i + 1) * Step::kInputs > rest ? last_weights<Step>(at) : Step::weights(at);
        memcpy(some_w + (i * C + c) * 64, &w, 64);
      }
    tile_step<Step, two, C>(some_x, 64, some_w, C * 64);
  }
  each_sum<two, C>(sums, lds, [&]<int t>(auto* at) { tile_store<t>(at, lds * 4); });
}

template <class Step>
void multiply_tiles(const typename Step::X* x, int64_t ldx, int64_t rows, const void* panel, int64_t stride, int64_t columns,
                    int64_t inputs, typename ByTiles<Step>::Sum* sums, int64_t lds, bool anew, Soon soon) {
  lay_out_tiles(int(rows));
  const int64_t asked = inputs / kTileInputs<Step> * soon.lines * 64;
  int64_t c = 0;
  auto some = [&]<bool two, int C>() {
    for (; c + C * 16 <= columns; c += C * 16) {
      tile_block<Step, two, C>(x, ldx, rows, (const char*)panel + c / 16 * 64, stride, inputs, sums + c, lds, anew, soon);
      soon.at += asked;
    }
  };
  if (rows > kTileHeight) {
    some.template operator()<true, 2>();
    some.template operator()<true, 1>();
  } else {
    some.template operator()<false, 4>();
    some.template operator()<false, 2>();
    some.template operator()<false, 1>();
  }
}

template <class Step>
int64_t dots_by_tiles(int64_t products) {
  const TileUse use;
  lay_out_tiles(kTallest);
  for (int64_t i = 0; i < products; i += 4) {
    tile_add<Step, 0, 4, 6>();
    tile_add<Step, 1, 4, 7>();
    tile_add<Step, 2, 5, 6>();
    tile_add<Step, 3, 5, 7>();
  }
  return ceil_div(products, 4) * 4 * kTileHeight * kTileHeight * kTileInputs<Step> * 2;
}

#else

// Nothing to do; a destructor, so that nobody takes it for unused.
struct TileUse {
  ~TileUse() {}
};

#endif  // __AMX_TILE__

}  // namespace PENSTOCK_ISA
}  // namespace penstock
