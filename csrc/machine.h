// Which instruction sets this machine runs.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <string>
#include <vector>

namespace penstock {

#if defined(__x86_64__)
// Whether there is a matrix unit, and this process may use it: Linux saves its large registers only for who asks.
inline bool has_tiles() {
#if defined(__linux__)
  constexpr long ask = 0x1023, tile_data = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned tile = 1u << 24, int8 = 1u << 25, bf16 = 1u << 22;
  return (d & tile) && (d & int8) && (d & bf16) && syscall(SYS_arch_prctl, ask, tile_data) == 0;
#else
  return false;
#endif
}

// AVX-VNNI: four products of bytes added at once, in registers of 256 bits, where there need be no AVX-512.
inline bool has_byte_products() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

// By their names, from the slowest to the fastest.
inline std::vector<std::string> sets_of_machine() {
  std::vector<std::string> found{"portable"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back("avx2");
    if (has_byte_products()) found.push_back("avxvnni");
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back("avx512");
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
      found.push_back("avx512bf16");
      if (has_tiles()) found.push_back("amx");
    }
  }
#endif
  return found;
}

}  // namespace penstock
