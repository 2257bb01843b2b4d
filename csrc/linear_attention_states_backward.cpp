// The gradient of chunk_states: a walk from right to left with the gradient of the state, to which that of each of the
// caller's states is added. The forward's result gives the state that enters every chunk of the caller's, so nothing is
// recomputed.
//     dk_j = e^{b_C - b_j} (dS v_j)     dv_j = dS^T (e^{b_C - b_j} k_j)     dS_in = e^{b_C} dS
//
// In pairs, where nobody wants the gradient of a decay, dS is rounded where it becomes a factor, and so are keys that a
// decay per channel has weighed; what is one weight for a token weighs the result.
#include "decay_gradient.h"
#include "kernels.h"
#include "shared_gradient.h"
#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

bool wants_decays(const fulmen_states_backward_call &call) { return call.dlog_decay.data || call.dlog_decay_v.data; }

template <class Element> class HeadStatesBackward : public StateWorker<Element> {
    typedef StateWorker<Element> Base;
    using Base::k, Base::key, Base::kInFloats, Base::state, Base::v, Base::value;

public:
    HeadStatesBackward(Arena &arena, const fulmen_states_backward_call &call)
        : Base(arena, call.problem, call.problem.value_size,
               Use{true, false, false, by_channel(call.problem.decay_form)}, Use{true, false}),
          call(call),
          p(call.problem),
          chunks((p.tokens + call.chunk_size - 1) / call.chunk_size),
          key_gradient(arena, p.decay_form, p.key_size, call.dlog_decay.data),
          value_gradient(arena, p.decay_v_form, p.value_size, call.dlog_decay_v.data),
          boundary(arena.panels(p.key_size, p.value_size)),
          d_keys(arena.panels(kChunk, p.key_size)),
          d_values(arena.panels(kChunk, p.value_size)),
          by_row(kInFloats ? PanelsOf<Element>{} : arena.panels<Element>(p.key_size, elements<Element>(p.value_size))),
          by_column((Element *)arena.floats(kInFloats ? 0 : padded(p.key_size) * kPanel)),
          keys_transposed(arena.floats(padded(p.key_size) * kPanel)),
          values_transposed((Element *)arena.floats(padded(p.value_size) * kPanel)) {
        if (call.dlog_decay.data && !has_tokens(p.decay_form)) per_token = arena.floats(p.tokens);
    }

    void start(int64_t index) {
        batch = index / p.heads;
        h = index % p.heads;
        Base::start(head_of(p, sequence(p, batch), h, 0));
        dk = rows_of(call.dk, batch, h / (p.heads / p.key_heads));
        dv = rows_of(call.dv, batch, h / (p.heads / p.value_heads));
        key_gradient.start(per_token ? Rows{(char *)per_token, FULMEN_FLOAT32, 1} : rows_of(call.dlog_decay, batch, h));
        value_gradient.start(rows_of(call.dlog_decay_v, batch, h));
    }

    void enter() { Base::enter(grad_state(chunks)); }

    // Tokens from `last` down to `first`, both of which are boundaries of segments.
    void walk_left(int64_t first, int64_t last) {
        while (last > first) {
            const int64_t chunk = (last - 1) / call.chunk_size, start = chunk * call.chunk_size;
            const int64_t t = start + (last - 1 - start) / kChunk * kChunk;
            differentiate(t, last - t);
            if (t == start) finish_decays(chunk);
            for (int64_t x = 0; x < value.blocks(); ++x) {
                this->prefetch_keys_and_values(t - kAhead, x);
                this->prefetch_share(dk, t - kAhead, key.size(), x);
                this->prefetch_share(dv, t - kAhead, value.size(), x);
                decay_panel(state.panel(x), key, value, x);
            }
            if (t == start) add_gradient(grad_state(chunk));
            last = t;
        }
    }

    void store_initial_gradient() {
        const Matrix dinitial = matrix_of(call.dinitial, batch, h);
        if (dinitial.present()) store_state(state, p.key_size, p.value_size, dinitial);
    }

    double &decay_sum() { return key_gradient.sum; }

    Rows dk = {}, dv = {};  // where they go; may change from segment to segment

private:
    void differentiate(int64_t t, int64_t count) {
        this->load_keys_and_values(t, count);
        this->weigh_keys();
        if (kInFloats) value.weigh_earlier(v.in_floats());
        if (dk.present() || key_gradient.wanted()) {
            transpose(v.over_channels(), elements<Element>(value.size()), values_transposed);
            const PanelsOf<Element> left = left_factor(state, key.blocks() * kPanel, value.size(), by_row);
            this->state_times(left, values_transposed, keys_transposed, d_keys);
        }
        if (dv.present() || value_gradient.wanted()) {
            for (int64_t x = 0; x < value.blocks(); ++x) {
                const Element *const right = right_factor(state.panel(x), key.blocks() * kPanel, by_column);
                multiply(d_values.panel(x), 1, Zero{},
                         Product<AsStoredOf<Element>>{k.over_channels(), right, key.blocks()});
                if (!this->weighs_in_floats()) weigh_rows(d_values.panel(x), key.weights().suffix);
            }
        }
        if (key_gradient.wanted()) key_gradient.keep(k.in_floats(), d_keys, t, count);
        if (value_gradient.wanted()) value_gradient.keep(v.in_floats(), d_values, t, count);
        if (dk.present()) {
            key.weigh_earlier(d_keys);
            unpack(d_keys, t, count, key.size(), dk);
        }
        if (dv.present()) {
            value.weigh_earlier(d_values);
            unpack(d_values, t, count, value.size(), dv);
        }
    }

    void finish_decays(int64_t chunk) {
        if (!key_gradient.wanted() && !value_gradient.wanted()) return;
        load_state(entering_state(chunk), p.key_size, p.value_size, boundary);
        const int64_t first = chunk * call.chunk_size, last = smaller(p.tokens, first + call.chunk_size);
        if (key_gradient.wanted()) key_gradient.finish(key, value, boundary, state, Along::Keys, first, last);
        if (value_gradient.wanted()) value_gradient.finish(key, value, boundary, state, Along::Values, first, last);
    }

    void add_gradient(Matrix gradient) {
        load_state(gradient, p.key_size, p.value_size, boundary);
        for (int64_t x = 0; x < value.blocks(); ++x)
            for (int64_t y = 0; y < key.blocks() * kBlock; y += kLanes)
                store(state.panel(x) + y, load(state.panel(x) + y) + load(boundary.panel(x) + y));
    }
    Matrix entering_state(int64_t c) const {
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
    StatesAxisGradient key_gradient, value_gradient;
    Panels boundary, d_keys, d_values;
    PanelsOf<Element> by_row;  // the gradient of the state, rounded along its rows,
    Element *by_column;        // and a panel of it along its columns
    float *keys_transposed;
    Element *values_transposed;
    float *per_token = nullptr;
    int64_t batch = 0, h = 0;
};

template <class HeadStatesBackward> struct Plan {
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

template <class HeadStatesBackward>
void walk(const fulmen_states_backward_call &call, const Plan<HeadStatesBackward> &plan, const Team &team) {
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
            head.dk = plan.dk.own(p, team, index, first, head.dk);
            head.dv = plan.dv.own(p, team, index, first, head.dv);
            head.decay_sum() = plan.sums[index];
            head.walk_left(first, last);
            plan.sums[index] = head.decay_sum();
        });
        plan.dk.sum(p, team, first, last);
        plan.dv.sum(p, team, first, last);
    }
    for_each_head([&](HeadStatesBackward &head, int64_t) { head.store_initial_gradient(); });
}

template <class HeadStatesBackward> int64_t states_backward_with(const fulmen_states_backward_call &call) {
    Plan<HeadStatesBackward> plan(call);
    if (!plan.reserve(call.problem)) return FULMEN_NO_WORKSPACE;
    plan.teams(call.problem).for_each(plan.heads, plan.memory, plan.head_bytes, [&](const Team &team) {
        walk(call, plan, team);
    });
    sum_over_sequences(call.problem, plan.sums, call.dlog_decay);
    return FULMEN_OK;
}

}  // namespace

int64_t states_backward(const fulmen_states_backward_call &call) {
    if (wants_decays(call)) return states_backward_with<HeadStatesBackward<float>>(call);
    return with_element(
        call.problem, [&](auto element) { return states_backward_with<HeadStatesBackward<decltype(element)>>(call); });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
