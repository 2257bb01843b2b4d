// RMSNorm of rows, with or without a gate: one pass for the sum of squares and one for the result. Where the gate comes
// first, its products with x are kept in between, as far as they fit.
//
// Backward, with u the row that is normalised, n = rate u, and dn = weight dy, times act(gate) where that comes after:
//
//     du = rate (dn - n (mean of dn n))
//
// which takes one pass for the mean and one for the results. Of the gate its sigmoid is kept in between.
#include <type_traits>

#include "arena.h"
#include "kernels.h"
#include "parallel.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

typedef fulmen_rms_norm_call Call;
typedef fulmen_rms_norm_backward_call BackwardCall;

constexpr int64_t kPerThread = 16384;  // numbers that are worth waking a thread for
constexpr int64_t kKept = 4096;        // channels of a row: 16 KiB of the stack, half of a small L1
// The gradient of the weight is summed over so many parts of the rows, and then over these: in an order that does not
// depend on threads.
constexpr int64_t kMostParts = 256, kLeastTokens = 16;

enum class Gate { None, First, After };

// Calls f with where the gate is, a constant, and with the types of x and of the weight.
template <class Call, class F> FULMEN_INLINE void with_types(const Call &c, F f) {
    const auto with_gate = [&](auto gate) {
        with_type(c.x.dtype, [&](auto type) {
            c.weight.dtype == FULMEN_FLOAT32 ? f(gate, type, Float32()) : f(gate, type, type);
        });
    };
    if (!c.gate.data)
        with_gate(std::integral_constant<Gate, Gate::None>());
    else if (c.gate_first)
        with_gate(std::integral_constant<Gate, Gate::First>());
    else
        with_gate(std::integral_constant<Gate, Gate::After>());
}

// Where row `index` begins in tensors of x's type, and the weights of its head.
template <class T, class W, class Call> struct Place {
    const Call &c;
    const int64_t index, head = index % c.heads, token = index / c.heads % c.tokens, batch = index / c.heads / c.tokens;
    typename T::Stored *row(const fulmen_tensor &x) const {
        return (typename T::Stored *)rows_of(x, batch, head).row(token);
    }
    const typename W::Stored *weight() const { return (const typename W::Stored *)rows_of(c.weight, 0, head).row(0); }
};

template <Gate gate, class T, class W> void norm(T type, W weight_type, const Call &c, int64_t index) {
    const Place<T, W, Call> place{c, index};
    const auto *const x = place.row(c.x), *const gates = place.row(c.gate);
    const auto *const weight = place.weight();
    auto *const output = place.row(c.output);
    // Of the channels from i on; those after the last are 0.
    const auto value = [&](int64_t i) { return load_some(type, x + i, c.size - i); };
    const auto factor = [&](int64_t i) {
        const Vec z = load_some(type, gates + i, c.size - i);
        return c.activation == FULMEN_SILU ? z * sigmoid(z) : sigmoid(z);
    };
    alignas(64) float kept[gate == Gate::First ? kKept : kLanes];
    const auto normed = [&](int64_t i) {
        if constexpr (gate == Gate::First) return i < kKept ? load(kept + i) : value(i) * factor(i);
        return value(i);
    };

    Vec squares = {};
    for (int64_t i = 0; i < c.size; i += kLanes) {
        if constexpr (gate == Gate::First)
            if (i < kKept) store(kept + i, value(i) * factor(i));
        const Vec y = normed(i);
        squares += y * y;
    }
    const float rate = 1 / __builtin_sqrtf(sum_lanes(squares) / (float)c.size + (float)c.epsilon);
    if (c.rates) c.rates[index] = rate;
    for (int64_t i = 0; i < c.size; i += kLanes) {
        const Vec y = normed(i) * rate * load_some(weight_type, weight + i, c.size - i);
        store_some(type, output + i, gate == Gate::After ? y * factor(i) : y, c.size - i);
    }
}

// The gradients of a row. What it gives to the weight is added to dweight, padded, if that is there.
template <Gate gate, class T, class W>
void norm_backward(T type, W weight_type, const BackwardCall &c, int64_t index, float *dweight) {
    const Place<T, W, BackwardCall> place{c, index};
    const auto *const xs = place.row(c.x), *const gates = place.row(c.gate), *const grads = place.row(c.grad_output);
    const auto *const weights = place.weight();
    auto *const dx = place.row(c.dx), *const dgate = place.row(c.dgate);
    const float rate = c.rates[index];

    alignas(64) float kept[gate == Gate::None ? kLanes : kKept];
    struct Channels {
        Vec x, dy, weight, sigmoid, factor;
        Vec n() const { return gate == Gate::First ? x * factor : x; }           // before it is multiplied by the rate
        Vec dweighed() const { return gate == Gate::After ? dy * factor : dy; }  // the gradient of weight n
    };
    // From channel i on; x, dy and the weight are 0 after the last.
    const auto channels = [&](int64_t i, bool again) {
        Channels at = {load_some(type, xs + i, c.size - i), load_some(type, grads + i, c.size - i),
                       load_some(weight_type, weights + i, c.size - i), Vec{}, Vec{}};
        if constexpr (gate != Gate::None) {
            const Vec z = load_some(type, gates + i, c.size - i);
            at.sigmoid = again && i < kKept ? load(kept + i) : sigmoid(z);
            if (!again && i < kKept) store(kept + i, at.sigmoid);
            at.factor = c.activation == FULMEN_SILU ? z * at.sigmoid : at.sigmoid;
        }
        return at;
    };

    Vec sum = {};
    for (int64_t i = 0; i < c.size; i += kLanes) {
        const Channels at = channels(i, false);
        sum += at.dweighed() * at.weight * at.n();
    }
    const float mean = sum_lanes(sum) * rate / (float)c.size;
    for (int64_t i = 0; i < c.size; i += kLanes) {
        const Channels at = channels(i, true);
        const Vec n = at.n() * rate, dweighed = at.dweighed(), du = (dweighed * at.weight - n * mean) * rate;
        store_some(type, dx + i, gate == Gate::First ? du * at.factor : du, c.size - i);
        if constexpr (gate != Gate::None) {
            const Vec slope = (1 - at.sigmoid) * at.factor + (c.activation == FULMEN_SILU ? at.sigmoid : Vec{});
            const Vec dfactor = gate == Gate::First ? du * at.x : at.dy * at.weight * n;
            store_some(type, dgate + i, dfactor * slope, c.size - i);
        }
        if (dweight) store(dweight + i, load(dweight + i) + dweighed * n);
    }
}

template <class Call> int64_t threads_for(const Call &c) {
    return smaller(c.header.threads, 1 + c.batch * c.tokens * c.heads * c.size / kPerThread);
}

}  // namespace

int64_t rms_norm(const Call &c) {
    with_types(c, [&](auto gate, auto type, auto weight_type) {
        parallel_for_in_place(threads_for(c), c.batch * c.tokens * c.heads,
                              [&](int64_t index) { norm<decltype(gate)::value>(type, weight_type, c, index); });
    });
    return FULMEN_OK;
}

int64_t rms_norm_backward(const BackwardCall &c) {
    const int64_t tokens = c.batch * c.tokens, width = padded(c.size), all = c.weight_heads * width;
    const int64_t parts = larger<int64_t>(1, smaller(kMostParts, tokens / kLeastTokens));
    float *const sums = c.dweight ? (float *)workspace_of(c.header, parts * all * (int64_t)sizeof(float)) : nullptr;
    if (c.dweight && !sums) return FULMEN_NO_WORKSPACE;
    with_types(c, [&](auto gate, auto type, auto weight_type) {
        parallel_for(threads_for(c), parts, [&](int64_t part, int64_t) {
            float *const dweight = sums ? sums + part * all : nullptr;
            if (dweight) memset(dweight, 0, all * sizeof(float));
            for (int64_t i = tokens * part / parts * c.heads; i < tokens * (part + 1) / parts * c.heads; ++i)
                norm_backward<decltype(gate)::value>(type, weight_type, c, i,
                                                     dweight ? dweight + i % c.weight_heads * width : nullptr);
        });
    });
    for (int64_t part = 1; part < parts && sums; ++part)
        for (int64_t i = 0; i < all; i += kLanes) store(sums + i, load(sums + i) + load(sums + part * all + i));
    for (int64_t head = 0; head < c.weight_heads && sums; ++head)
        memcpy(c.dweight + head * c.size, sums + head * width, c.size * sizeof(float));
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
