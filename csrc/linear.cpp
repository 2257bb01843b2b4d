// The products of a decode step. They are as fast as their weights come from memory: these are read once, a few outputs
// at a time, which are products with every row while they are in the L1 cache.
#include "kernels.h"
#include "parallel.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

typedef fulmen_linear_call Call;

constexpr int kTogether = 4;           // outputs
constexpr int kTerms = 2;              // vectors of each of their sums, so that additions need not wait for each other
constexpr int64_t kPerThread = 16384;  // weights that are worth waking a thread for

// kTogether outputs of a row, or fewer: those after the last are computed of the last once more.
template <class T> FULMEN_INLINE void outputs_of(T type, const Call &c, int64_t row, int64_t first, float *to) {
    typedef typename T::Stored Stored;
    const Stored *const x = (const Stored *)rows_of(c.x, 0, 0).row(row);
    const Stored *weight[kTogether];
    for (int o = 0; o < kTogether; ++o)
        weight[o] = (const Stored *)rows_of(c.weight, 0, 0).row(smaller(first + o, c.outputs - 1));
    Vec sums[kTogether][kTerms] = {};
    int64_t i = 0;
    for (; i + kTerms * kLanes <= c.inputs; i += kTerms * kLanes)
#pragma GCC unroll 8
        for (int t = 0; t < kTerms; ++t) {
            const Vec value = load_as(type, x + i + t * kLanes);
#pragma GCC unroll 8
            for (int o = 0; o < kTogether; ++o)
                sums[o][t] = multiply_add(load_as(type, weight[o] + i + t * kLanes), value, sums[o][t]);
        }
    for (; i < c.inputs; i += kLanes) {
        const Vec value = load_some(type, x + i, c.inputs - i);
        for (int o = 0; o < kTogether; ++o)
            sums[o][0] = multiply_add(load_some(type, weight[o] + i, c.inputs - i), value, sums[o][0]);
    }
    for (int o = 0; o < kTogether; ++o) to[o] = sum_lanes(sums[o][0] + sums[o][1]);
}

template <class T> void product(T type, const Call &c, int64_t first) {
    static_assert(kTerms == 2 && kTogether <= kPanel, "what is added above, and what is gathered and scattered");
    const int64_t count = smaller<int64_t>(kTogether, c.outputs - first);
    alignas(64) float bias[kPanel] = {}, sums[kPanel] = {};
    if (c.bias.data) gather(rows_of(c.bias, 0, 0), first, count, bias);
    for (int64_t row = 0; row < c.rows; ++row) {
        outputs_of(type, c, row, first, sums);
        for (int o = 0; o < kTogether; ++o) sums[o] += bias[o];
        const Rows output = rows_of(c.output, 0, 0).from(row, first);
        scatter(sums, {output.data, output.dtype, 1}, 0, count);
    }
}

}  // namespace

int64_t linear(const Call &c) {
    const int64_t blocks = (c.outputs + kTogether - 1) / kTogether;
    const int64_t threads = smaller(c.header.threads, 1 + c.outputs * c.inputs / kPerThread);
    with_type(c.x.dtype, [&](auto type) {
        parallel_for_in_place(threads, blocks, [&](int64_t block) { product(type, c, block * kTogether); });
    });
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
