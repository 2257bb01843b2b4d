// The forward pass of the delta rule: which head and value channels each worker takes.
#include "delta_recurrence.h"
#include "delta_worker.h"
#include "head_slice.h"
#include "kernels.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// Also reads the state: o_i = q_i (e^{b_i} S_in) + sum over j <= i of (q_i e^{b_i - b_j} . k_j) u_j
template <class Element> class DeltaForwardWorker : public DeltaWorker<Element> {
    typedef DeltaWorker<Element> Base;
    using Base::factor, Base::in, Base::kInFloats, Base::weighs_in_floats;

public:
    using Base::key, Base::state, Base::value;

    DeltaForwardWorker(Arena &arena, const fulmen_delta_rule_problem &p, int64_t columns)
        : Base(arena, p, columns),
          q(arena, kChunk, p.attention.key_size, Use{true, false, false, key.by_channel()}),
          o(arena.panels(kChunk, columns)),
          pairs(arena.floats(kBlock)),
          rounded_pairs(kInFloats ? nullptr : (Element *)arena.floats(kBlock)),
          scale((float)p.attention.scale) {}

    // `empty`: the state that enters is. `final`: the state that leaves is wanted.
    void attend(Rows output, int64_t first, int64_t last, bool empty, bool final) {
        if (!kInFloats && !empty) this->round_state();
        for (int64_t t = first; t < last; t += kChunk, empty = false) {
            const bool advances = final || t + kChunk < last;
            const int64_t depth = empty ? 0 : key.blocks();
            const int64_t count = smaller<int64_t>(kChunk, last - t);
            this->load_corrections(t, count);
            read_queries(t, count);
            this->weigh_keys();
            const TransposedOf<Element> inside = FULMEN_ISA::transposed(pairs, rounded_pairs);
            for (int64_t p = 0; p < value.blocks(); ++p) {
                this->prefetch_share(in.q, t + kAhead, key.size(), p);
                this->prefetch_keys_and_values(t + kAhead, p);
                float errors[kBlock];
                Element written[kBlock];
                this->correct(p, depth, errors, written);
                read_panel(p, depth, inside, written);
                if (advances) this->advance_panel(p, written);
            }
            unpack(o, t, count, value.size(), output);
        }
    }

private:
    // q, its pairs with the keys, and q or its weights for the state that enters.
    void read_queries(int64_t t, int64_t count) {
        float reciprocals[kChunk];
        this->load_rows(q, in.q.from(t, 0), count, key.weights().prefix, reciprocals);
        if (weighs_in_floats())
            for (int64_t p = 0; p < key.blocks() && scale != 1.0f; ++p) scale_block(q.in_floats().panel(p), scale);
        this->pair_with_keys(q, reciprocals, pairs);
        if (weighs_in_floats()) {
            key.weigh_later(q.in_floats());
            q.round();
        } else if (scale != 1.0f) {
            scale_block(pairs, scale);
        }
        for (int i = 0; i < kChunk && !kInFloats; ++i)
            row_weights[i] = weighs_in_floats() ? 1 : scale * key.weights().prefix[i] * reciprocals[i];
    }

    void read_panel(int64_t p, int64_t depth, TransposedOf<Element> inside, const Element *written) {
        const Product<TransposedOf<Element>> of_pairs{inside, written, 1};
        if constexpr (kInFloats)
            multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q.in_floats(), state.panel(p), depth}, of_pairs);
        else
            multiply(o.panel(p), 1, Zero{}, Product<AsStoredOf<Pair>>{q.over_channels(), factor.panel(p), depth},
                     RowWeights{row_weights}, of_pairs);
    }

    Operand<Element> q;
    Panels o;
    float *pairs;
    Element *rounded_pairs;
    float row_weights[kChunk] = {};
    float scale;
};

struct Plan {
    int64_t threads, tasks;
    Slices slices;
    Plan(const fulmen_problem &p) {
        const double d = (double)p.key_size, e = (double)p.value_size;
        threads = useful_threads(p, 6 * d * e + 65 * (d + e));
        const int64_t heads = sequences_of(p) * p.heads;
        slices = slices_of(heads, threads, p.value_size);
        tasks = heads * slices.count;
        threads = larger<int64_t>(1, smaller(threads, tasks));
    }
};

// Returns whether a log-decay was above 0.
template <class Worker> bool attend(const fulmen_delta_rule_problem &p, const HeadSlice &x, Arena arena) {
    const Rows beta = rows_of(p.beta, x.sequence.batch, x.index).from(x.sequence.first, 0);
    if (p.attention.schedule != FULMEN_RECURRENT) {
        Worker worker(arena, p, x.columns);
        worker.start(x.head, beta);
        return attend_whole(worker, x);
    }
    DeltaTokenBuffer buffer(arena, p.attention.key_size, x.columns);
    auto sweep = [&](float *state, int64_t stride, int64_t t, Rows log_decay) {
        buffer.load(x.head, beta, t, p.attention.decay_form, log_decay, p.normalize_qk != 0, (float)p.attention.scale);
        buffer.sweep_rows(Float32(), state, stride);
    };
    return attend_token_by_token(p.attention, x, arena, buffer, sweep);
}

template <class Worker> int64_t delta_rule_forward_with(const fulmen_delta_rule_forward_call &call) {
    const fulmen_delta_rule_problem &p = call.problem;
    const Plan plan(p.attention);
    const int64_t bytes = p.attention.schedule == FULMEN_RECURRENT
                              ? token_by_token_bytes<DeltaTokenBuffer>(p.attention, plan.slices.width)
                              : bytes_of<Worker>(p, plan.slices.width);
    char *const workspace = workspace_of(p.attention.header, plan.threads * bytes);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    Notice grows;
    parallel_for(plan.threads, plan.tasks, [&](int64_t index, int64_t worker) {
        const HeadSlice x = head_slice(p.attention, call.output, call.final_state, plan.slices, index);
        grows |= attend<Worker>(p, x, Arena(workspace + worker * bytes));
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
