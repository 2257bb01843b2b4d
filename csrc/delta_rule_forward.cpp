// The forward pass of the delta rule: which head and value channels each worker takes.
#include "delta_recurrence.h"
#include "delta_worker.h"
#include "head_slice.h"
#include "kernels.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// Also reads the state: o_i = q_i (e^{b_i} S_in) + sum over j <= i of (q_i e^{b_i - b_j} . k_j) u_j
//
// Number `index` of `sharers`, the heads that share queries and keys.
template <class Element> class DeltaForwardHead : public DeltaWorker<Element> {
    typedef DeltaWorker<Element> Base;
    using Base::factor, Base::in, Base::kInFloats, Base::rows;

public:
    using Base::key, Base::value;

    DeltaForwardHead(Arena &arena, const fulmen_delta_rule_problem &p, int64_t columns, const DeltaRows<Element> &rows,
                     int64_t index, int64_t sharers)
        : Base(arena, p.attention, columns, rows),
          index(index),
          sharers(sharers),
          scale((float)p.attention.scale),
          o(arena.floats(kBlock)),
          pairs(arena.floats(kBlock)),
          rounded_pairs(kInFloats ? nullptr : (Element *)arena.floats(kBlock)) {}

    // A chunk whose queries and keys are loaded. The state that enters may be `empty`, and need not be there then.
    void attend(Rows output, int64_t t, int64_t count, bool empty, bool advances) {
        const int64_t depth = empty ? 0 : key.blocks();
        this->load_corrections(t, count);
        weigh_queries();
        this->weigh_keys();
        const TransposedOf<Element> inside = transposed(pairs, rounded_pairs);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            float errors[kBlock];
            Written<Element> written;
            prefetch_shared(in.k, t + kAhead, p);
            prefetch_shared(in.q, t + kAhead, p);
            this->prefetch_values(t + kAhead, p);
            this->prefetch_share(output, t + kAhead, value.size(), p);
            this->correct(p, depth, errors, written);
            multiply(o, 1, Zero{}, Product<AsStoredOf<Element>>{rows.q.over_channels(), factor.panel(p), depth},
                     RowWeights{row_weights}, Product<TransposedOf<Element>>{inside, written.own, 1});
            unpack_panel(o, p, t, count, value.size(), output);
            if (advances) this->advance_panel(p, rows.k, written.weighed);
        }
    }

private:
    // Their pairs with the keys, and what reads the state that enters.
    void weigh_queries() {
        this->weigh_products(rows.q, rows.scores, pairs);
        if (scale != 1.0f) scale_block(pairs, scale);
        if (key.by_channel()) {
            key.weigh_later(rows.q.in_floats());
            rows.q.round();
        }
        for (int i = 0; i < kChunk; ++i)
            row_weights[i] =
                key.by_channel() ? scale : scale * key.weights().prefix[i] * rows.weight(rows.q_reciprocals, i);
    }

    // Heads have a part each in the rows that they share.
    FULMEN_MEMBER void prefetch_shared(Rows shared, int64_t t, int64_t p) const {
        this->prefetch_share(shared, t, key.size(), index * value.blocks() + p, sharers);
    }

    const int64_t index, sharers;
    const float scale;
    float *const o;  // one panel
    float *const pairs;
    Element *const rounded_pairs;
    float row_weights[kChunk] = {};
};

template <class Element> using DeltaForwardWorker = HeadsTogether<DeltaRows<Element>, DeltaForwardHead<Element>>;

struct Plan {
    int64_t threads, tasks;
    Slices slices;
    Together together;
    Plan(const fulmen_problem &p) {
        const double d = (double)p.key_size, e = (double)p.value_size;
        threads = useful_threads(p, 6 * d * e + 65 * (d + e));
        const int64_t heads = sequences_of(p) * p.heads;
        slices = slices_of(heads, threads, p.value_size);
        together = heads_together(p, slices.width, heads * slices.count, threads);
        tasks = heads * slices.count / together.heads;
        threads = larger<int64_t>(1, smaller(threads, tasks));
    }
};

Rows beta_of(const fulmen_delta_rule_problem &p, const HeadSlice &x) {
    return rows_of(p.beta, x.sequence.batch, x.index).from(x.sequence.first, 0);
}

HeadSlice head_slice(const fulmen_delta_rule_forward_call &call, const Plan &plan, int64_t index) {
    return head_slice(call.problem.attention, call.output, call.final_state, plan.slices, index);
}

// Both return whether a log-decay was above 0. The first takes several heads, one slice of each.
template <class Worker>
bool attend_whole(const fulmen_delta_rule_forward_call &call, const Plan &plan, int64_t task, Arena arena) {
    const int64_t slices = plan.slices.count, first = task / slices * plan.together.heads;
    HeadSlice x[kMostTogether];
    for (int64_t i = 0; i < plan.together.heads; ++i)
        x[i] = head_slice(call, plan, (first + i) * slices + task % slices);
    const Worker worker(arena, call.problem, x[0].columns, plan.together);
    for (int64_t i = 0; i < plan.together.heads; ++i) worker.head(i).start(x[i].head, beta_of(call.problem, x[i]));
    return FULMEN_ISA::attend_whole(worker, x);
}

bool attend_token_by_token(const fulmen_delta_rule_forward_call &call, const HeadSlice &x, Arena arena) {
    const fulmen_problem &p = call.problem.attention;
    const Rows beta = beta_of(call.problem, x);
    DeltaTokenBuffer buffer(arena, p.key_size, x.columns);
    auto sweep = [&](float *state, int64_t stride, int64_t t, Rows log_decay) {
        buffer.load(x.head, beta, t, p.decay_form, log_decay, call.problem.normalize_qk != 0, (float)p.scale);
        buffer.sweep_rows(Float32(), state, stride);
    };
    return attend_token_by_token(p, x, arena, buffer, sweep);
}

template <class Worker> int64_t delta_rule_forward_with(const fulmen_delta_rule_forward_call &call) {
    const fulmen_problem &p = call.problem.attention;
    const Plan plan(p);
    const bool recurrent = p.schedule == FULMEN_RECURRENT;
    const int64_t bytes = recurrent ? token_by_token_bytes<DeltaTokenBuffer>(p, plan.slices.width)
                                    : bytes_of<Worker>(call.problem, plan.slices.width, plan.together);
    char *const workspace = workspace_of(p.header, plan.threads * bytes);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    Notice grows;
    parallel_for(plan.threads, plan.tasks, [&](int64_t task, int64_t worker) {
        const Arena arena(workspace + worker * bytes);
        grows |= recurrent ? attend_token_by_token(call, head_slice(call, plan, task), arena)
                           : attend_whole<Worker>(call, plan, task, arena);
    });
    return grows ? FULMEN_GROWS : FULMEN_OK;
}

}  // namespace

int64_t delta_rule_forward(const fulmen_delta_rule_forward_call &call) {
    return with_element(call.problem.attention, [&](auto element) {
        return delta_rule_forward_with<DeltaForwardWorker<decltype(element)>>(call);
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
