// The forward pass of the delta rule: which head, value channels and tokens each worker takes.
#include <algorithm>

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
    static constexpr int64_t kTokens = kChunk;
    static constexpr bool kExpects = false;
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
                     RowWeights{row_weights}, Product<Lower<TransposedOf<Element>>>{inside, written.own, 1});
            unpack_panel(o, p, t, count, value.size(), output);
            if (advances) this->advance_panels(p, rows.k, PanelOf<Element>(written.weighed));
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

// Segments of tokens take 7/3 of the work: three threads have to share a slice of a head before they gain.
ForwardPlan plan_of(const fulmen_problem &p) {
    const double d = (double)p.key_size, e = (double)p.value_size;
    return ForwardPlan(p, 6 * d * e + 65 * (d + e), 3);
}

Rows beta_of(const fulmen_delta_rule_problem &p, const HeadSlice &x) {
    return rows_of(p.beta, x.sequence.batch, x.index).from(x.sequence.first, 0);
}

HeadSlice head_slice(const fulmen_delta_rule_forward_call &call, const ForwardPlan &plan, int64_t index) {
    return head_slice(call.problem.attention, call.output, call.final_state, plan.slices, index);
}

// Both return whether a log-decay was above 0.
template <class Worker>
bool attend_whole(const fulmen_delta_rule_forward_call &call, const ForwardPlan &plan, int64_t task, Arena arena) {
    return FULMEN_ISA::attend_whole<Worker>(
        arena, call.problem, plan, task, [&](int64_t index) { return head_slice(call, plan, index); },
        [&](auto &worker, const HeadSlice &x) { worker.start(x.head, beta_of(call.problem, x)); });
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

// What a segment makes of a state that enters it: transition S + own. Once the segments are folded, `own` is the state
// that enters.
struct DeltaSummary {
    DeltaSummary(Arena &arena, const fulmen_problem &p)
        : transition(arena.panels(p.key_size, p.key_size)), own(arena.panels(p.key_size, p.value_size)) {}

    // Takes a panel of the state that enters to the segment's end.
    void fold(const fulmen_problem &p, int64_t panel, float *entering) const {
        const int64_t blocks = padded(p.key_size) / kPanel;
        multiply(own.panel(panel), blocks, Add{}, Product<AsStored>{transition, entering, blocks});
        std::swap_ranges(entering, entering + blocks * kBlock, own.panel(panel));
    }

    const Panels transition, own;
};

// A forward of heads that are fewer than the threads: summarise each segment, fold the summaries into the states that
// enter, then run each segment from its own. A transition is what becomes of the identity where there are no values: D
// more columns of a state.
template <class Worker> class Segmented {
    // In floats, also where pairs are multiplied afterwards: a state would get the error of each transition it passes.
    typedef DeltaForwardWorker<float> Summarising;

public:
    Segmented(const fulmen_delta_rule_forward_call &call, const ForwardPlan &plan)
        : call(call),
          p(call.problem.attention),
          plan(plan),
          of_keys(slices_of_keys()),
          per_worker(larger(bytes_of<Worker>(call.problem, plan.slices.width, Together{}),
                            bytes_of<Summarising>(call.problem, plan.slices.width, Together{}))),
          per_summary(bytes_of<DeltaSummary>(p)) {}

    int64_t run() {
        workspace = workspace_of(p.header, plan.threads * per_worker + plan.heads * plan.segments * per_summary);
        if (!workspace) return FULMEN_NO_WORKSPACE;
        for_each(plan.slices.count + of_keys.count, [&](int64_t slice, int64_t head, int64_t segment, Arena arena) {
            summarise(slice, head, segment, arena);
        });
        parallel_for(plan.threads, plan.head_slices(), [&](int64_t index, int64_t worker) {
            const HeadSlice x = head_slice(call, plan, index);
            Arena arena(workspace + worker * per_worker);
            const Panels entering = arena.panels(p.key_size, x.columns);
            load_state(x.initial, p.key_size, x.columns, entering);
            for (int64_t g = 0; g < plan.segments; ++g)
                for (int64_t q = 0; q * kPanel < x.columns; ++q)
                    summary(index / plan.slices.count, g).fold(p, x.column / kPanel + q, entering.panel(q));
        });
        for_each(plan.slices.count, [&](int64_t slice, int64_t head, int64_t segment, Arena arena) {
            attend(head_slice(call, plan, head * plan.slices.count + slice), summary(head, segment), segment, arena);
        });
        return grows ? FULMEN_GROWS : FULMEN_OK;
    }

private:
    Slices slices_of_keys() const {
        const int64_t width = smaller(plan.slices.width, padded(p.key_size));
        return {(p.key_size + width - 1) / width, width};
    }

    template <class F> void for_each(int64_t slices, F f) {
        parallel_for(plan.threads, plan.heads * plan.segments * slices, [&](int64_t part, int64_t worker) {
            f(part % slices, part / slices / plan.segments, part / slices % plan.segments,
              Arena(workspace + worker * per_worker));
        });
    }

    DeltaSummary summary(int64_t head, int64_t segment) const {
        Arena arena(workspace + plan.threads * per_worker + (head * plan.segments + segment) * per_summary);
        return DeltaSummary(arena, p);
    }

    int64_t start(const HeadSlice &x, int64_t segment) const {
        return segment_start(x.sequence.tokens, segment, plan.segments);
    }

    // Slices of value channels, then those of the identity's columns. What the last segment makes of a state is only
    // ever read as the final one, which running it yields.
    void summarise(int64_t slice, int64_t head, int64_t segment, Arena arena) {
        const bool identity = slice >= plan.slices.count;
        HeadSlice x = head_slice(call, plan, head * plan.slices.count + (identity ? 0 : slice));
        if (identity) {
            x.head.v = Rows{};
            x.column = (slice - plan.slices.count) * of_keys.width;
            x.columns = smaller(of_keys.width, p.key_size - x.column);
        }
        const Summarising one(arena, call.problem, x.columns, Together{});
        auto &worker = one.head(0);
        worker.start(x.head, beta_of(call.problem, x));
        worker.enter(Matrix{});
        for (int64_t c = 0; c < x.columns && identity; ++c) *worker.state.at(x.column + c, c) = 1;
        const int64_t last = start(x, segment + 1);
        for (int64_t t = start(x, segment); t < last && segment + 1 < plan.segments; t += kChunk)
            worker.advance(t, last);
        const DeltaSummary to = summary(head, segment);
        memcpy((identity ? to.transition : to.own).panel(x.column / kPanel), worker.state.data,
               4 * (size_t)panels_size(p.key_size, x.columns));
    }

    void attend(const HeadSlice &x, const DeltaSummary &from, int64_t segment, Arena arena) {
        const int64_t first = start(x, segment);
        const bool ends = segment + 1 == plan.segments, final = ends && x.final.present();
        const Worker one(arena, call.problem, x.columns, Together{});
        auto &worker = one.head(0);
        worker.start(x.head, beta_of(call.problem, x));
        worker.enter(Panels{from.own.panel(x.column / kPanel), from.own.stride});
        one.attend(&x, first, start(x, segment + 1), first == 0 && !x.initial.present(), final);
        grows |= worker.grows();
        if (final) store_state(worker.state, p.key_size, x.columns, x.final);
    }

    const fulmen_delta_rule_forward_call &call;
    const fulmen_problem &p;
    const ForwardPlan &plan;
    const Slices of_keys;
    const int64_t per_worker, per_summary;
    char *workspace = nullptr;
    Notice grows;
};

template <class Worker> int64_t delta_rule_forward_with(const fulmen_delta_rule_forward_call &call) {
    const fulmen_problem &p = call.problem.attention;
    const ForwardPlan plan = plan_of(p);
    const bool recurrent = p.schedule == FULMEN_RECURRENT;
    if (plan.segments > 1) return Segmented<Worker>(call, plan).run();
    const int64_t bytes = recurrent ? token_by_token_bytes<DeltaTokenBuffer>(p, plan.slices.width)
                                    : bytes_of<Worker>(call.problem, plan.slices.width, plan.together);
    char *const workspace = workspace_of(p.header, plan.threads * bytes);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    Notice grows;
    parallel_for(plan.threads, plan.tasks(), [&](int64_t task, int64_t worker) {
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
