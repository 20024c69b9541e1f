// Vectors with any number of lanes: native vectors of the compiler if they fit into a register, else pairs of half vectors.
//
// GCC keeps native vectors that are wider than a register in memory; the halves of a VectorPair stay in registers.

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
constexpr int kRegister = 64;  // bytes of a vector register
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

template <class V>
struct VectorPair;

template <class E, int lanes>
struct VectorOf {
  static auto make() {
    if constexpr (lanes * sizeof(E) <= kRegister) {
      typedef E Native __attribute__((vector_size(lanes * sizeof(E))));
      return Native{};
    } else {
      return VectorPair<typename VectorOf<E, lanes / 2>::Type>{};
    }
  }
  using Type = decltype(make());
};
template <class E, int lanes>
using Vector = typename VectorOf<E, lanes>::Type;

template <class V>
struct IsVectorPair : std::false_type {};
template <class H>
struct IsVectorPair<VectorPair<H>> : std::true_type {};

template <class V>
struct ElementOf {
  using Type = std::remove_cvref_t<decltype(V{}[0])>;
};
template <class H>
struct ElementOf<VectorPair<H>> : ElementOf<H> {};
template <class V>
using Element = typename ElementOf<V>::Type;

template <class V>
constexpr int kLanesOf = sizeof(V) / sizeof(Element<V>);

// Reinterprets the bits as another type.
template <class To, class From>
inline To bitcast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  if constexpr (IsVectorPair<To>::value && IsVectorPair<From>::value) {
    using Half = decltype(To{}.low);
    return {bitcast<Half>(from.low), bitcast<Half>(from.high)};
  } else {
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
  }
}

template <class V, class T>
inline V load_bits(const T* from) {
  if constexpr (IsVectorPair<V>::value) {
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
  if constexpr (IsVectorPair<V>::value) {
    store_bits((char*)to, v.low);
    store_bits((char*)to + sizeof(v.low), v.high);
  } else {
    memcpy(to, &v, sizeof(v));
  }
}

template <class V>
struct VectorPair {
  V low, high;

  auto operator[](int lane) const {
    constexpr int half = kLanesOf<V>;
    return lane < half ? low[lane] : high[lane - half];
  }

#define PENSTOCK_BINARY_OPERATOR(op)                                         \
  friend inline auto operator op(const VectorPair& a, const VectorPair& b) { \
    return make(a.low op b.low, a.high op b.high);                           \
  }                                                                          \
  template <class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>      \
  friend inline auto operator op(const VectorPair& a, S b) {                 \
    return make(a.low op Element<V>(b), a.high op Element<V>(b));            \
  }                                                                          \
  template <class S, class = std::enable_if_t<std::is_arithmetic_v<S>>>      \
  friend inline auto operator op(S a, const VectorPair& b) {                 \
    return make(Element<V>(a) op b.low, Element<V>(a) op b.high);            \
  }
  PENSTOCK_BINARY_OPERATOR(+)
  PENSTOCK_BINARY_OPERATOR(-)
  PENSTOCK_BINARY_OPERATOR(*)
  PENSTOCK_BINARY_OPERATOR(/)
  PENSTOCK_BINARY_OPERATOR(&)
  PENSTOCK_BINARY_OPERATOR(|)
  PENSTOCK_BINARY_OPERATOR(<)
  PENSTOCK_BINARY_OPERATOR(>)
  PENSTOCK_BINARY_OPERATOR(<=)
  PENSTOCK_BINARY_OPERATOR(>=)
  PENSTOCK_BINARY_OPERATOR(==)
  PENSTOCK_BINARY_OPERATOR(!=)
#undef PENSTOCK_BINARY_OPERATOR
  friend inline VectorPair operator>>(const VectorPair& a, int bits) { return {a.low >> bits, a.high >> bits}; }
  friend inline VectorPair operator<<(const VectorPair& a, int bits) { return {a.low << bits, a.high << bits}; }
  friend inline VectorPair operator>>(const VectorPair& a, const VectorPair& bits) {
    return {a.low >> bits.low, a.high >> bits.high};
  }
  friend inline VectorPair operator-(const VectorPair& a) { return {-a.low, -a.high}; }
  friend inline VectorPair operator~(const VectorPair& a) { return {~a.low, ~a.high}; }
  template <class T>
  VectorPair& operator+=(const T& b) {
    return *this = *this + b;
  }
  template <class T>
  VectorPair& operator-=(const T& b) {
    return *this = *this - b;
  }
  template <class T>
  VectorPair& operator*=(const T& b) {
    return *this = *this * b;
  }
  template <class T>
  VectorPair& operator|=(const T& b) {
    return *this = *this | b;
  }

 private:
  template <class H>
  static VectorPair<H> make(const H& low, const H& high) {
    return {low, high};
  }
};

// Selects a in lanes where the mask is set, else b.
template <class Mask, class V>
inline V select(const Mask& mask, const V& a, const V& b) {
  if constexpr (IsVectorPair<V>::value)
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else
    return mask ? a : b;
}

// Splits a vector into halves, and concatenates halves.
template <class V>
inline auto halves(const V& v) {
  if constexpr (IsVectorPair<V>::value) {
    return v;
  } else {
    using Half = Vector<Element<V>, kLanesOf<V> / 2>;
    return bitcast<VectorPair<Half>>(v);
  }
}
template <class To, class H>
inline To concat(const H& low, const H& high) {
  return bitcast<To>(VectorPair<H>{low, high});
}

// Converts each lane to another type, which must be able to represent the values.
template <class To, class From>
inline To convert(const From& from) {
  static_assert(kLanesOf<To> == kLanesOf<From>, "the same lanes");
  using E = Element<To>;
  using F = Element<From>;
  if constexpr (sizeof(E) * sizeof(F) == 4 && sizeof(E) != sizeof(F) && std::is_integral_v<E> && std::is_integral_v<F>) {
    // GCC converts between 8 and 32 bits lane by lane; two conversions via 16 bits are faster.
    using Middle = std::conditional_t<std::is_signed_v<F>, int16_t, uint16_t>;
    return convert<To>(convert<Vector<Middle, kLanesOf<From>>>(from));
  } else if constexpr (!IsVectorPair<To>::value && !IsVectorPair<From>::value) {
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
    return bitcast<To>(_mm256_permute4x64_epi64(packed, 0xd8));
#else
    using Half = Vector<E, kLanesOf<To> / 2>;
    return concat<To>(convert<Half>(from.low), convert<Half>(from.high));
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
