// chunk_states: the state that enters each chunk of the caller's size, and the final one.
#include "kernels.h"
#include "worker.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

struct Plan {
    int64_t threads, chunks;
    Slices slices;
    bool parallel;
    Plan(const fulmen_states_forward_call &call) {
        const fulmen_problem &p = call.problem;
        const int64_t heads = p.batch * p.heads;
        threads = useful_threads(p, 2.0 * (double)p.key_features * (double)p.value_features);
        chunks = (p.tokens + call.chunk_size - 1) / call.chunk_size;
        slices = slices_of(heads, threads, p.value_features);
        parallel = !p.deterministic &&
                   (p.schedule == FULMEN_PARALLEL || (p.schedule == FULMEN_AUTO && heads * slices.count < threads));
        threads = larger<int64_t>(1, smaller(threads, heads * slices.count * (parallel ? chunks : 1)));
    }
};

// One head's slice of value features.
struct Strand {
    Head head;
    int64_t columns;
    Matrix initial, first_state;
    int64_t stride_chunk;
    Matrix state(int64_t chunk) const {
        return {first_state.data + chunk * stride_chunk, first_state.stride_row, first_state.stride_column};
    }
};

Strand strand_of(const fulmen_states_forward_call &call, const Plan &plan, int64_t index) {
    const fulmen_problem &p = call.problem;
    const int64_t column = index % plan.slices.count * plan.slices.width;
    const int64_t h = index / plan.slices.count % p.heads, batch = index / plan.slices.count / p.heads;
    Strand x;
    x.columns = smaller(plan.slices.width, p.value_features - column);
    x.head = head_of(p, sequence(p, batch), h, column);
    x.initial = matrix_of(p.initial_state, batch, h).from_column(column);
    x.first_state = {call.states + batch * call.stride_batch + h * call.stride_head + column, p.value_features, 1};
    x.stride_chunk = call.stride_chunk;
    return x;
}

int64_t worker_bytes(const fulmen_problem &p, const Plan &plan) {
    Arena counting(nullptr);
    ForwardWorker(counting, p, plan.slices.width);
    return counting.bytes();
}

// Room for one chunk's decay totals of the keys, then of the values.
int64_t totals_size(const fulmen_problem &p) { return padded(p.key_features) + padded(p.value_features); }

void fill_ones(float *x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = 1;
}

}  // namespace

int64_t states_forward_workspace(const fulmen_states_forward_call &call) {
    const fulmen_problem &p = call.problem;
    const Plan plan(call);
    const int64_t totals =
        plan.parallel ? p.batch * p.heads * plan.slices.count * plan.chunks : plan.threads;
    return plan.threads * worker_bytes(p, plan) + totals * totals_size(p) * 4;
}

int64_t states_forward(const fulmen_states_forward_call &call) {
    const fulmen_problem &p = call.problem;
    const Plan plan(call);
    const int64_t strands = p.batch * p.heads * plan.slices.count, per_worker = worker_bytes(p, plan);
    const int64_t d_count = p.key_features, d_padded = padded(d_count);
    auto memory_of = [&](int64_t worker) { return Arena((char *)p.workspace + worker * per_worker); };
    float *totals = (float *)((char *)p.workspace + plan.threads * per_worker);
    auto chunk_start = [&](int64_t chunk) { return smaller(p.tokens, chunk * call.chunk_size); };

    if (!plan.parallel) {
        parallel_for(plan.threads, strands, [&](int64_t index, int64_t worker) {
            const Strand x = strand_of(call, plan, index);
            Arena arena = memory_of(worker);
            ForwardWorker run(arena, p, x.columns);
            float *unused = totals + worker * totals_size(p);
            fill_ones(unused, totals_size(p));
            load_state(x.initial, d_count, x.columns, run.state);
            for (int64_t c = 0; c < plan.chunks; ++c) {
                store_state(run.state, d_count, x.columns, x.state(c));
                run.advance(x.head, chunk_start(c), chunk_start(c + 1), unused, unused + d_padded);
            }
            store_state(run.state, d_count, x.columns, x.state(plan.chunks));
        });
        return FULMEN_OK;
    }

    // Every chunk from nothing, its result where the next chunk's entering state belongs; then fold from the left.
    parallel_for(plan.threads, strands * plan.chunks, [&](int64_t index, int64_t worker) {
        const int64_t c = index % plan.chunks;
        const Strand x = strand_of(call, plan, index / plan.chunks);
        Arena arena = memory_of(worker);
        ForwardWorker run(arena, p, x.columns);
        float *own = totals + index * totals_size(p);
        fill_ones(own, totals_size(p));
        load_state(Matrix{}, d_count, x.columns, run.state);
        run.advance(x.head, chunk_start(c), chunk_start(c + 1), own, own + d_padded);
        store_state(run.state, d_count, x.columns, x.state(c + 1));
    });
    parallel_for(plan.threads, strands, [&](int64_t index, int64_t worker) {
        const Strand x = strand_of(call, plan, index);
        Arena arena = memory_of(worker);
        ForwardWorker scratch(arena, p, x.columns);
        load_state(x.initial, d_count, x.columns, scratch.state);
        store_state(scratch.state, d_count, x.columns, x.state(0));
        for (int64_t c = 0; c < plan.chunks; ++c) {
            const float *key_totals = totals + (index * plan.chunks + c) * totals_size(p);
            const float *value_totals = key_totals + d_padded;
            const Matrix entering = x.state(c), leaving = x.state(c + 1);
            for (int64_t d = 0; d < d_count; ++d) {
                const float *from = entering.data + d * entering.stride_row;
                float *to = leaving.data + d * leaving.stride_row;
                for (int64_t e = 0; e < x.columns; ++e) to[e] = from[e] * key_totals[d] * value_totals[e] + to[e];
            }
        }
    });
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
