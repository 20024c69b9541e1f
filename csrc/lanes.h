// Vectors of any number of lanes: the compiler's own where a register holds them, else two halves.
//
// GCC keeps its vectors that are wider than a register in memory; the halves of a `Two` stay in registers.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace penstock {
namespace PENSTOCK_ISA {

#if defined(__AVX512F__)
constexpr int kRegister = 64;  // bytes
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

template <class V>
struct Two;

template <class E, int lanes>
struct VectorOf {
  static auto make() {
    if constexpr (lanes * sizeof(E) <= kRegister) {
      typedef E Native __attribute__((vector_size(lanes * sizeof(E))));
      return Native{};
    } else {
      return Two<typename VectorOf<E, lanes / 2>::Type>{};
    }
  }
  using Type = decltype(make());
};
template <class E, int lanes>
using Vector = typename VectorOf<E, lanes>::Type;

template <class V>
struct IsTwo : std::false_type {};
template <class H>
struct IsTwo<Two<H>> : std::true_type {};

template <class V>
struct ElementOf {
  using Type = std::remove_cvref_t<decltype(V{}[0])>;
};
template <class H>
struct ElementOf<Two<H>> : ElementOf<H> {};
template <class V>
using Element = typename ElementOf<V>::Type;

template <class V>
constexpr int kLanesOf = sizeof(V) / sizeof(Element<V>);

// The same bits as another type.
template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  if constexpr (IsTwo<To>::value && IsTwo<From>::value) {
    using Half = decltype(To{}.low);
    return {as<Half>(from.low), as<Half>(from.high)};
  } else {
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
  }
}

template <class V, class T>
inline V load_bits(const T* from) {
  if constexpr (IsTwo<V>::value) {
    using Half = decltype(V{}.low);
    return {load_bits<Half>((const char*)from), load_bits<Half>((const char*)from + sizeof(Half))};
  } else {
    V v;
    memcpy(&v, from, sizeof(v));
    return v;
  }
}
template <class V, class T>
inline void store_bits(T* to, const V& v) {
  if constexpr (IsTwo<V>::value) {
    store_bits((char*)to, v.low);
    store_bits((char*)to + sizeof(v.low), v.high);
  } else {
    memcpy(to, &v, sizeof(v));
  }
}

template <class V>
struct Two {
  V low, high;

  auto operator[](int lane) const {
    constexpr int half = kLanesOf<V>;
    return lane < half ? low[lane] : high[lane - half];
  }

#define PENSTOCK_EACH(op)                                                                                      \
  friend inline auto operator op(const Two& a, const Two& b) { return two(a.low op b.low, a.high op b.high); } \
  template <class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                        \
  friend inline auto operator op(const Two& a, S b) {                                                          \
    return two(a.low op Element<V>(b), a.high op Element<V>(b));                                               \
  }                                                                                                            \
  template <class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>                                        \
  friend inline auto operator op(S a, const Two& b) {                                                          \
    return two(Element<V>(a) op b.low, Element<V>(a) op b.high);                                               \
  }
  PENSTOCK_EACH(+)
  PENSTOCK_EACH(-)
  PENSTOCK_EACH(*)
  PENSTOCK_EACH(/)
  PENSTOCK_EACH(&)
  PENSTOCK_EACH(|)
  PENSTOCK_EACH(<)
  PENSTOCK_EACH(>)
  PENSTOCK_EACH(<=)
  PENSTOCK_EACH(>=)
  PENSTOCK_EACH(==)
  PENSTOCK_EACH(!=)
#undef PENSTOCK_EACH
  friend inline Two operator>>(const Two& a, int bits) { return {a.low >> bits, a.high >> bits}; }
  friend inline Two operator<<(const Two& a, int bits) { return {a.low << bits, a.high << bits}; }
  friend inline Two operator>>(const Two& a, const Two& bits) { return {a.low >> bits.low, a.high >> bits.high}; }
  friend inline Two operator-(const Two& a) { return {-a.low, -a.high}; }
  friend inline Two operator~(const Two& a) { return {~a.low, ~a.high}; }
  template <class T>
  Two& operator+=(const T& b) {
    return *this = *this + b;
  }
  template <class T>
  Two& operator-=(const T& b) {
    return *this = *this - b;
  }
  template <class T>
  Two& operator*=(const T& b) {
    return *this = *this * b;
  }
  template <class T>
  Two& operator|=(const T& b) {
    return *this = *this | b;
  }

 private:
  template <class H>
  static Two<H> two(const H& low, const H& high) {
    return {low, high};
  }
};

// Of each lane the first where the mask's is set, else the second.
template <class Mask, class V>
inline V choose(const Mask& mask, const V& a, const V& b) {
  if constexpr (IsTwo<V>::value)
    return {choose(mask.low, a.low, b.low), choose(mask.high, a.high, b.high)};
  else
    return mask ? a : b;
}

// The halves of a vector, and what they are halves of.
template <class V>
inline auto halves(const V& v) {
  if constexpr (IsTwo<V>::value) {
    return v;
  } else {
    using Half = Vector<Element<V>, kLanesOf<V> / 2>;
    return as<Two<Half>>(v);
  }
}
template <class To, class H>
inline To whole(const H& low, const H& high) {
  return as<To>(Two<H>{low, high});
}

// Lane by lane as numbers of another type; what they become holds them.
template <class To, class From>
inline To convert(const From& from) {
  static_assert(kLanesOf<To> == kLanesOf<From>, "the same lanes");
  using E = Element<To>;
  using F = Element<From>;
  if constexpr (sizeof(E) * sizeof(F) == 4 && sizeof(E) != sizeof(F) && std::is_integral_v<E> && std::is_integral_v<F>) {
    // Between 8 and 32 bits GCC would go lane by lane.
    using Middle = std::conditional_t<std::is_signed_v<F>, int16_t, uint16_t>;
    return convert<To>(convert<Vector<Middle, kLanesOf<From>>>(from));
  } else if constexpr (!IsTwo<To>::value && !IsTwo<From>::value) {
    return __builtin_convertvector(from, To);
  } else if constexpr (sizeof(To) >= sizeof(From)) {
    const auto parts = halves(from);
    using Half = Vector<E, kLanesOf<To> / 2>;
    return To{convert<Half>(parts.low), convert<Half>(parts.high)};
  } else {
#if defined(__AVX2__)
    static_assert(sizeof(E) == 2, "32 bits become 16");
    const auto packed = std::is_signed_v<E> ? _mm256_packs_epi32((__m256i)from.low, (__m256i)from.high)
                                            : _mm256_packus_epi32((__m256i)from.low, (__m256i)from.high);
    return as<To>(_mm256_permute4x64_epi64(packed, 0xd8));
#else
    using Half = Vector<E, kLanesOf<To> / 2>;
    return whole<To>(convert<Half>(from.low), convert<Half>(from.high));
#endif
  }
}

using f32x16 = Vector<float, 16>;
using i32x4 = Vector<int32_t, 4>;
using i32x8 = Vector<int32_t, 8>;
using i32x16 = Vector<int32_t, 16>;
using u32x16 = Vector<uint32_t, 16>;
using u16x16 = Vector<uint16_t, 16>;
using i16x16 = Vector<int16_t, 16>;
using i8x16 = Vector<int8_t, 16>;
using u8x16 = Vector<uint8_t, 16>;

}  // namespace PENSTOCK_ISA
}  // namespace penstock
