// The forward pass: which head, value channels and tokens each worker takes.
#include "forward_worker.h"
#include "kernels.h"
#include "tile_worker.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

ForwardPlan plan_of(const fulmen_problem &p) {
    const double d = (double)p.key_size, e = (double)p.value_size;
    return ForwardPlan(p, 4 * d * e + 65 * (d + e), 2);
}

// A call, and how it is partitioned.
struct Attention {
    const fulmen_attention_forward_call &call;
    const ForwardPlan plan;
    const bool reversed;
    HeadSlice operator[](int64_t index) const {
        const HeadSlice x = head_slice(call.problem, call.output, call.final_state, plan.slices, index);
        return reversed ? FULMEN_ISA::reversed(x) : x;
    }
};

template <class Head> void start(Head &head, const fulmen_attention_forward_call &call, const HeadSlice &x) {
    alignas(64) float skip[kPanel] = {};
    if (call.skip.data) gather(rows_of(call.skip, 0, x.index), 0, 1, skip);
    head.start(x.head, rows_of(call.value_weights, x.sequence.batch, x.index).from(x.sequence.first, 0), skip[0]);
}

// Both return whether a log-decay was above 0.
template <class Worker> bool attend_whole(const Attention &heads, int64_t task, Arena arena) {
    return FULMEN_ISA::attend_whole<Worker>(
        arena, heads.call.problem, heads.plan, task, [&](int64_t index) { return heads[index]; },
        [&](auto &worker, const HeadSlice &x) { start(worker, heads.call, x); });
}

bool attend_token_by_token(const fulmen_attention_forward_call &call, const HeadSlice &x, Arena arena) {
    const fulmen_problem &p = call.problem;
    TokenBuffer buffer(arena, p.key_size, x.columns);
    auto sweep = [&](float *state, int64_t stride, int64_t t, Rows log_decay) {
        buffer.load(x.head, t, p.decay_form, log_decay, p.decay_v_form, (float)p.scale);
        buffer.sweep_rows(Float32(), state, stride);
    };
    return attend_token_by_token(p, x, arena, buffer, sweep);
}

// Of a call, in bytes.
template <class Worker> struct Workspace {
    int64_t per_worker, per_summary, all;
    Workspace(const fulmen_problem &p, const ForwardPlan &plan) {
        const int64_t columns = plan.slices.width;
        per_worker = p.schedule == FULMEN_RECURRENT ? token_by_token_bytes<TokenBuffer>(p, columns)
                                                    : bytes_of<Worker>(p, columns, plan.together);
        per_summary = plan.segments > 1 ? bytes_of<Summary>(p.key_size, columns) : 0;
        all = plan.threads * per_worker + plan.head_slices() * plan.segments * per_summary;
    }
};

template <class Worker>
int64_t attention_forward_with(const fulmen_attention_forward_call &call, bool reversed = false) {
    const fulmen_problem &p = call.problem;
    const Attention heads{call, plan_of(p), reversed};
    const ForwardPlan &plan = heads.plan;
    const int64_t segments = plan.segments;
    const Workspace<Worker> bytes(p, plan);
    const int64_t per_worker = bytes.per_worker, per_summary = bytes.per_summary;
    char *const workspace = workspace_of(p.header, bytes.all);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    auto memory_of = [&](int64_t worker) { return Arena(workspace + worker * per_worker); };

    Notice grows;
    if (segments == 1 || p.schedule == FULMEN_RECURRENT) {
        parallel_for(plan.threads, plan.tasks(), [&](int64_t task, int64_t worker) {
            grows |= p.schedule == FULMEN_RECURRENT ? attend_token_by_token(call, heads[task], memory_of(worker))
                                                    : attend_whole<Worker>(heads, task, memory_of(worker));
        });
        return grows ? FULMEN_GROWS : FULMEN_OK;
    }

    auto summary_of = [&](const HeadSlice &x, int64_t part) {
        Arena arena(workspace + plan.threads * per_worker + part * per_summary);
        return Summary(arena, p.key_size, x.columns);
    };
    auto for_each_segment = [&](auto f) {
        parallel_for(plan.threads, plan.head_slices() * segments, [&](int64_t part, int64_t worker) {
            const HeadSlice x = heads[part / segments];
            const int64_t n = x.sequence.tokens, g = part % segments;
            Arena arena = memory_of(worker);
            const Worker run(arena, p, x.columns, Together{});
            start(run.head(0), call, x);
            f(x, summary_of(x, part), run, segment_start(n, g, segments), segment_start(n, g + 1, segments),
              g + 1 == segments);
        });
    };
    for_each_segment(
        [&](const HeadSlice &, Summary summary, const Worker &run, int64_t first, int64_t last, bool ends) {
            // What the last segment leaves is only ever read as the final state, which running it yields.
            summary.summarise(run.head(0), ends ? 0 : chunks_of(last - first, Worker::kTokens),
                              [&](int64_t chunk) { run.head(0).advance(first + chunk * Worker::kTokens, last); });
        });
    parallel_for(plan.threads, plan.head_slices(), [&](int64_t index, int64_t worker) {
        const HeadSlice x = heads[index];
        Arena arena = memory_of(worker);
        const Panels entering = Worker(arena, p, x.columns, Together{}).head(0).state;
        load_state(x.initial, p.key_size, x.columns, entering);
        for (int64_t g = 0; g < segments; ++g) summary_of(x, index * segments + g).fold(entering);
    });
    for_each_segment(
        [&](const HeadSlice &x, Summary summary, const Worker &run, int64_t first, int64_t last, bool ends) {
            run.head(0).enter(summary.state());
            const bool final = ends && x.final.present();
            run.attend(&x, first, last, first == 0 && !x.initial.present(), final);
            grows |= run.head(0).grows();
            if (final) store_state(run.head(0).state, p.key_size, x.columns, x.final);
        });
    return grows ? FULMEN_GROWS : FULMEN_OK;
}

// Calls f with the element of a call's workers.
template <class F> int64_t with_element(const fulmen_attention_forward_call &call, F f) {
#if FULMEN_TILES
    if (attends_in_tiles(call.problem)) return f(Tile());
#endif
    if (call.value_weights.data || call.skip.data) return f(float());
    return with_element(call.problem, f);
}

}  // namespace

int64_t attention_forward(const fulmen_attention_forward_call &call) {
    return with_element(call,
                        [&](auto element) { return attention_forward_with<ForwardWorker<decltype(element)>>(call); });
}

#if FULMEN_TILES
int64_t attention_forward_in_tiles(const fulmen_attention_forward_call &call, bool reversed) {
    return attention_forward_with<ForwardWorker<Tile>>(call, reversed);
}
#endif

int64_t attention_forward_workspace(const fulmen_attention_forward_call &call) {
    return with_element(call, [&](auto element) {
        return Workspace<ForwardWorker<decltype(element)>>(call.problem, plan_of(call.problem)).all;
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
