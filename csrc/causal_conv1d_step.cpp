// Decoding: one token for every channel, the state rolled in place.
//
// As a cache has it, each channel's state and weights are dense, and tokens and channels of x are: then kLanes channels
// at a time are transposed in registers, and rolling the states of many channels is one move of memory.
#include "convolution.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

typedef fulmen_causal_conv1d_step_call Call;

constexpr int64_t kTogether = 128;  // channels

bool is_like_a_cache(const Call &c) {
    const int64_t dtype = c.x.dtype;
    return c.state.dtype == dtype && c.weight.dtype == dtype && (!c.bias.data || c.bias.dtype == dtype) &&
           c.output.dtype == dtype && c.x.stride_head == 1 && c.output.stride_head == 1 &&
           (!c.bias.data || c.bias.stride_head == 1) && c.state.stride_token == 1 &&
           c.state.stride_head == c.state_width && c.weight.stride_token == 1 && c.weight.stride_head == c.width &&
           c.state_width >= 1 && c.state_width <= kLanes && c.width <= kLanes;
}

FULMEN_INLINE Vec activated(const Call &c, Vec z) { return c.activation == FULMEN_SILU ? z * sigmoid(z) : z; }

constexpr int kUsual = 4;  // numbers of a channel's state and weights: layers have as many nearly everywhere

// Of kLanes times four numbers the ones at `Number`, of two vectors the first half of the result.
template <int Number, int... L>
FULMEN_INLINE Vec every_fourth(const Vec (&x)[kUsual], std::integer_sequence<int, L...>) {
    const Vec first = __builtin_shufflevector(x[0], x[1], (L % (kLanes / 2) * kUsual + Number)...);
    const Vec second = __builtin_shufflevector(x[2], x[3], (L % (kLanes / 2) * kUsual + Number)...);
    return __builtin_shufflevector(first, second, (L < kLanes / 2 ? L : kLanes + L)...);
}

// The first kLanes numbers of kLanes channels, by number: all of them where they are `kUsual`.
template <class T>
FULMEN_INLINE void load_transposed(T type, const typename T::Stored *from, int64_t stride, Vec (&to)[kLanes]) {
    if (stride == kUsual) {
        constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
        Vec x[kUsual];
        for (int v = 0; v < kUsual; ++v) x[v] = load_as(type, from + v * kLanes);
        to[0] = every_fourth<0>(x, lanes);
        to[1] = every_fourth<1>(x, lanes);
        to[2] = every_fourth<2>(x, lanes);
        to[3] = every_fourth<3>(x, lanes);
        return;
    }
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) to[l] = load_as(type, from + l * stride);
    transpose_lanes<kLanes / 2>(to);
}

// Reads beyond the last of its kLanes channels, but not beyond the next kLanes.
template <class T> FULMEN_INLINE void output_like_a_cache(T type, const Call &c, int64_t batch, int64_t channel) {
    typedef typename T::Stored Stored;
    Vec state[kLanes], weight[kLanes];
    load_transposed(type, (const Stored *)across(c.state, batch, 0, channel).data, c.state_width, state);
    load_transposed(type, (const Stored *)across(c.weight, 0, 0, channel).data, c.width, weight);
    Vec z = c.bias.data ? load_as(type, (const Stored *)across(c.bias, 0, 0, channel).data) : Vec{};
    const Vec x = load_as(type, (const Stored *)across(c.x, batch, 0, channel).data);
    const int64_t first = c.state_width + 1 - c.width;
    for (int64_t j = 0; j + 1 < c.width; ++j) z += weight[j] * state[first + j];
    z += weight[c.width - 1] * x;
    store_as(type, (Stored *)across(c.output, batch, 0, channel).data, activated(c, z));
}

void output_of(const Call &c, int64_t batch, int64_t channel, int64_t count) {
    alignas(64) float z[kPanel] = {}, input[kPanel], tap[kPanel];
    if (c.bias.data) gather(across(c.bias, 0, 0, channel), 0, count, z);
    const int64_t first = c.state_width + 1 - c.width;
    for (int64_t j = 0; j < c.width; ++j) {
        const bool last = j + 1 == c.width;
        gather(last ? across(c.x, batch, 0, channel) : across(c.state, batch, first + j, channel), 0, count, input);
        gather(across(c.weight, 0, j, channel), 0, count, tap);
        for (int l = 0; l < kPanel; l += kLanes) store(z + l, load(z + l) + load(tap + l) * load(input + l));
    }
    for (int l = 0; l < kPanel; l += kLanes) store(z + l, activated(c, load(z + l)));
    scatter(z, across(c.output, batch, 0, channel), 0, count);
}

template <class T> void roll(T, const Call &c, int64_t batch, int64_t channel, int64_t count) {
    typedef typename T::Stored Stored;
    const int64_t width = c.state_width;
    Stored *const state = (Stored *)across(c.state, batch, 0, channel).data;
    const auto at = [&](int64_t l, int64_t i) { return state + l * c.state.stride_head + i * c.state.stride_token; };
    if (c.state.stride_token == 1 && c.state.stride_head == width)
        memmove(state, state + 1, (size_t)(count * width - 1) * sizeof(Stored));
    else
        for (int64_t l = 0; l < count; ++l)
            for (int64_t i = 0; i + 1 < width; ++i) *at(l, i) = *at(l, i + 1);
    if (c.x.dtype == c.state.dtype) {
        const Stored *const x = (const Stored *)across(c.x, batch, 0, channel).data;
        for (int64_t l = 0; l < count; ++l) *at(l, width - 1) = x[l * c.x.stride_head];
    } else
        for (int64_t l = 0; l < count; l += kPanel) {
            alignas(64) float input[kPanel];
            const int64_t n = smaller<int64_t>(kPanel, count - l);
            gather(across(c.x, batch, 0, channel + l), 0, n, input);
            scatter(input, across(c.state, batch, width - 1, channel + l), 0, n);
        }
}

}  // namespace

int64_t causal_conv1d_step(const Call &c) {
    const int64_t blocks = (c.channels + kTogether - 1) / kTogether;
    // A thread is worth waking for some 64 KiB of states and weights.
    const int64_t numbers = c.batch * c.channels * (c.state_width + c.width);
    const bool like_a_cache = is_like_a_cache(c);
    parallel_for_in_place(smaller(c.header.threads, 1 + numbers / 16384), c.batch * blocks, [&](int64_t index) {
        const int64_t batch = index / blocks, first = index % blocks * kTogether;
        const int64_t last = smaller(c.channels, first + kTogether);
        with_type(c.state.dtype, [&](auto type) {
            int64_t channel = first;
            if (like_a_cache)
                for (; channel + kLanes <= last && channel + 2 * kLanes <= c.channels; channel += kLanes)
                    output_like_a_cache(type, c, batch, channel);
            for (; channel < last; channel += kPanel)
                output_of(c, batch, channel, smaller<int64_t>(kPanel, last - channel));
            if (c.state_width > 0) roll(type, c, batch, first, last - first);
        });
    });
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
