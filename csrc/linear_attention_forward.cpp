// The forward pass: which head, value features and tokens each worker takes.
#include "kernels.h"
#include "recurrence.h"
#include "segments.h"
#include "worker.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// How a call is cut: heads, slices of value features, and segments of tokens.
struct Plan {
    int64_t threads, heads, segments;
    Slices slices;
    Plan(const fulmen_problem &p) {
        const double d = (double)p.key_features, e = (double)p.value_features;
        threads = useful_threads(p, 4 * d * e + 65 * (d + e));
        heads = sequences_of(p) * p.heads;
        slices = slices_of(heads, threads, p.value_features);
        segments = segments_for(p, strands(), threads);
        if (may_cut(p) && p.schedule == FULMEN_PARALLEL) segments = larger(segments, larger<int64_t>(2, p.threads));
        threads = larger<int64_t>(1, smaller(threads, strands() * segments));
    }
    int64_t strands() const { return heads * slices.count; }
};

// One head's slice of value features.
struct Strand {
    Sequence sequence;
    Head head;
    int64_t column, columns;
    Rows output;
    Matrix initial, final;
};

Strand strand_of(const fulmen_attention_forward_call &call, const Plan &plan, int64_t index) {
    const fulmen_problem &p = call.problem;
    Strand x;
    x.column = index % plan.slices.count * plan.slices.width;
    x.columns = smaller(plan.slices.width, p.value_features - x.column);
    const int64_t head = index / plan.slices.count % p.heads;
    x.sequence = sequence(p, index / plan.slices.count / p.heads);
    x.head = head_of(p, x.sequence, head, x.column);
    x.output = rows_of(call.output, x.sequence.batch, head).from(x.sequence.first, x.column);
    x.initial = matrix_of(p.initial_state, x.sequence.state, head).from_column(x.column);
    x.final = matrix_of(call.final_state, x.sequence.state, head).from_column(x.column);
    return x;
}

void attend_whole(const fulmen_attention_forward_call &call, const Strand &x, Arena arena) {
    ForwardWorker worker(arena, call.problem, x.columns);
    load_state(x.initial, call.problem.key_features, x.columns, worker.state);
    worker.attend(x.head, x.output, 0, x.sequence.tokens);
    if (x.final.present()) store_state(worker.state, call.problem.key_features, x.columns, x.final);
}

void attend_token_by_token(const fulmen_attention_forward_call &call, const Strand &x, Arena arena) {
    const fulmen_problem &p = call.problem;
    TokenBuffer buffer(arena, p.key_features, x.columns);
    const int64_t stride = padded(x.columns);
    float *state = arena.floats(p.key_features * stride);
    for (int64_t d = 0; d < p.key_features; ++d)
        for (int64_t e = 0; e < x.columns; ++e)
            state[d * stride + e] =
                x.initial.present() ? x.initial.data[d * x.initial.stride_row + e * x.initial.stride_column] : 0.0f;
    for (int64_t t = 0; t < x.sequence.tokens; ++t) {
        const Rows decay = p.decay_form == FULMEN_DECAY_HEAD ? x.head.decay : x.head.decay.from(t, 0);
        sweep_rows(state, stride, p.key_features, x.columns,
                   buffer.load(x.head, t, p.decay_form, decay, p.decay_v_form, (float)p.scale));
        buffer.store_output(x.output, t);
    }
    if (!x.final.present()) return;
    for (int64_t d = 0; d < p.key_features; ++d)
        for (int64_t e = 0; e < x.columns; ++e)
            x.final.data[d * x.final.stride_row + e * x.final.stride_column] = state[d * stride + e];
}

void summarise(const fulmen_problem &p, const Strand &x, int64_t first, int64_t last, Summary &summary, Arena arena) {
    ForwardWorker worker(arena, p, x.columns);
    load_state(Matrix{}, p.key_features, x.columns, worker.state);
    summary.begin();
    worker.advance(x.head, first, last, summary.key_totals, summary.value_totals);
    summary.keep(worker.state);
}

int64_t worker_bytes(const fulmen_problem &p, const Plan &plan) {
    Arena counting(nullptr);
    if (p.schedule == FULMEN_RECURRENT) {
        TokenBuffer(counting, p.key_features, plan.slices.width);
        counting.floats(p.key_features * plan.slices.width);
    } else {
        ForwardWorker(counting, p, plan.slices.width);
    }
    return counting.bytes();
}

}  // namespace

int64_t attention_forward_workspace(const fulmen_attention_forward_call &call) {
    const Plan plan(call.problem);
    const int64_t cut = plan.segments > 1 ? plan.strands() * plan.segments : 0;
    return plan.threads * worker_bytes(call.problem, plan) + cut * Summary::bytes(call.problem, plan.slices.width);
}

int64_t attention_forward(const fulmen_attention_forward_call &call) {
    const fulmen_problem &p = call.problem;
    const Plan plan(p);
    const int64_t per_worker = worker_bytes(p, plan);
    auto memory_of = [&](int64_t worker) { return Arena((char *)p.workspace + worker * per_worker); };

    if (plan.segments == 1 || p.schedule == FULMEN_RECURRENT) {
        parallel_for(plan.threads, plan.strands(), [&](int64_t index, int64_t worker) {
            const Strand x = strand_of(call, plan, index);
            p.schedule == FULMEN_RECURRENT ? attend_token_by_token(call, x, memory_of(worker))
                                           : attend_whole(call, x, memory_of(worker));
        });
        return FULMEN_OK;
    }

    const int64_t segments = plan.segments, bytes = Summary::bytes(p, plan.slices.width);
    char *summaries = (char *)p.workspace + plan.threads * per_worker;
    auto summary_of = [&](const Strand &x, int64_t strand, int64_t segment) {
        Arena arena(summaries + (strand * segments + segment) * bytes);
        return Summary(arena, p.key_features, x.columns);
    };
    parallel_for(plan.threads, plan.strands() * segments, [&](int64_t index, int64_t worker) {
        const int64_t strand = index / segments, g = index % segments;
        const Strand x = strand_of(call, plan, strand);
        Summary summary = summary_of(x, strand, g);
        const int64_t n = x.sequence.tokens, first = segment_start(n, g, segments);
        // What the last segment leaves is only ever read as the final state, which running it yields.
        const int64_t last = g + 1 < segments ? segment_start(n, g + 1, segments) : first;
        summarise(p, x, first, last, summary, memory_of(worker));
    });
    parallel_for(plan.threads, plan.strands(), [&](int64_t strand, int64_t worker) {
        const Strand x = strand_of(call, plan, strand);
        Arena arena = memory_of(worker);
        Panels entering = ForwardWorker(arena, p, x.columns).state;
        load_state(x.initial, p.key_features, x.columns, entering);
        for (int64_t g = 0; g < segments; ++g)
            summary_of(x, strand, g).fold(entering);
    });
    parallel_for(plan.threads, plan.strands() * segments, [&](int64_t index, int64_t worker) {
        const int64_t strand = index / segments, g = index % segments;
        const Strand x = strand_of(call, plan, strand);
        Arena arena = memory_of(worker);
        ForwardWorker run(arena, p, x.columns);
        summary_of(x, strand, g).restore(run.state);
        const int64_t n = x.sequence.tokens;
        run.attend(x.head, x.output, segment_start(n, g, segments), segment_start(n, g + 1, segments));
        if (g + 1 == segments && x.final.present()) store_state(run.state, p.key_features, x.columns, x.final);
    });
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
