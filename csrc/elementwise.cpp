// Functions of numbers that stand between the products, the norms and the recurrence of a decode step: a few thousand
// numbers at most, with any strides.
#include <math.h>

#include "kernels.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

FULMEN_INLINE Vec log_1_plus(Vec x) {
    float lanes[kLanes];
    store(lanes, x);
    for (float &lane : lanes) lane = log1pf(lane);
    return load(lanes);
}

FULMEN_INLINE Vec result(int64_t function, Vec a, Vec b) {
    switch (function) {
        case FULMEN_SILU: return a * sigmoid(a);
        case FULMEN_SIGMOID: return sigmoid(a);
        case FULMEN_EXP: return exp(a);
        case FULMEN_SOFTPLUS: return select(a > 20.0f, a, log_1_plus(exp(a)));
        case FULMEN_LOG_SIGMOID: return select(a < Vec{}, a, Vec{}) - log_1_plus(exp(select(a < Vec{}, a, -a)));
        case FULMEN_ADD: return a + b;
        case FULMEN_MULTIPLY: return a * b;
        case FULMEN_DIVIDE: return a / b;
        case FULMEN_LARGER: return select(a < b, b, a);  // of NaN: NaN, as in the next
        case FULMEN_SMALLER: return select(b < a, b, a);
    }
    return a;
}

}  // namespace

int64_t elementwise(const fulmen_elementwise_call &c) {
    alignas(64) float a[kPanel], b[kPanel], y[kPanel];
    for (float &x : b) x = (float)c.scalar;
    for (int64_t batch = 0; batch < c.batch; ++batch)
        for (int64_t token = 0; token < c.tokens; ++token)
            for (int64_t channel = 0; channel < c.channels; channel += kPanel) {
                const int64_t count = smaller<int64_t>(kPanel, c.channels - channel);
                gather(across(c.a, batch, token, channel), 0, count, a);
                if (c.b.data) gather(across(c.b, batch, token, channel), 0, count, b);
                for (int l = 0; l < kPanel; l += kLanes) store(y + l, result(c.function, load(a + l), load(b + l)));
                scatter(y, across(c.output, batch, token, channel), 0, count);
            }
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
