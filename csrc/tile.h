// The one product that everything is made of: a few rows by a panel, one output column a lane.
//
// Each output is summed over the inputs in their order, whatever the number of rows. A step is what a vector of weights
// holds: some inputs of `kWidth` outputs.

#pragma once

#include <utility>

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Columns of a product's vectors: where registers are narrow and few, two of sixteen would leave no room for rows.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
using f32xw = Vector<float, kWidth>;
using i32xw = Vector<int32_t, kWidth>;
using u32xw = Vector<uint32_t, kWidth>;

// Vectors of columns that a product of so many rows holds at a time. Of 32 registers sums fill up to 24, of 16 up to 12; one
// row takes a whole panel, so that each sum has time before it is added to again.
constexpr int groups_of_rows(int rows) {
#if defined(__AVX512F__)
  return rows ? 4 : 0;
#elif defined(__AVX2__) || defined(__aarch64__)
  return rows == 1 ? 8 : rows < 4 ? 4 : 2;
#else
  return rows == 1 ? 4 : rows < 4 ? 2 : 1;
#endif
}

// Whether there is a matrix unit (amx.h).
#if defined(__AMX_TILE__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// A step says how a vector of weights is multiplied. `X` is what a row is made of, and `In` what it is turned into first
// (`prepare`), so that this is done once for all columns. A step that holds more than a product takes at once has parts.

// One input of float32.
struct FloatStep {
  using X = float;
  using In = float;
  using Sum = f32xw;
  static constexpr int kInputs = 1, kBytes = 4 * kWidth, kParts = 1;
  template <int part = 0>
  static f32xw weights(const char* at) {
    return load_bits<f32xw>(at);
  }
  template <int part = 0>
  static f32xw input(const float* x) {
    return all<f32xw>(*x);
  }
  static f32xw add(const f32xw& sum, const f32xw& x, const f32xw& w) { return fma(x, w, sum); }
};

// Inputs of bfloat16: multiplied in pairs, the first and then the second added, or where there is no product of pairs one by
// one as float32.
struct BrainInputs {
  using X = bf16;
  using Sum = f32xw;
#if defined(__AVX512BF16__)
  using In = bf16;
  static constexpr int kParts = 1;  // of a pair
  template <int part = 0>
  static u32xw input(const bf16* x) {
    return u32xw{} + load_bits<uint32_t>(x);
  }
  static f32xw add(const f32xw& sum, const u32xw& x, const u32xw& w) {
    return (f32xw)_mm512_dpbf16_ps((__m512)sum, as<__m512bh>(x), as<__m512bh>(w));
  }
#else
  using In = float;
  static constexpr int kParts = 2;
  template <int part = 0>
  static f32xw input(const float* x) {
    return all<f32xw>(x[part]);
  }
  static f32xw add(const f32xw& sum, const f32xw& x, const f32xw& w) { return fma(x, w, sum); }
  static void prepare(const bf16* x, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(out + i, load(x + i));
    for (; i < count; i++) out[i] = widen(x[i]);
  }
#endif
};

// Two inputs of bfloat16. Where the number of inputs is odd, the second of the last pair is not there: whatever lies in its
// place is void.
struct PairStep : BrainInputs {
  static constexpr int kInputs = 2, kBytes = 4 * kWidth;
#if defined(__AVX512BF16__)
  template <int part = 0>
  static u32xw weights(const char* at) {
    return load_bits<u32xw>(at);
  }
  template <int part = 0>
  static u32xw last(const char* at) {
    return weights(at) & 0xffff;
  }
#else
  template <int part = 0>
  static f32xw weights(const char* at) {
    const u32xw both = load_bits<u32xw>(at);
    return as<f32xw>(part ? both & 0xffff0000 : both << 16);
  }
  template <int part = 0>
  static f32xw last(const char* at) {
    return part ? f32xw{} : weights(at);
  }
#endif
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

// A loop that is unrolled before anything else is decided: else sums that fit into registers end up on the stack.
#define PENSTOCK_FOR _Pragma("GCC unroll 32") for
#define PENSTOCK_INLINE __attribute__((always_inline))

// What will be read before long: with each step its next `lines` are asked for; by two of them, since a line's neighbour
// comes with it, and into the second cache, as in the first they would wait for their place before what is read now.
// Processors with a matrix unit want every line asked for, and are fastest where that is the first cache.
struct Soon {
  const char* at = nullptr;
  int64_t lines = 0;
  bool near = false;
};

constexpr int64_t kSoon = kHasTiles ? 4096 : 1024;  // bytes ahead of a single tile of rows

// Turns `count` elements of a row into what a step multiplies.
template <class Step>
inline void prepare(const typename Step::X* x, int64_t count, typename Step::In* out) {
  if constexpr (std::is_same_v<typename Step::X, typename Step::In>)
    memcpy(out, x, count * sizeof(*x));
  else
    Step::prepare(x, count, out);
}

// Steps whose products are kept in 16 bits for a while say for how many of them; others for none.
template <class Step>
concept InWords = requires { Step::kSteps; };

// Weights of a panel's last step, which may have fewer inputs; others than PairStep have zeros in the place of those missing.
template <class Step, int part = 0>
PENSTOCK_INLINE inline auto last_weights(const char* at) {
  if constexpr (requires { Step::template last<part>(at); })
    return Step::template last<part>(at);
  else
    return Step::template weights<part>(at);
}

// sums[R][G] += a part of a step's inputs by its weights.
template <class Step, int part, bool is_last, int R, int G, class Sum>
PENSTOCK_INLINE inline void multiply_part(const typename Step::In* x, int64_t ldx, const char* at, Sum (&sums)[R][G]) {
  auto weights = [&](int g) PENSTOCK_INLINE {
    if constexpr (is_last)
      return last_weights<Step, part>(at + g * Step::kBytes);
    else
      return Step::template weights<part>(at + g * Step::kBytes);
  };
  if constexpr (R < G) {  // whichever is fewer stays in registers
    decltype(Step::template input<part>(x)) inputs[R];
    PENSTOCK_FOR (int r = 0; r < R; r++) inputs[r] = Step::template input<part>(x + r * ldx);
    PENSTOCK_FOR (int g = 0; g < G; g++) {
      const auto w = weights(g);
      PENSTOCK_FOR (int r = 0; r < R; r++) sums[r][g] = Step::add(sums[r][g], inputs[r], w);
    }
  } else {
    decltype(weights(0)) w[G];
    PENSTOCK_FOR (int g = 0; g < G; g++) w[g] = weights(g);
    PENSTOCK_FOR (int r = 0; r < R; r++) {
      const auto input = Step::template input<part>(x + r * ldx);
      PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] = Step::add(sums[r][g], input, w[g]);
    }
  }
}
template <class Step, bool is_last, int R, int G, class Sum>
PENSTOCK_INLINE inline void multiply_step(const typename Step::In* x, int64_t ldx, const char* at, Sum (&sums)[R][G]) {
  [&]<int... part>(std::integer_sequence<int, part...>) PENSTOCK_INLINE {
    (multiply_part<Step, part, is_last>(x, ldx, at, sums), ...);
  }(std::make_integer_sequence<int, Step::kParts>());
}

PENSTOCK_INLINE inline void ask_for(Soon& soon) {
  if (!soon.lines) return;
  if constexpr (kHasTiles) {
    for (int64_t line = 0; line < soon.lines; line++) __builtin_prefetch(soon.at + line * 64, 0, 3);
  } else if constexpr (kWidth < 16) {
    for (int64_t line = 0; line < soon.lines; line++) __builtin_prefetch(soon.at + line * 64, 0, 2);
  } else {
    __builtin_prefetch(soon.at, 0, 2);
    __builtin_prefetch(soon.at + soon.lines / 2 * 64, 0, 2);
  }
  soon.at += soon.lines * 64;
}

// sums[R][G] += x[R][inputs] * panel[inputs][G * kWidth]; rows of x lie `ldx` apart, steps of the panel `stride` bytes.
template <class Step, int R, int G>
PENSTOCK_INLINE inline void multiply(const typename Step::In* x, int64_t ldx, const char* panel, int64_t stride,
                                     int64_t inputs, typename Step::Sum (&sums)[R][G], Soon soon = {}) {
  using In = typename Step::In;
  constexpr int n = Step::kInputs;
  const int64_t steps = inputs / n;
  if constexpr (InWords<Step>) {
    for (int64_t i = 0; i < steps;) {
      const int64_t until = steps - i < Step::kSteps ? steps : i + Step::kSteps;
      typename Step::Words words[R][G] = {};
      for (; i < until; i++) {
        ask_for(soon);
        multiply_step<Step, false>(x + i * n, ldx, panel + i * stride, words);
      }
      PENSTOCK_FOR (int r = 0; r < R; r++)
        PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] += Step::total(words[r][g]);
    }
  } else {
    for (int64_t i = 0; i < steps; i++) {
      ask_for(soon);
      multiply_step<Step, false>(x + i * n, ldx, panel + i * stride, sums);
    }
  }
  if constexpr (n > 1 && sizeof(typename Step::X) > 1)  // bytes are padded
    if (const int64_t rest = inputs % n) {
      In padded[R][n] = {};
      for (int r = 0; r < R; r++) memcpy(padded[r], x + r * ldx + steps * n, rest * sizeof(In));
      multiply_step<Step, true>(padded[0], n, panel + steps * stride, sums);
    }
}

// Calls `f` with the number of rows, or `Most` if there are more, as a constant.
template <int Most = kTileRows, class F>
inline void with_rows(int64_t rows, F&& f) {
  if constexpr (Most > 1)
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  f.template operator()<Most>();
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
