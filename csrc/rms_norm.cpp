// RMSNorm of rows, with or without a gate: one pass for the sum of squares and one for the result. Where the gate comes
// first, its products with x are kept in between, as far as they fit.
#include "kernels.h"
#include "parallel.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

typedef fulmen_rms_norm_call Call;

constexpr int64_t kPerThread = 16384;  // numbers that are worth waking a thread for
constexpr int64_t kKept = 4096;        // channels of a row: 16 KiB of the stack, half of a small L1

template <class T>
FULMEN_INLINE typename T::Stored *row_of(T, const fulmen_tensor &x, int64_t batch, int64_t token, int64_t head) {
    return (typename T::Stored *)rows_of(x, batch, head).row(token);
}

// x, gate and output are of one type, and the weight of another.
template <bool GateFirst, class T, class W> void norm(T type, W weight_type, const Call &c, int64_t index) {
    const int64_t head = index % c.heads, token = index / c.heads % c.tokens, batch = index / c.heads / c.tokens;
    const auto *const x = row_of(type, c.x, batch, token, head), *const gate = row_of(type, c.gate, batch, token, head);
    const auto *const weight = row_of(weight_type, c.weight, 0, 0, head);
    auto *const output = row_of(type, c.output, batch, token, head);
    // Of the channels from i on; those after the last are 0.
    const auto value = [&](int64_t i) { return load_some(type, x + i, c.size - i); };
    const auto factor = [&](int64_t i) {
        const Vec z = load_some(type, gate + i, c.size - i);
        return c.activation == FULMEN_SILU ? z * sigmoid(z) : sigmoid(z);
    };
    alignas(64) float kept[GateFirst ? kKept : kLanes];
    const auto normed = [&](int64_t i) {
        if constexpr (GateFirst) return i < kKept ? load(kept + i) : value(i) * factor(i);
        return value(i);
    };

    Vec squares = {};
    for (int64_t i = 0; i < c.size; i += kLanes) {
        if constexpr (GateFirst)
            if (i < kKept) store(kept + i, value(i) * factor(i));
        const Vec y = normed(i);
        squares += y * y;
    }
    const float rate = 1 / __builtin_sqrtf(sum_lanes(squares) / (float)c.size + (float)c.epsilon);
    if (c.rates) c.rates[index] = rate;
    const bool gate_after = c.gate.data && !GateFirst;
    for (int64_t i = 0; i < c.size; i += kLanes) {
        const Vec y = normed(i) * rate * load_some(weight_type, weight + i, c.size - i);
        store_some(type, output + i, gate_after ? y * factor(i) : y, c.size - i);
    }
}

}  // namespace

int64_t rms_norm(const Call &c) {
    const int64_t rows = c.batch * c.tokens * c.heads;
    const int64_t threads = smaller(c.header.threads, 1 + rows * c.size / kPerThread);
    with_type(c.x.dtype, [&](auto type) {
        const auto run = [&](auto weight_type) {
            if (c.gate.data && c.gate_first)
                parallel_for_in_place(threads, rows, [&](int64_t index) { norm<true>(type, weight_type, c, index); });
            else
                parallel_for_in_place(threads, rows, [&](int64_t index) { norm<false>(type, weight_type, c, index); });
        };
        if (c.weight.dtype == FULMEN_FLOAT32)
            run(Float32());
        else
            run(type);
    });
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
