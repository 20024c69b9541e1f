// The basic product of all matrix kernels: a few rows by a panel, with one output column per lane.
//
// Each output is summed over the inputs in their order, for any number of rows. A step is the part of a panel that a vector
// of weights holds: one or more inputs of `kWidth` outputs.

#pragma once

#include <utility>

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Number of columns of a product's vectors. If registers are narrow and few, vectors of 16 columns would leave no registers
// for several rows.
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif
using f32xw = Vector<float, kWidth>;
using i32xw = Vector<int32_t, kWidth>;
using u32xw = Vector<uint32_t, kWidth>;

// Number of column vectors that a product of `rows` rows accumulates at a time: sums use up to 24 of 32 registers, or 12 of
// 16. A single row takes a whole panel, which hides the latency of additions.
constexpr int column_vectors(int rows) {
#if defined(__AVX512F__)
  return rows ? 4 : 0;
#elif defined(__AVX2__) || defined(__aarch64__)
  return rows == 1 ? 8 : rows < 4 ? 4 : 2;
#else
  return rows == 1 ? 4 : rows < 4 ? 2 : 1;
#endif
}

// True if the instruction set has AMX (amx.h).
#if defined(__AMX_TILE__)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

// A step type defines how a vector of weights is multiplied. `X` is the element type of rows, `In` the type to which rows
// are converted once for all columns (`prepare`). `kParts` is the number of multiply instructions per step: more than one if
// an instruction cannot multiply all inputs of the step.

// One float32 input.
struct Float32Step {
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
    return broadcast<f32xw>(*x);
  }
  static f32xw add(const f32xw& sum, const f32xw& x, const f32xw& w) { return fma(x, w, sum); }
};

// bfloat16 inputs. With AVX512-BF16, an instruction multiplies a pair of inputs, and adds the first product, then the
// second. Otherwise single inputs are multiplied as float32.
struct Bf16Inputs {
  using X = bf16;
  using Sum = f32xw;
#if defined(__AVX512BF16__)
  using In = bf16;
  static constexpr int kParts = 1;  // number of parts of a pair of inputs
  template <int part = 0>
  static u32xw input(const bf16* x) {
    return u32xw{} + load_bits<uint32_t>(x);
  }
  static f32xw add(const f32xw& sum, const u32xw& x, const u32xw& w) {
    return (f32xw)_mm512_dpbf16_ps((__m512)sum, bitcast<__m512bh>(x), bitcast<__m512bh>(w));
  }
#else
  using In = float;
  static constexpr int kParts = 2;
  template <int part = 0>
  static f32xw input(const float* x) {
    return broadcast<f32xw>(x[part]);
  }
  static f32xw add(const f32xw& sum, const f32xw& x, const f32xw& w) { return fma(x, w, sum); }
  static void prepare(const bf16* x, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(out + i, load(x + i));
    for (; i < count; i++) out[i] = widen(x[i]);
  }
#endif
};

// Two bfloat16 inputs. If the number of inputs is odd, the second weight of the last pair is undefined, and ignored.
struct Bf16Step : Bf16Inputs {
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
    return bitcast<f32xw>(part ? both & 0xffff0000 : both << 16);
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
  using Step = Float32Step;
};
template <>
struct StepOf<bf16> {
  using Step = Bf16Step;
};

// Unrolls a loop before other optimizations. Without this, sums that fit into registers would be kept on the stack.
#define PENSTOCK_FOR _Pragma("GCC unroll 32") for
#define PENSTOCK_INLINE __attribute__((always_inline))

// Memory to prefetch during a product: `lines` cache lines per step. With AVX-512, two prefetches per step suffice, since
// the hardware also fetches the adjacent lines. They go into the L2 cache, since prefetches into L1 would wait for current
// loads. Processors with AMX need a prefetch of every line, and are fastest with prefetches into L1.
struct Prefetch {
  const char* at = nullptr;
  int64_t lines = 0;
  bool near = false;
};

constexpr int64_t kPrefetchDistance = kHasAmx ? 4096 : 1024;  // prefetch distance in bytes for a single tile of rows

// Converts `count` elements of a row to the input type of a step.
template <class Step>
inline void prepare(const typename Step::X* x, int64_t count, typename Step::In* out) {
  if constexpr (std::is_same_v<typename Step::X, typename Step::In>)
    memcpy(out, x, count * sizeof(*x));
  else
    Step::prepare(x, count, out);
}

// Step types that sum up to `kSum16Steps` steps in 16 bits before they are added to 32-bit sums.
template <class Step>
concept HasSum16 = requires { Step::kSum16Steps; };

// Weights of a panel's last step, which may have fewer inputs. Steps other than Bf16Step have zeros for the missing inputs.
template <class Step, int part = 0>
PENSTOCK_INLINE inline auto last_weights(const char* at) {
  if constexpr (requires { Step::template last<part>(at); })
    return Step::template last<part>(at);
  else
    return Step::template weights<part>(at);
}

// sums[R][G] += the inputs of one part of a step times the weights of this part.
template <class Step, int part, bool is_last, int R, int G, class Sum>
PENSTOCK_INLINE inline void multiply_part(const typename Step::In* x, int64_t ldx, const char* at, Sum (&sums)[R][G]) {
  auto weights = [&](int g) PENSTOCK_INLINE {
    if constexpr (is_last)
      return last_weights<Step, part>(at + g * Step::kBytes);
    else
      return Step::template weights<part>(at + g * Step::kBytes);
  };
  if constexpr (R < G) {  // the smaller operand stays in registers
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

PENSTOCK_INLINE inline void prefetch(Prefetch& ahead) {
  if (!ahead.lines) return;
  if constexpr (kHasAmx) {
    for (int64_t line = 0; line < ahead.lines; line++) __builtin_prefetch(ahead.at + line * 64, 0, 3);
  } else if constexpr (kWidth < 16) {
    for (int64_t line = 0; line < ahead.lines; line++) __builtin_prefetch(ahead.at + line * 64, 0, 2);
  } else {
    __builtin_prefetch(ahead.at, 0, 2);
    __builtin_prefetch(ahead.at + ahead.lines / 2 * 64, 0, 2);
  }
  ahead.at += ahead.lines * 64;
}

// sums[R][G] += x[R][inputs] * panel[inputs][G * kWidth]. Rows of x are `ldx` elements apart, steps of the panel `stride`
// bytes.
template <class Step, int R, int G>
PENSTOCK_INLINE inline void multiply(const typename Step::In* x, int64_t ldx, const char* panel, int64_t stride,
                                     int64_t inputs, typename Step::Sum (&sums)[R][G], Prefetch ahead = {}) {
  using In = typename Step::In;
  constexpr int n = Step::kInputs;
  const int64_t steps = inputs / n;
  if constexpr (HasSum16<Step>) {
    for (int64_t i = 0; i < steps;) {
      const int64_t until = steps - i < Step::kSum16Steps ? steps : i + Step::kSum16Steps;
      typename Step::Sum16 sums16[R][G] = {};
      for (; i < until; i++) {
        prefetch(ahead);
        multiply_step<Step, false>(x + i * n, ldx, panel + i * stride, sums16);
      }
      PENSTOCK_FOR (int r = 0; r < R; r++)
        PENSTOCK_FOR (int g = 0; g < G; g++) sums[r][g] += Step::total(sums16[r][g]);
    }
  } else {
    for (int64_t i = 0; i < steps; i++) {
      prefetch(ahead);
      multiply_step<Step, false>(x + i * n, ldx, panel + i * stride, sums);
    }
  }
  if constexpr (n > 1 && sizeof(typename Step::X) > 1)  // rows of bytes are padded with zeros
    if (const int64_t rest = inputs % n) {
      In padded[R][n] = {};
      for (int r = 0; r < R; r++) memcpy(padded[r], x + r * ldx + steps * n, rest * sizeof(In));
      multiply_step<Step, true>(padded[0], n, panel + steps * stride, sums);
    }
}

// Calls `f` with min(rows, Most) as a template argument.
template <int Most = kTileRows, class F>
inline void with_rows(int64_t rows, F&& f) {
  if constexpr (Most > 1)
    if (rows < Most) return with_rows<Most - 1>(rows, f);
  f.template operator()<Most>();
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
