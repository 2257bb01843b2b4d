// Which instruction set this CPU has, judged by the instructions that a build for it would use.
#include "fulmen.h"

const char* fulmen_cpu_isa(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? "avx512" : avx2 ? "avx2" : "baseline";
#elif defined(__aarch64__)
  return "neon";
#else
  return "baseline";
#endif
}
