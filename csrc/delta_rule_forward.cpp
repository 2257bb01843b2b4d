// The forward pass of the delta rule: which head and value channels each worker takes.
#include "delta_recurrence.h"
#include "delta_worker.h"
#include "head_slice.h"
#include "kernels.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// Also reads the state: o_i = q_i (e^{b_i} S_in) + sum over j <= i of (q_i e^{b_i - b_j} . k_j) u_j
class DeltaForwardWorker : public DeltaWorker {
public:
    DeltaForwardWorker(Arena &arena, const fulmen_delta_rule_problem &p, int64_t columns)
        : DeltaWorker(arena, p, columns),
          q(arena.panels(kChunk, p.attention.key_size)),
          o(arena.panels(kChunk, columns)),
          pairs(arena.floats(kBlock)),
          scale((float)p.attention.scale) {}

    // `empty`: the state that enters is. `final`: the state that leaves is wanted.
    void attend(Rows output, int64_t first, int64_t last, bool empty, bool final) {
        for (int64_t t = first; t < last; t += kChunk, empty = false) {
            const bool advances = final || t + kChunk < last;
            const int64_t depth = empty ? 0 : key.blocks();
            const int64_t count = smaller<int64_t>(kChunk, last - t);
            load_corrections(t, count);
            load_queries(t, count);
            if (!key.by_channel()) transpose(q, key.size(), transposed);
            key.pair_products(q, k, transposed, pairs);
            key.weigh_later(q);
            weigh_keys();
            for (int64_t p = 0; p < value.blocks(); ++p) {
                prefetch_share(in.q, t + kAhead, key.size(), p);
                prefetch_keys_and_values(t + kAhead, p);
                float errors[kBlock], written[kBlock];
                correct(p, depth, errors, written);
                multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q, state.panel(p), depth},
                         Product<Transposed>{Panels{pairs, 0}, written, 1});
                if (advances) advance_panel(p, written);
            }
            unpack(o, t, count, value.size(), output);
        }
    }

private:
    void load_queries(int64_t t, int64_t count) {
        pack(in.q, t, count, key.size(), q);
        float reciprocals[kChunk];
        if (normalizes) normalize_rows(q, key.size(), reciprocals);
        for (int64_t p = 0; p < key.blocks() && scale != 1.0f; ++p) scale_block(q.panel(p), scale);
    }

    Panels q, o;
    float *pairs;
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

int64_t worker_bytes(const fulmen_delta_rule_problem &p, const Plan &plan) {
    Arena counting(nullptr);
    if (p.attention.schedule == FULMEN_RECURRENT) {
        DeltaTokenBuffer(counting, p.attention.key_size, plan.slices.width);
        counting.floats(p.attention.key_size * plan.slices.width);
    } else {
        DeltaForwardWorker(counting, p, plan.slices.width);
    }
    return counting.bytes();
}

// Returns whether a log-decay was above 0.
bool attend(const fulmen_delta_rule_problem &p, const HeadSlice &x, Arena arena) {
    const Rows beta = rows_of(p.beta, x.sequence.batch, x.index).from(x.sequence.first, 0);
    if (p.attention.schedule != FULMEN_RECURRENT) {
        DeltaForwardWorker worker(arena, p, x.columns);
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

}  // namespace

int64_t delta_rule_forward(const fulmen_delta_rule_forward_call &call) {
    const fulmen_delta_rule_problem &p = call.problem;
    const Plan plan(p.attention);
    const int64_t bytes = worker_bytes(p, plan);
    char *const workspace = workspace_of(p.attention.header, plan.threads * bytes);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    Notice grows;
    parallel_for(plan.threads, plan.tasks, [&](int64_t index, int64_t worker) {
        const HeadSlice x = head_slice(p.attention, call.output, call.final_state, plan.slices, index);
        grows |= attend(p, x, Arena(workspace + worker * bytes));
    });
    return grows ? FULMEN_GROWS : FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
