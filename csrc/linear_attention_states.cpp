// chunk_states: the state that enters each chunk of the caller's size, and the final one.
#include "kernels.h"
#include "segments.h"
#include "state_worker.h"
#include "tile_worker.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

struct Plan {
    int64_t threads, chunks, head_slices;
    Slices slices;
    bool parallel;
    Plan(const fulmen_states_forward_call &call) {
        const fulmen_problem &p = call.problem;
        const int64_t heads = p.batch * p.heads;
        threads = useful_threads(p, 2.0 * (double)p.key_size * (double)p.value_size);
        chunks = (p.tokens + call.chunk_size - 1) / call.chunk_size;
        slices = slices_of(heads, threads, p.value_size);
        head_slices = heads * slices.count;
        parallel =
            !p.deterministic && (p.schedule == FULMEN_PARALLEL || (p.schedule == FULMEN_AUTO && head_slices < threads));
        threads = larger<int64_t>(1, smaller(threads, head_slices * (parallel ? chunks : 1)));
    }
};

// One head's slice of value channels.
struct HeadSlice {
    Head head;
    int64_t columns;
    Matrix initial, first_state;
    int64_t stride_chunk;
    Matrix state(int64_t chunk) const {
        return {first_state.data + chunk * stride_chunk, first_state.stride_row, first_state.stride_column};
    }
};

HeadSlice head_slice(const fulmen_states_forward_call &call, const Plan &plan, int64_t index) {
    const fulmen_problem &p = call.problem;
    const int64_t column = index % plan.slices.count * plan.slices.width;
    const int64_t h = index / plan.slices.count % p.heads, batch = index / plan.slices.count / p.heads;
    HeadSlice x;
    x.columns = smaller(plan.slices.width, p.value_size - column);
    x.head = head_of(p, sequence(p, batch), h, column);
    x.initial = matrix_of(p.initial_state, batch, h).from_column(column);
    x.first_state = {call.states + batch * call.stride_batch + h * call.stride_head + column, p.value_size, 1};
    x.stride_chunk = call.stride_chunk;
    return x;
}

template <class Worker> int64_t states_forward_with(const fulmen_states_forward_call &call) {
    const fulmen_problem &p = call.problem;
    const Plan plan(call);
    const int64_t per_worker = bytes_of<Worker>(p, plan.slices.width);
    const int64_t per_totals = plan.parallel ? bytes_of<Totals>(p.key_size, plan.slices.width) : 0;
    char *const workspace =
        workspace_of(p.header, plan.threads * per_worker + plan.head_slices * plan.chunks * per_totals);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    Notice grows;
    auto with_worker = [&](int64_t index, int64_t worker, auto f) {
        const HeadSlice x = head_slice(call, plan, index);
        Arena arena(workspace + worker * per_worker);
        Worker run(arena, p, x.columns);
        run.start(x.head);
        f(x, run);
        grows |= run.grows();
    };
    auto totals_of = [&](const HeadSlice &x, int64_t index, int64_t chunk) {
        Arena arena(workspace + plan.threads * per_worker + (index * plan.chunks + chunk) * per_totals);
        return Totals(arena, p.key_size, x.columns);
    };
    auto chunk_start = [&](int64_t chunk) { return smaller(p.tokens, chunk * call.chunk_size); };

    if (!plan.parallel) {
        parallel_for(plan.threads, plan.head_slices, [&](int64_t index, int64_t worker) {
            with_worker(index, worker, [&](const HeadSlice &x, Worker &run) {
                run.enter(x.initial);
                for (int64_t c = 0; c < plan.chunks; ++c) {
                    store_state(run.state, p.key_size, x.columns, x.state(c));
                    for (int64_t t = chunk_start(c); t < chunk_start(c + 1); t += Worker::kTokens)
                        run.advance(t, chunk_start(c + 1));
                }
                store_state(run.state, p.key_size, x.columns, x.state(plan.chunks));
            });
        });
        return grows ? FULMEN_GROWS : FULMEN_OK;
    }

    // Every chunk from nothing, its result where the next chunk's entering state belongs; then fold from the left.
    parallel_for(plan.threads, plan.head_slices * plan.chunks, [&](int64_t task, int64_t worker) {
        const int64_t index = task / plan.chunks, c = task % plan.chunks;
        with_worker(index, worker, [&](const HeadSlice &x, Worker &run) {
            const int64_t first = chunk_start(c), last = chunk_start(c + 1);
            totals_of(x, index, c).summarise(run, chunks_of(last - first, Worker::kTokens), [&](int64_t chunk) {
                run.advance(first + chunk * Worker::kTokens, last);
            });
            store_state(run.state, p.key_size, x.columns, x.state(c + 1));
        });
    });
    parallel_for(plan.threads, plan.head_slices, [&](int64_t index, int64_t worker) {
        with_worker(index, worker, [&](const HeadSlice &x, Worker &run) {
            run.enter(x.initial);
            store_state(run.state, p.key_size, x.columns, x.state(0));
            for (int64_t c = 0; c < plan.chunks; ++c)
                totals_of(x, index, c)
                    .fold(x.state(c), x.state(c + 1), p.key_size, x.columns,
                          [](float *, float *leaving, int64_t n, Vec, Vec after) {
                              store_some(Float32(), leaving, after, n);
                          });
        });
    });
    return grows ? FULMEN_GROWS : FULMEN_OK;
}

}  // namespace

int64_t states_forward(const fulmen_states_forward_call &call) {
#if FULMEN_TILES
    if (attends_in_tiles(call.problem)) return states_forward_with<TileStateWorker>(call);
#endif
    return with_element(call.problem,
                        [&](auto element) { return states_forward_with<StateWorker<decltype(element)>>(call); });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
