// The most multiply-adds per second that this build's vectors can do: what every kernel is measured against.
#include "kernels.h"
#include "simd.h"

namespace fulmen {
namespace FULMEN_ISA {

// Runs `rounds` rounds of independent multiply-adds in registers, and returns how many floating-point operations it
// did.
int64_t fma_burst(int64_t rounds) {
    constexpr int kChains = 12;  // more than latency times throughput, and all in registers
    Vec chain[kChains], factor = broadcast(0.999f), addend = broadcast(1e-3f);
    for (int c = 0; c < kChains; ++c) chain[c] = broadcast((float)c);
    for (int64_t r = 0; r < rounds; ++r)
        for (int c = 0; c < kChains; ++c) chain[c] = chain[c] * factor + addend;
    Vec sum = {};
    for (int c = 0; c < kChains; ++c) sum += chain[c];
    volatile float used = sum_lanes(sum);  // or the compiler would drop it all
    (void)used;
    return rounds * kChains * kLanes * 2;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
