// The C interface of the CPU core. No torch and no Python: the library is loaded with ctypes.
#pragma once

#if defined(_WIN32)
#define FULMEN_API __declspec(dllexport)
#else
#define FULMEN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The widest instruction set of this CPU that the core distinguishes: "avx512", "avx2", "neon" or "baseline".
FULMEN_API const char* fulmen_cpu_isa(void);

#ifdef __cplusplus
}
#endif
