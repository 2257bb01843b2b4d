// The gradient of chunk_states: the backward's second walk without queries. The forward's result gives the state that
// enters every chunk of the caller's, so nothing is recomputed.
#include "backward_worker.h"
#include "kernels.h"
#include "shared_gradient.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

class HeadStatesBackward {
public:
    HeadStatesBackward(Arena &arena, const fulmen_states_backward_call &call)
        : call(call),
          p(call.problem),
          chunks((p.tokens + call.chunk_size - 1) / call.chunk_size),
          worker(arena, call.problem, call.dlog_decay.data, call.dlog_decay_v.data),
          boundary(arena.panels(p.key_size, p.value_size)) {
        if (call.dlog_decay.data && !has_tokens(p.decay_form)) per_token = arena.floats(p.tokens);
    }

    void start(int64_t index) {
        batch = index / p.heads;
        h = index % p.heads;
        Head head = head_of(p, sequence(p, batch), h, 0);
        head.q = Rows{};
        worker.start(head);
        HeadGradients &out = worker.out;
        out.k = rows_of(call.dk, batch, h / (p.heads / p.key_heads));
        out.v = rows_of(call.dv, batch, h / (p.heads / p.value_heads));
        out.log_decay = per_token ? Rows{(char *)per_token, FULMEN_FLOAT32, 1} : rows_of(call.dlog_decay, batch, h);
        out.log_decay_v = rows_of(call.dlog_decay_v, batch, h);
        worker.key_gradient.start(out.log_decay, !p.initial_state.data);
        worker.value_gradient.start(out.log_decay_v, !p.initial_state.data);
    }

    void enter() { worker.enter(grad_state(chunks)); }

    // Tokens from `last` down to `first`, both of which are boundaries of segments.
    void walk_left(int64_t first, int64_t last) {
        while (last > first) {
            const int64_t chunk = (last - 1) / call.chunk_size, start = chunk * call.chunk_size;
            const int64_t t = start + (last - 1 - start) / kChunk * kChunk;
            if (last == smaller(p.tokens, start + call.chunk_size)) restart(state(chunk + 1));
            worker.walk_left(t, last - t);
            if (t == start) add_gradient(grad_state(chunk));
            last = t;
        }
    }

    void store_initial_gradient() {
        const Matrix dinitial = matrix_of(call.dinitial, batch, h);
        if (dinitial.present()) store_state(worker.state, p.key_size, p.value_size, dinitial);
    }

    HeadGradients &out() { return worker.out; }
    double &decay_sum() { return worker.key_gradient.sum; }

private:
    void restart(Matrix at) {
        const bool keys = worker.key_gradient.wanted(), values = worker.value_gradient.wanted();
        if (!keys && !values) return;
        load_state(at, p.key_size, p.value_size, boundary);
        if (keys) worker.key_gradient.restart(boundary, worker.state, p.key_size, p.value_size, Along::Keys);
        if (values) worker.value_gradient.restart(boundary, worker.state, p.key_size, p.value_size, Along::Values);
    }
    void add_gradient(Matrix gradient) {
        load_state(gradient, p.key_size, p.value_size, boundary);
        for (int64_t x = 0; x < worker.value.blocks(); ++x)
            for (int64_t y = 0; y < worker.key.blocks() * kBlock; y += kLanes)
                store(worker.state.panel(x) + y, load(worker.state.panel(x) + y) + load(boundary.panel(x) + y));
    }
    Matrix state(int64_t c) const {
        return {(float *)call.states + batch * call.stride_batch + h * call.stride_head + c * call.stride_chunk,
                p.value_size, 1};
    }
    Matrix grad_state(int64_t c) const {
        return {(float *)call.grad_states + batch * call.grad_stride_batch + h * call.grad_stride_head +
                    c * call.grad_stride_chunk,
                p.value_size, 1};
    }

    const fulmen_states_backward_call &call;
    const fulmen_problem &p;
    int64_t chunks;
    BackwardWorker worker;
    Panels boundary;
    float *per_token = nullptr;
    int64_t batch = 0, h = 0;
};

struct Plan {
    int64_t threads, heads, head_bytes, group;
    SharedGradient dk, dv;
    double *sums;  // the decay gradient of each head, over its tokens
    char *memory;  // of each head that is walked at a time

    Plan(const fulmen_states_backward_call &call)
        : threads(useful_threads(call.problem, 6.0 * (double)call.problem.key_size * (double)call.problem.value_size)),
          heads(call.problem.batch * call.problem.heads),
          dk{&call.dk, call.problem.key_heads, call.problem.key_size},
          dv{&call.dv, call.problem.value_heads, call.problem.value_size} {
        const fulmen_problem &p = call.problem;
        group = group_of(p, {&dk, &dv});
        threads = larger<int64_t>(1, smaller(threads, heads));
        Arena counting(nullptr);
        HeadStatesBackward(counting, call);
        for (SharedGradient *x : {&dk, &dv}) x->reserve(counting, p, smaller(kSharedSegment, p.tokens));
        head_bytes = counting.bytes();
    }
    Teams teams(const fulmen_problem &p) const { return Teams(p, threads, group); }
    bool reserve(const fulmen_problem &p) {
        return reserve_workspace(p.header, [&](Arena &arena) { reserve(arena, p); });
    }

private:
    void reserve(Arena &arena, const fulmen_problem &p) {
        sums = (double *)arena.floats(2 * heads);
        memory = (char *)arena.floats(teams(p).count * teams(p).heads * head_bytes / 4);
    }
};

// Where the segment that ends at token `last` begins: whole chunks of the caller's, or part of one.
int64_t shared_segment_start(int64_t last, int64_t chunk_size) {
    if (chunk_size <= kSharedSegment)
        return (last - 1) / (kSharedSegment / chunk_size * chunk_size) * (kSharedSegment / chunk_size * chunk_size);
    const int64_t chunk_start = (last - 1) / chunk_size * chunk_size;
    return chunk_start + (last - 1 - chunk_start) / kSharedSegment * kSharedSegment;
}

void walk(const fulmen_states_backward_call &call, const Plan &plan, const Team &team) {
    const fulmen_problem &p = call.problem;
    auto for_each_head = [&](auto f) {
        team.for_each_head([&](int64_t index) {
            Arena arena(team.memory_of(index));
            HeadStatesBackward head(arena, call);
            head.start(index);
            f(head, index);
        });
    };
    for_each_head([&](HeadStatesBackward &head, int64_t index) {
        plan.sums[index] = 0;
        head.enter();
    });
    for (int64_t first, last = p.tokens; last > 0; last = first) {
        first = plan.group > 1 ? shared_segment_start(last, call.chunk_size) : 0;
        for_each_head([&](HeadStatesBackward &head, int64_t index) {
            head.out().k = plan.dk.own(p, team, index, first, head.out().k);
            head.out().v = plan.dv.own(p, team, index, first, head.out().v);
            head.decay_sum() = plan.sums[index];
            head.walk_left(first, last);
            plan.sums[index] = head.decay_sum();
        });
        plan.dk.sum(p, team, first, last);
        plan.dv.sum(p, team, first, last);
    }
    for_each_head([&](HeadStatesBackward &head, int64_t) { head.store_initial_gradient(); });
}

}  // namespace

int64_t states_backward(const fulmen_states_backward_call &call) {
    Plan plan(call);
    if (!plan.reserve(call.problem)) return FULMEN_NO_WORKSPACE;
    plan.teams(call.problem).for_each(plan.heads, plan.memory, plan.head_bytes, [&](const Team &team) {
        walk(call, plan, team);
    });
    sum_over_sequences(call.problem, plan.sums, call.dlog_decay);
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
