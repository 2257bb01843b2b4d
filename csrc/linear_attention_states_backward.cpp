// The gradient of chunk_states: the backward's second walk without queries. The forward's result gives the state that
// enters every chunk of the caller's, so nothing is computed again.
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
          worker(arena, call.problem, call.ddecay.data, call.ddecay_v.data),
          boundary(arena.panels(p.key_features, p.value_features)) {
        if (call.ddecay.data && p.decay_form == FULMEN_DECAY_HEAD) per_token = arena.floats(p.tokens);
    }

    void start(int64_t index) {
        batch = index / p.heads;
        h = index % p.heads;
        Head head = head_of(p, sequence(p, batch), h, 0);
        head.q = Rows{};
        worker.start(head, p.tokens);
        HeadGradients &out = worker.out;
        out.k = rows_of(call.dk, batch, h / (p.heads / p.key_heads));
        out.v = rows_of(call.dv, batch, h / (p.heads / p.value_heads));
        out.decay = per_token ? Rows{(char *)per_token, FULMEN_FLOAT32, 1} : rows_of(call.ddecay, batch, h);
        out.decay_v = rows_of(call.ddecay_v, batch, h);
        worker.key_gradient.start(out.decay, !p.initial_state.data);
        worker.value_gradient.start(out.decay_v, !p.initial_state.data);
    }

    void load_final_gradient() { load_state(grad_state(chunks), p.key_features, p.value_features, worker.state); }

    void walk_left(int64_t chunk) {
        const int64_t first = chunk * call.chunk_size, last = smaller(p.tokens, first + call.chunk_size);
        if (worker.key_gradient.wanted() || worker.value_gradient.wanted()) {
            load_state(state(chunk + 1), p.key_features, p.value_features, boundary);
            if (worker.key_gradient.wanted()) worker.key_gradient.restart(boundary, worker.state, p.key_features, p.value_features, Along::Keys);
            if (worker.value_gradient.wanted()) worker.value_gradient.restart(boundary, worker.state, p.key_features, p.value_features, Along::Values);
        }
        for (int64_t t = first + (last - first - 1) / kChunk * kChunk; t >= first; t -= kChunk)
            worker.walk_left(t, smaller<int64_t>(kChunk, last - t));
        load_state(grad_state(chunk), p.key_features, p.value_features, boundary);
        for (int64_t x = 0; x < worker.value.blocks(); ++x)
            for (int64_t y = 0; y < worker.key.blocks() * kBlock; y += kLanes)
                store(worker.state.panel(x) + y, load(worker.state.panel(x) + y) + load(boundary.panel(x) + y));
    }

    void store_initial_gradient() {
        const Matrix dinitial = matrix_of(call.dinitial, batch, h);
        if (dinitial.present()) store_state(worker.state, p.key_features, p.value_features, dinitial);
    }

    HeadGradients &out() { return worker.out; }
    double decay_sum() const { return worker.key_gradient.sum(); }

private:
    Matrix state(int64_t c) const {
        return {(float *)call.states + batch * call.stride_batch + h * call.stride_head + c * call.stride_chunk,
                p.value_features, 1};
    }
    Matrix grad_state(int64_t c) const {
        return {(float *)call.grad_states + batch * call.grad_stride_batch + h * call.grad_stride_head +
                    c * call.grad_stride_chunk,
                p.value_features, 1};
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
    int64_t threads, heads, chunks, head_bytes;
    bool shares;
    SharedGradient dk, dv;
    double *sums;  // the decay gradient of each head, over its tokens
    char *memory;  // of each worker, or of each head when heads share

    Plan(const fulmen_states_backward_call &call) {
        const fulmen_problem &p = call.problem;
        threads = useful_threads(p, 6.0 * (double)p.key_features * (double)p.value_features);
        heads = p.batch * p.heads;
        threads = larger<int64_t>(1, smaller(threads, heads));
        chunks = (p.tokens + call.chunk_size - 1) / call.chunk_size;
        const int64_t stretch = smaller(call.chunk_size, p.tokens);
        dk = {&call.dk, p.key_heads, p.key_features, stretch};
        dv = {&call.dv, p.value_heads, p.value_features, stretch};
        shares = dk.shared(p) || dv.shared(p);
        Arena counting(nullptr);
        HeadStatesBackward(counting, call);
        head_bytes = counting.bytes();
    }
    void reserve(Arena &arena, const fulmen_problem &p) {
        sums = (double *)arena.floats(2 * heads);
        memory = (char *)arena.floats((shares ? heads : threads) * head_bytes / 4);
        for (SharedGradient *x : {&dk, &dv}) x->reserve(arena, p);
    }
};

void walk_alone(const fulmen_states_backward_call &call, const Plan &plan) {
    parallel_for(plan.threads, plan.heads, [&](int64_t index, int64_t worker) {
        Arena arena(plan.memory + worker * plan.head_bytes);
        HeadStatesBackward head(arena, call);
        head.start(index);
        head.load_final_gradient();
        for (int64_t c = plan.chunks - 1; c >= 0; --c) head.walk_left(c);
        head.store_initial_gradient();
        plan.sums[index] = head.decay_sum();
    });
}

// Heads that share inputs walk side by side, chunk by chunk, so that their gradients can be summed.
void walk_together(const fulmen_states_backward_call &call, const Plan &plan) {
    const fulmen_problem &p = call.problem;
    auto for_each_head = [&](auto walk) {
        parallel_for(plan.threads, plan.heads, [&](int64_t index, int64_t) {
            Arena arena(plan.memory + index * plan.head_bytes);
            HeadStatesBackward head(arena, call);
            head.start(index);
            walk(head, index);
        });
    };
    for_each_head([&](HeadStatesBackward &head, int64_t index) {
        plan.sums[index] = 0;
        head.load_final_gradient();
    });
    for (int64_t c = plan.chunks - 1; c >= 0; --c) {
        const int64_t first = c * call.chunk_size;
        for_each_head([&](HeadStatesBackward &head, int64_t index) {
            head.out().k = plan.dk.own(p, head.out().k, index, first);
            head.out().v = plan.dv.own(p, head.out().v, index, first);
            head.walk_left(c);
            plan.sums[index] += head.decay_sum();
        });
        plan.dk.sum(p, plan.threads, first);
        plan.dv.sum(p, plan.threads, first);
    }
    for_each_head([&](HeadStatesBackward &head, int64_t) { head.store_initial_gradient(); });
}

}  // namespace

int64_t states_backward_workspace(const fulmen_states_backward_call &call) {
    Arena counting(nullptr);
    Plan(call).reserve(counting, call.problem);
    return counting.bytes();
}

int64_t states_backward(const fulmen_states_backward_call &call) {
    Plan plan(call);
    Arena arena(call.problem.workspace);
    plan.reserve(arena, call.problem);
    plan.shares ? walk_together(call, plan) : walk_alone(call, plan);
    sum_over_sequences(call.problem, plan.sums, call.ddecay);
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
