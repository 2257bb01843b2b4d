// The backward pass of the delta rule: which worker takes which head, what is kept, and how shared heads are summed.
#include "delta_backward_worker.h"
#include "kernels.h"
#include "segments.h"
#include "shared_gradient.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// The walk to the right keeps the state that enters each segment; then, from the last segment to the first, what its
// chunks need. States of segments that are done are needed no more, so a segment is longer than the next one by what
// such a state takes: the memory in use stays the same, and equally long segments would need 1.4 times as much.
class Segments {
public:
    // `longer` is in chunks. Of a sequence without tokens there is one, which has a state to pass on.
    Segments(int64_t chunks, double longer) : longer_(longer) {
        for (int64_t covered = 0; count == 0 || covered < chunks;) covered += counted_from_last(count++);
    }
    int64_t chunks(int64_t segment) const { return counted_from_last(count - 1 - segment); }
    int64_t first_token(int64_t segment) const {
        int64_t before = 0;
        for (int64_t i = 0; i < segment; ++i) before += chunks(i);
        return before * kChunk;
    }

    int64_t count = 0;

private:
    static constexpr int64_t kLeastChunks = 4;
    int64_t counted_from_last(int64_t i) const { return kLeastChunks + (int64_t)(longer_ * (double)i); }

    double longer_;
};

// One head's way through its segments, which takes turns with others that share inputs. In its arena stands what a
// thread needs for any head.
class DeltaHeadBackward {
public:
    DeltaHeadBackward(Arena &arena, const fulmen_delta_rule_backward_call &call, int64_t longest)
        : p(call.problem.attention), worker(arena, call.problem, call.dlog_decay.data) {
        if (call.dlog_decay.data && !has_tokens(p.decay_form)) per_token = arena.floats(longest);
    }

    void start(const fulmen_delta_rule_backward_call &call, int64_t index, Panels grad_state) {
        s = sequence(p, index / p.heads);
        const int64_t h = index % p.heads;
        worker.start(head_of(p, s, h, 0), rows_of(call.problem.beta, s.batch, h).from(s.first, 0));
        worker.grad_state = grad_state;
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

    // From left to right; entering(segment) is where the state that enters it is kept.
    template <class Entering> void walk_right(const Segments &segments, Entering entering) {
        worker.enter(initial);
        int64_t t = 0;
        for (int64_t i = 0; i < segments.count && t < s.tokens; ++i) {
            memcpy(entering(i).data, worker.state.data, 4 * (size_t)panels_size(p.key_size, p.value_size));
            const int64_t last = t + segments.chunks(i) * kChunk;
            for (; t < last && last < s.tokens; t += kChunk) worker.advance(t, s.tokens);
            t = last;
        }
        load_state(grad_final, p.key_size, p.value_size, worker.grad_state);
    }

    // All gradients of tokens [first, last), a segment; the last segment comes first. `kept` is memory for its chunks.
    void walk_segment(int64_t first, int64_t last, Panels entering, char *kept) {
        last = smaller(last, s.tokens);
        if (first < last) {
            auto chunk_of = [&](int64_t t) {
                Arena arena(kept + (t - first) / kChunk * bytes_of<KeptChunk>(p));
                return KeptChunk(arena, p);
            };
            worker.enter(entering);
            for (int64_t t = first; t < last; t += kChunk)
                worker.walk_right(t, smaller<int64_t>(kChunk, last - t), chunk_of(t), t + kChunk < last);
            worker.enter();
            for (int64_t t = first + (last - 1 - first) / kChunk * kChunk; t >= first; t -= kChunk)
                worker.walk_left(t, smaller<int64_t>(kChunk, last - t), chunk_of(t));
        }
        if (first == 0 && dinitial.present()) store_state(worker.grad_state, p.key_size, p.value_size, dinitial);
    }

    DeltaHeadGradients &out() { return worker.out; }
    double &decay_sum() { return worker.key_gradient.sum; }

private:
    const fulmen_problem &p;
    DeltaBackwardWorker worker;
    float *per_token = nullptr;
    Sequence s = {};
    Matrix initial = {}, grad_final = {}, dinitial = {};
};

struct Plan {
    const fulmen_problem &p;
    int64_t longest, threads, heads;
    SharedGradient dq, dk, dv;
    int64_t thread_bytes, state_bytes, chunk_bytes;
    Segments segments;
    Teams teams;
    Plan(const fulmen_delta_rule_backward_call &call, const fulmen_problem &p)
        : p(p),
          longest(longest_sequence(p)),
          threads(useful_threads(p, 20.0 * (double)p.key_size * (double)p.value_size)),
          heads(sequences_of(p) * p.heads),
          dq{&call.dq, p.query_heads, p.key_size},
          dk{&call.dk, p.key_heads, p.key_size},
          dv{&call.dv, p.value_heads, p.value_size},
          thread_bytes(bytes_of<DeltaHeadBackward>(call, longest)),
          state_bytes(4 * panels_size(p.key_size, p.value_size)),
          chunk_bytes(bytes_of<KeptChunk>(p)),
          segments(chunks_of(longest), chunks_per_state()),
          teams(p, larger<int64_t>(1, smaller(threads, heads)), group_of(p, {&dq, &dk, &dv})) {}

    int64_t chunks(int64_t segment) const { return smaller(segments.chunks(segment), chunks_of(longest)); }

private:
    // How many chunks take as much memory as a state of each head that one thread walks at a time. Neither threads nor
    // what gradients are wanted count, so that bits do not depend on them.
    double chunks_per_state() const {
        int64_t sharers = 1, rows = 0;
        for (const SharedGradient *x : {&dq, &dk, &dv}) {
            sharers = larger(sharers, p.heads / x->heads);
            if (x->heads < p.heads) rows += 4 * kChunk * x->size;
        }
        return (double)(sharers * state_bytes) / (double)(chunk_bytes + sharers * rows);
    }
};

// A team's memory while it is at a segment: after the states that enter this one and those before it, what the segment
// itself needs.
struct SegmentMemory {
    const Plan &plan;
    int64_t chunks;
    SharedGradient dq, dk, dv;
    char *scratch, *grad_states, *entering, *kept, *rows;
    int64_t row_bytes;  // of a head

    SegmentMemory(Arena &arena, const Plan &plan, int64_t segment)
        : plan(plan), chunks(plan.chunks(segment)), dq(plan.dq), dk(plan.dk), dv(plan.dv) {
        const int64_t threads = plan.teams.threads, heads = plan.teams.heads;
        Arena head(nullptr);
        for (SharedGradient *x : {&dq, &dk, &dv}) x->reserve(head, plan.p, chunks * kChunk);
        row_bytes = head.bytes();
        scratch = (char *)arena.floats(threads * plan.thread_bytes / 4);
        grad_states = (char *)arena.floats(heads * plan.state_bytes / 4);
        entering = (char *)arena.floats((segment + 1) * heads * plan.state_bytes / 4);
        kept = (char *)arena.floats(threads * chunks * plan.chunk_bytes / 4);
        rows = (char *)arena.floats(heads * row_bytes / 4);
    }

    static int64_t most_bytes(const Plan &plan) {
        int64_t most = 0;
        for (int64_t i = 0; i < plan.segments.count; ++i) most = larger(most, bytes_of<SegmentMemory>(plan, i));
        return most;
    }

    Panels grad_state(int64_t head) const { return state(grad_states, head); }
    Panels entering_state(int64_t segment, int64_t head) const {
        return state(entering, segment * plan.teams.heads + head);
    }
    char *scratch_of(int64_t worker) const { return scratch + worker * plan.thread_bytes; }
    char *kept_by(int64_t worker) const { return kept + worker * chunks * plan.chunk_bytes; }

private:
    Panels state(char *states, int64_t i) const {
        return {(float *)(states + i * plan.state_bytes), panel_stride(plan.p.key_size)};
    }
};

// Heads that share inputs, or one.
void walk_together(const fulmen_delta_rule_backward_call &call, const Plan &plan, Team team, double *sums) {
    const fulmen_problem &p = plan.p;
    int64_t tokens = 1;  // a sequence without any has a state to pass on
    for (int64_t head = team.first; head < team.first + team.heads; ++head)
        tokens = larger(tokens, sequence(p, head / p.heads).tokens);
    int64_t segment = plan.segments.count - 1;
    while (plan.segments.first_token(segment) >= tokens) --segment;
    auto walk = [&](const SegmentMemory &memory, auto f) {
        team.for_each_head_on_worker([&](int64_t index, int64_t worker) {
            Arena arena(memory.scratch_of(worker));
            DeltaHeadBackward head(arena, call, plan.longest);
            head.start(call, index, memory.grad_state(index - team.first));
            f(head, index, worker);
        });
    };
    auto memory_at = [&, memory = team.memory](int64_t segment) {
        Arena arena(memory);
        return SegmentMemory(arena, plan, segment);
    };
    const SegmentMemory memory = memory_at(segment);
    walk(memory, [&](DeltaHeadBackward &head, int64_t index, int64_t) {
        head.walk_right(plan.segments, [&](int64_t i) { return memory.entering_state(i, index - team.first); });
        sums[index] = 0;
    });
    for (; segment >= 0; --segment) {
        const SegmentMemory memory = memory_at(segment);
        const int64_t first = plan.segments.first_token(segment), last = first + memory.chunks * kChunk;
        team.memory = memory.rows;
        team.head_bytes = memory.row_bytes;
        walk(memory, [&](DeltaHeadBackward &head, int64_t index, int64_t worker) {
            DeltaHeadGradients &out = head.out();
            out.q = memory.dq.own(p, team, index, first, out.q);
            out.k = memory.dk.own(p, team, index, first, out.k);
            out.v = memory.dv.own(p, team, index, first, out.v);
            head.decay_sum() = sums[index];
            head.walk_segment(first, last, memory.entering_state(segment, index - team.first), memory.kept_by(worker));
            sums[index] = head.decay_sum();
        });
        for (const SharedGradient *x : {&memory.dq, &memory.dk, &memory.dv}) x->sum(p, team, first, last);
    }
}

}  // namespace

int64_t delta_rule_backward(const fulmen_delta_rule_backward_call &call) {
    const fulmen_problem &p = call.problem.attention;
    const Plan plan(call, p);
    const int64_t team_bytes = SegmentMemory::most_bytes(plan);
    double *sums;  // the decay gradient of each head, over its tokens
    char *memory;  // of each team
    const bool reserved = reserve_workspace(p.header, [&](Arena &arena) {
        sums = (double *)arena.floats(2 * plan.heads);
        memory = (char *)arena.floats(plan.teams.count * team_bytes / 4);
    });
    if (!reserved) return FULMEN_NO_WORKSPACE;
    plan.teams.for_each_team(plan.heads, memory, team_bytes,
                             [&](const Team &team) { walk_together(call, plan, team, sums); });
    sum_over_sequences(p, sums, call.dlog_decay);
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
