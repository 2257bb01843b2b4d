// The backward pass of the delta rule: which worker takes which head, what is kept, and how shared heads are summed.
#include <math.h>

#include "delta_backward_worker.h"
#include "kernels.h"
#include "segments.h"
#include "shared_gradient.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

constexpr int64_t kLeastChunks = 8;  // of a segment

// One state is kept for each segment, and one for each chunk of the segment at hand: both are fewest at the root.
int64_t chunks_per_segment(int64_t longest) {
    return larger(kLeastChunks, (int64_t)ceil(sqrt((double)chunks_of(longest))));
}

// One head's way through its segments. All it needs stands in one piece of workspace, since heads that share inputs
// take turns segment by segment. `longest` is the most tokens that it will have.
class DeltaHeadBackward {
public:
    DeltaHeadBackward(Arena &arena, const fulmen_delta_rule_backward_call &call, int64_t longest)
        : p(call.problem.attention),
          segment_chunks(chunks_per_segment(longest)),
          worker(arena, call.problem, call.dlog_decay.data) {
        state_floats = panels_size(p.key_size, p.value_size);
        kept_floats = bytes_of<KeptChunk>(p) / 4;
        const int64_t segments = (chunks_of(longest) + segment_chunks - 1) / segment_chunks;
        entering = arena.floats(larger<int64_t>(1, segments) * state_floats);
        kept = arena.floats(smaller(segment_chunks, chunks_of(longest)) * kept_floats);
        if (call.dlog_decay.data && !has_tokens(p.decay_form)) per_token = arena.floats(longest);
    }

    void start(const fulmen_delta_rule_backward_call &call, int64_t index) {
        s = sequence(p, index / p.heads);
        const int64_t h = index % p.heads;
        worker.start(head_of(p, s, h, 0), rows_of(call.problem.beta, s.batch, h).from(s.first, 0));
        DeltaHeadGradients &out = worker.out;
        out.output = rows_of(call.grad_output, s.batch, h).from(s.first, 0);
        out.q = rows_of(call.dq, s.batch, h / (p.heads / p.query_heads)).from(s.first, 0);
        out.k = rows_of(call.dk, s.batch, h / (p.heads / p.key_heads)).from(s.first, 0);
        out.v = rows_of(call.dv, s.batch, h / (p.heads / p.value_heads)).from(s.first, 0);
        out.beta = rows_of(call.dbeta, s.batch, h).from(s.first, 0);
        const Rows dlog_decay = per_token ? Rows{(char *)per_token, FULMEN_FLOAT32, 1}
                                          : rows_of(call.dlog_decay, s.batch, h).from(s.first, 0);
        worker.key_gradient.start(dlog_decay, !p.initial_state.data);
        initial = matrix_of(p.initial_state, s.state, h);
        grad_final = matrix_of(call.grad_state, s.state, h);
        dinitial = matrix_of(call.dinitial, s.state, h);
    }

    // From left to right, keeping the state that enters each segment.
    void walk_right() {
        worker.enter(initial);
        for (int64_t t = 0; t < s.tokens; t += segment_tokens()) {
            memcpy(entering_state(t).data, worker.state.data, 4 * (size_t)state_floats);
            const int64_t last = t + segment_tokens();
            for (int64_t chunk = t; chunk < last && last < s.tokens; chunk += kChunk) worker.advance(chunk, s.tokens);
        }
        load_state(grad_final, p.key_size, p.value_size, worker.grad_state);
    }

    // All gradients of the segment that begins at token `first`; the last segment comes first.
    void walk_segment(int64_t first) {
        const int64_t last = smaller(first + segment_tokens(), s.tokens);
        if (first < last) {
            worker.enter(entering_state(first));
            for (int64_t t = first; t < last; t += kChunk)
                worker.walk_right(t, smaller<int64_t>(kChunk, last - t), chunk_of(t - first), t + kChunk < last);
            worker.enter();
            for (int64_t t = first + (last - 1 - first) / kChunk * kChunk; t >= first; t -= kChunk)
                worker.walk_left(t, smaller<int64_t>(kChunk, last - t), chunk_of(t - first));
        }
        if (first == 0 && dinitial.present()) store_state(worker.grad_state, p.key_size, p.value_size, dinitial);
    }

    DeltaHeadGradients &out() { return worker.out; }
    double &decay_sum() { return worker.key_gradient.sum; }
    int64_t segment_tokens() const { return segment_chunks * kChunk; }

private:
    Panels entering_state(int64_t t) const {
        return {entering + t / segment_tokens() * state_floats, panel_stride(p.key_size)};
    }
    KeptChunk chunk_of(int64_t t) const {
        Arena arena(kept + t / kChunk * kept_floats);
        return KeptChunk(arena, p);
    }

    const fulmen_problem &p;
    int64_t segment_chunks;
    DeltaBackwardWorker worker;
    int64_t state_floats, kept_floats;
    float *entering, *kept, *per_token = nullptr;
    Sequence s = {};
    Matrix initial = {}, grad_final = {}, dinitial = {};
};

struct Plan {
    int64_t longest, segment, threads, heads, head_bytes, group;
    SharedGradient dq, dk, dv;
    Plan(const fulmen_delta_rule_backward_call &call, const fulmen_problem &p)
        : longest(longest_sequence(p)),
          segment(chunks_per_segment(longest) * kChunk),
          threads(useful_threads(p, 20.0 * (double)p.key_size * (double)p.value_size)),
          heads(sequences_of(p) * p.heads),
          dq{&call.dq, p.query_heads, p.key_size},
          dk{&call.dk, p.key_heads, p.key_size},
          dv{&call.dv, p.value_heads, p.value_size} {
        group = group_of(p, {&dq, &dk, &dv});
        threads = larger<int64_t>(1, smaller(threads, heads));
        Arena counting(nullptr);
        DeltaHeadBackward(counting, call, longest);
        for (SharedGradient *x : {&dq, &dk, &dv}) x->reserve(counting, p, smaller(segment, longest));
        head_bytes = counting.bytes();
    }
    Teams teams(const fulmen_problem &p) const { return Teams(p, threads, group); }
    double *sums;  // the decay gradient of each head, over its tokens
    char *memory;  // of each head that is walked at a time
    bool reserve(const fulmen_problem &p) {
        return reserve_workspace(p.header, [&](Arena &arena) {
            sums = (double *)arena.floats(2 * heads);
            memory = (char *)arena.floats(teams(p).count * teams(p).heads * head_bytes / 4);
        });
    }
};

// Heads that share inputs, or one.
void walk_together(const fulmen_delta_rule_backward_call &call, const Plan &plan, const Team &team) {
    const fulmen_problem &p = call.problem.attention;
    int64_t tokens = 1;  // a sequence without any has a state to pass on
    for (int64_t head = team.first; head < team.first + team.heads; ++head)
        tokens = larger(tokens, sequence(p, head / p.heads).tokens);
    auto walk = [&](auto f) {
        team.for_each_head([&](int64_t index) {
            Arena arena(team.memory_of(index));
            DeltaHeadBackward head(arena, call, plan.longest);
            head.start(call, index);
            f(head, index);
        });
    };
    walk([&](DeltaHeadBackward &head, int64_t index) {
        head.walk_right();
        plan.sums[index] = 0;
    });
    for (int64_t first = (tokens - 1) / plan.segment * plan.segment; first >= 0; first -= plan.segment) {
        walk([&](DeltaHeadBackward &head, int64_t index) {
            DeltaHeadGradients &out = head.out();
            out.q = plan.dq.own(p, team, index, first, out.q);
            out.k = plan.dk.own(p, team, index, first, out.k);
            out.v = plan.dv.own(p, team, index, first, out.v);
            head.decay_sum() = plan.sums[index];
            head.walk_segment(first);
            plan.sums[index] = head.decay_sum();
        });
        for (const SharedGradient *x : {&plan.dq, &plan.dk, &plan.dv}) x->sum(p, team, first, first + plan.segment);
    }
}

}  // namespace

int64_t delta_rule_backward(const fulmen_delta_rule_backward_call &call) {
    const fulmen_problem &p = call.problem.attention;
    Plan plan(call, p);
    if (!plan.reserve(p)) return FULMEN_NO_WORKSPACE;
    plan.teams(p).for_each(plan.heads, plan.memory, plan.head_bytes,
                           [&](const Team &team) { walk_together(call, plan, team); });
    sum_over_sequences(p, plan.sums, call.dlog_decay);
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
