#include "convolution.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// Rows [0, count) become the outputs of rows [K - 1, K - 1 + count).
template <int Fixed> void convolve(Panels tile, Panels taps, const Convolution &p, Channels c, int64_t count) {
    for_vectors(c, [=, &p](int64_t panel, int64_t lane) {
        const Filter<Fixed> filter(taps.panel(panel) + lane, p.width);
        float *row = tile.panel(panel) + lane;
        if (p.activation == FULMEN_SILU)
            for (int64_t t = 0; t < count; ++t, row += kPanel) {
                const Vec z = filter(row);
                store(row, z * sigmoid(z));
            }
        else
            for (int64_t t = 0; t < count; ++t, row += kPanel) store(row, filter(row));
    });
}

struct Worker {
    const Plan &plan;
    const Panels tile, taps;
    Worker(Arena &arena, const Plan &plan)
        : plan(plan), tile(arena.panels(plan.tile_rows(), plan.width)), taps(new_taps(arena, plan)) {}

    void run(const fulmen_tensor &output, int64_t task) const {
        const Convolution &p = plan.p;
        const Channels c = plan.channels(task);
        const int64_t before = p.width - 1;
        load_taps(p, c, taps);
        plan.runs(task, [&](const Sequence &q, int64_t first, int64_t last) {
            if (first < last) load_before(p, q, first, c, tile);
            for (int64_t t = first; t < last; t += plan.tile_tokens) {
                const int64_t count = smaller(plan.tile_tokens, last - t);
                load_tokens(p.x, q.batch, q.first + t, count, c, below(tile, before));
                with_width(p.width, [&](auto width) { convolve<decltype(width)::value>(tile, taps, p, c, count); });
                store_tokens(tile, output, q.batch, q.first + t, count, c);
                carry(tile, c, before, count);
            }
        });
    }
};

// The last W inputs of each sequence.
void store_states(const Convolution &p, const fulmen_tensor &states) {
    const int64_t panels = padded(p.channels) / kPanel, tasks = sequences_of(p) * panels;
    const int64_t threads = worthwhile_threads(p.header.threads, 64.0 * (double)(tasks * p.state_width));
    parallel_for(threads, tasks, [&](int64_t task, int64_t) {
        const Sequence q = sequence(p, task / panels);
        const int64_t channel = task % panels * kPanel, count = smaller<int64_t>(kPanel, p.channels - channel);
        for (int64_t i = 0; i < p.state_width; ++i) {
            alignas(64) float values[kPanel];
            load_input(p, q, q.tokens - p.state_width + i, channel, count, values);
            scatter(values, across(states, q.state, i, channel), 0, count);
        }
    });
}

}  // namespace

int64_t causal_conv1d_forward(const fulmen_causal_conv1d_forward_call &call) {
    const Convolution &p = call.problem;
    const Plan plan(p, 24 + 2.0 * (double)p.width);
    const int64_t bytes = bytes_of<Worker>(plan);
    char *const memory = workspace_of(p.header, plan.threads * bytes);
    if (!memory) return FULMEN_NO_WORKSPACE;
    parallel_for(plan.threads, plan.tasks, [&](int64_t task, int64_t worker) {
        Arena arena(memory + worker * bytes);
        Worker(arena, plan).run(call.output, task);
    });
    if (call.final_state.data) store_states(p, call.final_state);
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
