// Detection of the instruction sets that this machine supports.

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
// True if the processor has AMX and this process may use it: Linux enables the tile registers only on request.
inline bool has_amx() {
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

// True if the processor has AVX-VNNI: dot products of four bytes in 256-bit registers, also without AVX-512.
inline bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

// Names of the supported instruction sets, from the slowest to the fastest.
inline std::vector<std::string> machine_sets() {
  std::vector<std::string> names{"portable"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    names.push_back("avx2");
    if (has_avx_vnni()) names.push_back("avxvnni");
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    names.push_back("avx512");
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
      names.push_back("avx512bf16");
      if (has_amx()) names.push_back("amx");
    }
  }
#endif
  return names;
}

}  // namespace penstock
