// What the tests of the core share: a check that says what failed, and numbers that are the same everywhere.
#pragma once

#include <stdint.h>
#include <stdio.h>

#include <atomic>

inline std::atomic<int> failures{0};

// CHECK(condition, format, arguments...), from any thread; the first few failures are printed.
#define CHECK(condition, ...)                                               \
    do {                                                                    \
        if (!(condition) && failures++ < 10) {                              \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                   \
            fputc('\n', stderr);                                            \
        }                                                                   \
    } while (0)

// What main returns.
inline int outcome() {
    if (failures > 0) fprintf(stderr, "%d checks failed\n", failures.load());
    return failures > 0;
}

class Random {
public:
    explicit Random(uint32_t seed) : state(seed) {}
    uint32_t bits() {
        state = state * 1664525u + 1013904223u;
        return state >> 8;
    }
    float number() { return (float)bits() / 8388608.0f - 1.0f; }  // in [-1, 1)
    int64_t below(int64_t n) { return (int64_t)bits() % n; }

private:
    uint32_t state;
};
