// With dz_t = dy_t activation'(z_t), where z is recomputed:
//
//     du_s = sum over j of w_j dz_{s+K-1-j}     dw_j = sum over t of dz_t u_{t-K+1+j}     dbias = sum over t of dz_t
//
// A second tile has dy, then dz, then du, which is K - 1 tokens late: a run of tokens goes on for K - 1 more.
#include "convolution.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// For tokens [from, to) of a tile: rows K - 1 + t of g from dy to dz. Adds to the sums dw and dbias if they are Own.
template <int Fixed, bool Own>
void differentiate(Panels u, Panels g, Panels taps, Panels sums, const Convolution &p, Channels c, int64_t from,
                   int64_t to) {
    for_vectors(c, [=, &p](int64_t panel, int64_t lane) {
        const Filter<Fixed> filter(taps.panel(panel) + lane, p.width);
        Filter<Fixed> total(sums.panel(panel) + lane, p.width);
        const float *window = u.panel(panel) + lane + from * kPanel;
        float *row = g.panel(panel) + lane + (from + filter.width - 1) * kPanel;
        for (int64_t t = from; t < to; ++t, row += kPanel, window += kPanel) {
            Vec dz = load(row);
            if (p.activation == FULMEN_SILU) {
                const Vec z = filter(window), s = sigmoid(z);
                dz *= s * (1.0f + z * (1.0f - s));
                store(row, dz);
            }
            if constexpr (Own) total.add(dz, window);
        }
        if constexpr (Own) total.store_to(sums.panel(panel) + lane);
    });
}

// Rows [0, count) of g, from dz to du.
template <int Fixed> void adjoin(Panels g, Panels taps, const Convolution &p, Channels c, int64_t count) {
    for_vectors(c, [=, &p](int64_t panel, int64_t lane) {
        const Filter<Fixed> filter(taps.panel(panel) + lane, p.width);
        float *row = g.panel(panel) + lane;
        for (int64_t t = 0; t < count; ++t, row += kPanel) store(row, filter.adjoint(row));
    });
}

void clear(Panels tile, Channels c, int64_t first, int64_t last) {
    for (int64_t p = 0; p < c.panels(); ++p)
        for (int64_t i = first * kPanel; i < last * kPanel; ++i) tile.panel(p)[i] = 0;
}

struct Worker {
    const Plan &plan;
    const Panels u, g, taps;
    Worker(Arena &arena, const Plan &plan)
        : plan(plan),
          u(arena.panels(plan.tile_rows(), plan.width)),
          g(arena.panels(plan.tile_rows(), plan.width)),
          taps(new_taps(arena, plan)) {}

    void run(const fulmen_causal_conv1d_backward_call &call, int64_t task, Panels sums) const {
        const Convolution &p = plan.p;
        const Channels c = plan.channels(task);
        const int64_t before = p.width - 1;
        load_taps(p, c, taps);
        clear(sums, c, 0, p.width + 1);
        plan.runs(task, [&](const Sequence &q, int64_t first, int64_t last) {
            load_before(p, q, first, c, u);
            clear(g, c, 0, before);
            if (first == 0) forget(call, q, c);
            for (int64_t t = first; t < last + before; t += plan.tile_tokens) {
                const int64_t count = smaller(plan.tile_tokens, last + before - t);
                const int64_t live = smaller(count, larger<int64_t>(0, q.tokens - t));
                const int64_t own = smaller(live, larger<int64_t>(0, last - t));
                if (live > 0) {
                    load_tokens(p.x, q.batch, q.first + t, live, c, below(u, before));
                    load_tokens(call.grad_output, q.batch, q.first + t, live, c, below(g, before));
                }
                clear(g, c, before + live, before + count);
                with_width(p.width, [&](auto width) {
                    constexpr int kFixed = decltype(width)::value;
                    differentiate<kFixed, true>(u, g, taps, sums, p, c, 0, own);
                    differentiate<kFixed, false>(u, g, taps, sums, p, c, own, live);
                    adjoin<kFixed>(g, taps, p, c, count);
                });
                leave(call, q, t - before, first, t - before + count, c);
                carry(u, c, before, count);
                carry(g, c, before, count);
            }
        });
    }

    // du of inputs [s, last), from the first row on, to dx and to the initial state. Those before `first` are another
    // run's, but for the initial state.
    void leave(const fulmen_causal_conv1d_backward_call &call, const Sequence &q, int64_t s, int64_t first,
               int64_t last, Channels c) const {
        for (int64_t row = 0; s + row < last; ++row)
            for (int64_t i = 0; i < c.panels(); ++i) {
                add_state(call, q, s + row, c, i, g.panel(i) + row * kPanel);
                if (s + row < 0 && first == 0) store_initial(call, q, s + row, c, i, g.panel(i) + row * kPanel);
            }
        const int64_t start = larger(s, first);
        if (start < last) store_tokens(below(g, start - s), call.dx, q.batch, q.first + start, last - start, c);
    }

    // What input s of a sequence gets from the final state.
    void add_state(const fulmen_causal_conv1d_backward_call &call, const Sequence &q, int64_t s, Channels c, int64_t i,
                   float *to) const {
        const int64_t place = s - (q.tokens - plan.p.state_width);
        if (place < 0 || !call.grad_state.data) return;
        alignas(64) float values[kPanel];
        gather(across(call.grad_state, q.state, place, c.first + i * kPanel), 0, c.of_panel(i), values);
        for (int l = 0; l < kPanel; ++l) to[l] += values[l];
    }

    void store_initial(const fulmen_causal_conv1d_backward_call &call, const Sequence &q, int64_t s, Channels c,
                       int64_t i, const float *from) const {
        if (!call.dinitial.data) return;
        const Rows rows = across(call.dinitial, q.state, plan.p.state_width + s, c.first + i * kPanel);
        scatter(from, rows, 0, c.of_panel(i));
    }

    // Inputs of the initial state that are too old for any window only go on to the final state, if that reaches them.
    void forget(const fulmen_causal_conv1d_backward_call &call, const Sequence &q, Channels c) const {
        for (int64_t s = -plan.p.state_width; s < -(plan.p.width - 1); ++s)
            for (int64_t i = 0; i < c.panels(); ++i) {
                alignas(64) float values[kPanel] = {};
                add_state(call, q, s, c, i, values);
                store_initial(call, q, s, c, i, values);
            }
    }
};

}  // namespace

int64_t causal_conv1d_backward(const fulmen_causal_conv1d_backward_call &call) {
    const Convolution &p = call.problem;
    const Plan plan(p, 40 + 6.0 * (double)p.width);
    // For each part and panel dw and dbias of its channels, as taps are.
    const int64_t panels = padded(p.channels) / kPanel, stride = (p.width + 1) * kPanel;
    const int64_t bytes = bytes_of<Worker>(plan), all_sums = plan.parts * panels * stride;
    char *const memory = workspace_of(p.header, plan.threads * bytes + all_sums * (int64_t)sizeof(float));
    if (!memory) return FULMEN_NO_WORKSPACE;
    float *const sums = (float *)(memory + plan.threads * bytes);
    parallel_for(plan.threads, plan.tasks, [&](int64_t task, int64_t worker) {
        const int64_t part = task / plan.blocks, panel = plan.channels(task).first / kPanel;
        Arena arena(memory + worker * bytes);
        Worker(arena, plan).run(call, task, {sums + (part * panels + panel) * stride, stride});
    });
    for (int64_t panel = 0; panel < panels; ++panel) {
        float *const total = sums + panel * stride;
        for (int64_t part = 1; part < plan.parts; ++part)
            for (int64_t i = 0; i < stride; ++i) total[i] += total[part * panels * stride + i];
        const int64_t channel = panel * kPanel, count = smaller<int64_t>(kPanel, p.channels - channel);
        if (call.dweight.data)
            for (int64_t j = 0; j < p.width; ++j)
                scatter(total + j * kPanel, across(call.dweight, 0, j, channel), 0, count);
        if (call.dbias.data) scatter(total + p.width * kPanel, across(call.dbias, 0, 0, channel), 0, count);
    }
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
