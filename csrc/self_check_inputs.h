// What the self-checks share: numbers, inputs of either dtype, the words of a call, and how close a result must be.
#pragma once

#include <math.h>
#include <string.h>

#include <vector>

#include "kernels.h"

namespace fulmen {

constexpr int64_t N = 37, D = 20, E = 24;  // ragged on purpose

// Numbers in [-1, 1) that are the same everywhere.
inline std::vector<float> numbers(int64_t count, uint32_t seed) {
    std::vector<float> x((size_t)count);
    for (float &value : x) {
        seed = seed * 1664525u + 1013904223u;
        value = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return x;
}

inline fulmen_tensor tensor(std::vector<float> &x, int64_t size) { return {x.data(), FULMEN_FLOAT32, 0, size, 0}; }

// Every call of a check in turn has all of it.
inline void *allocate(int64_t bytes) {
    static thread_local std::vector<char> memory;
    memory.resize((size_t)bytes + 64);
    return (void *)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

template <class Call> fulmen_header header_of(const Call &) {
    return {sizeof(Call), FULMEN_VERSION, 1, nullptr, 0, allocate};
}

// Factors of bfloat16 products are rounded to 8 bits.
inline double tolerance(int64_t dtype) { return dtype == FULMEN_FLOAT32 ? 1e-4 : 3e-2; }
inline double larger_tolerance(int64_t dtype) { return fmax(5e-3, tolerance(dtype)); }  // of a quotient of differences
inline bool close(double a, double b, int64_t dtype = FULMEN_FLOAT32) {
    return fabs(a - b) <= tolerance(dtype) * (1 + fabs(b));
}

// An input of float32, or of bfloat16, which has the multiples of 1/64 that it is rounded to: in both, as numbers and
// as the caller's memory.
struct Input {
    std::vector<float> values;
    std::vector<uint16_t> halves;
    int64_t size, dtype;
    Input(int64_t count, int64_t size, uint32_t seed, int64_t dtype, float factor = 1)
        : values(numbers(count * size, seed)), size(size), dtype(dtype) {
        for (float &x : values) {
            if (dtype != FULMEN_FLOAT32) x = rintf(x * 64) / 64;
            x *= factor;
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            halves.push_back((uint16_t)(bits >> 16));
        }
    }
    // What is in the caller's memory now.
    float at(int64_t i) const {
        if (dtype == FULMEN_FLOAT32) return values[(size_t)i];
        const uint32_t bits = (uint32_t)halves[(size_t)i] << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    // From token t on.
    fulmen_tensor tensor(int64_t t = 0) {
        if (dtype == FULMEN_FLOAT32) return {values.data() + t * size, dtype, 0, size, 0};
        return {halves.data() + t * size, dtype, 0, size, 0};
    }
};

}  // namespace fulmen
