// The worker that computes the gradients of one head, in two walks over its chunks that keep nothing from the forward.
//
// Left to right, with the state S:
//     dq_i  = e^{b_i} (S_in do_i) + sum over j <= i of e^{b_i - b_j} k_j (v_j . do_i)
// Right to left, with the gradient dS of the state:
//     dk_j  = e^{b_C - b_j} (dS v_j) + sum over i >= j of e^{b_i - b_j} q_i (v_j . do_i)
//     dv_j  = dS^T (e^{b_C - b_j} k_j) + sum over i >= j of (q_i e^{b_i - b_j} . k_j) do_i
//     dS_in = e^{b_C} dS + sum over i of (e^{b_i} q_i) do_i^T
//
// Pairs serve decays of the keys whose gradient nobody wants. The states, the sums v.do and q.k and the rows that go
// into a state are rounded once, where they become factors; the other weights and the scale are applied to what was
// multiplied, in floats. A decay per channel weighs rows in floats, and its pairs of tokens stay in floats.
#pragma once

#include "decay_gradient.h"
#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

// Where one head's gradients go; rows are absent when not wanted.
struct HeadGradients {
    Rows output, q, k, v, log_decay, log_decay_v;
};

template <class Element> class BackwardWorker : public StateWorker<Element> {
    typedef StateWorker<Element> Base;
    using Base::in, Base::k, Base::kInFloats, Base::soon, Base::v, Base::weighs_in_floats;

public:
    using Base::key, Base::state, Base::value;

    BackwardWorker(Arena &arena, const fulmen_problem &p, bool wants_decay, bool wants_decay_v)
        : Base(arena, p, p.value_size, Base::advancing_keys(p, Use{true, !by_channel(p.decay_form)}), Use{true, true}),
          key_gradient(arena, p.decay_form, p.key_size, wants_decay),
          value_gradient(arena, p.decay_v_form, p.value_size, wants_decay_v),
          scale((float)p.scale),
          q(arena, kChunk, p.key_size,
            Use{!key.by_channel(), !key.by_channel(), key.decays() || scale != 1.0f, key.by_channel()}),
          g(arena, kChunk, p.value_size, Use{true, true}),
          by_row(left_factor_of_state(arena)),
          by_column(kInFloats ? PanelsOf<Pair>{} : arena.panels<Pair>(elements<Pair>(p.key_size), p.value_size)),
          d_keys(arena.panels(kChunk, p.key_size)),
          d_values(arena.panels(kChunk, p.value_size)),
          inside_keys(arena.panels(kChunk, p.key_size)),
          inside_values(arena.panels(kChunk, p.value_size)),
          keys_transposed(arena.floats(padded(p.key_size) * kPanel)),
          values_transposed((Element *)arena.floats(padded(p.value_size) * kPanel)),
          scores(arena.floats(kBlock)),
          grads(arena.floats(kBlock)),
          rounded(kInFloats ? nullptr : (Element *)arena.floats(kBlock)) {}

    // The first walk's chunk: dq, the decay gradient's first kind, and the state.
    void walk_right(int64_t t, int64_t count) {
        load_chunk(t, count, key_gradient.wanted() || value_gradient.wanted());
        form_grads();
        if constexpr (kInFloats) {
            value.weigh_later(g.in_floats());
            if (value.decays()) transpose(g.in_floats(), value.size(), values_transposed);
        }
        state_times_values();
        key.weigh_later(d_keys);
        if (!kInFloats) scale_rows(d_keys, key.blocks());
        if (key_gradient.wanted()) key_gradient.begin(t, count, Read{q.in_floats(), d_keys});
        if (out.q.present()) {
            add_pairs_to_query_gradient();
            unpack(d_keys, t, count, key.size(), out.q);
        }
        if constexpr (kInFloats)
            if (value_gradient.wanted()) {
                key.weigh_later(q.in_floats());
                for_each_panels(value.blocks(), [&](int64_t p, auto some) {
                    multiply<some.kCount>(
                        d_values, p, 1, Zero{},
                        Times<some.kCount, AsStored>{q.in_floats(), panels_at<some.kCount>(state, p), key.blocks()});
                });
                value_gradient.begin(t, count, Read{d_values, g.in_floats()});
            }
        this->weigh_keys();
        if (kInFloats) value.weigh_earlier(v.in_floats());
        expect_inputs(t + kAhead);
        this->expect(out.q, t + kAhead, key.size());
        soon.spread(this->advancing_steps());
        for_each_panels(value.blocks(), [&](int64_t p, auto some) {
            advance_and_round(p, k, panels_at<some.kCount>(v.over_tokens(), p));
        });
    }

    // Before a walk's first chunk, once the state, or its gradient, has entered.
    void round_state() {
        if constexpr (!kInFloats)
            for (int64_t p = 0; p < value.blocks(); ++p) this->round_state_panel(p, rounded_state<1>(p));
    }

    // The second walk's chunk: dk, dv, the decay gradients, and the gradient of the state, which `state` now holds.
    // `entering` is the state that enters the chunk, if the first walk kept it.
    void walk_left(int64_t t, int64_t count, Panels entering) {
        const bool keys = out.k.present() || key_gradient.wanted();
        const bool values = out.v.present() || value_gradient.wanted();
        load_chunk(t, count, true);
        if (entering.data && key_gradient.wanted()) key_gradient.restart(key, value, entering, state, Along::Keys);
        if (entering.data && value_gradient.wanted())
            value_gradient.restart(key, value, entering, state, Along::Values);
        if (values || key_gradient.wanted()) form_scores();
        if (keys) form_grads();
        if (values && value.by_channel())
            for (int64_t p = 0; p < value.blocks(); ++p)
                channel_mix_back(scores, g.in_floats().panel(p), v.in_floats().panel(p), value.factors(p),
                                 inside_values.panel(p),
                                 value_gradient.wanted() ? value_gradient.inside.panel(p) : nullptr);
        if (kInFloats) value.weigh_earlier(v.in_floats());
        if (keys) {
            weigh_pairs_for_keys();
            transpose(v.over_channels(), elements<Element>(value.size()), values_transposed);
            state_times_values();
        }
        this->weigh_keys();
        if (key_gradient.wanted()) key_gradient.finish(key, k.in_floats(), d_keys, t, count);
        if (out.k.present()) {
            key.weigh_earlier(d_keys);
            add_pairs_to_key_gradient();
            unpack(d_keys, t, count, key.size(), out.k);
        }
        if (values) read_values();
        if (value_gradient.wanted()) value_gradient.finish(value, v.in_floats(), d_values, t, count);
        if (out.v.present()) {
            value.weigh_earlier(d_values);
            if (value.by_channel())
                for (int64_t p = 0; p < value.blocks(); ++p) add_block(d_values.panel(p), inside_values.panel(p));
            unpack(d_values, t, count, value.size(), out.v);
        }
        weigh_queries();
        expect_inputs(t - kAhead);
        this->expect(out.k, t - kAhead, key.size());
        this->expect(out.v, t - kAhead, value.size());
        soon.spread(this->advancing_steps());
        for_each_panels(value.blocks(), [&](int64_t p, auto some) {
            advance_and_round(p, q, panels_at<some.kCount>(g.over_tokens(), p));
        });
    }

    // The gradient of the state alone, over the chunk that begins at token t.
    void retreat(int64_t t, int64_t last) {
        const int64_t count = smaller<int64_t>(kChunk, last - t);
        key.begin(t, count);
        value.begin(t, count);
        load_queries(t, count);
        load_output_gradient(t, count);
        weigh_queries();
        soon = {};
        expect_queries(t - kAhead);
        soon.spread(this->advancing_steps());
        for_each_panels(value.blocks(), [&](int64_t p, auto some) {
            this->advance_panels(p, decayed(key, value, p), q, panels_at<some.kCount>(g.over_tokens(), p));
        });
    }

    AxisGradient key_gradient, value_gradient;
    HeadGradients out = {};  // where the results go; may change from chunk to chunk

private:
    PanelsOf<Element> left_factor_of_state(Arena &arena) const {
        if constexpr (kInFloats)
            return state;
        else
            return arena.panels<Pair>(key.size(), elements<Pair>(value.size()));
    }

    // Where panels of the state from p on are rounded to: as many of by_column, and half as many of by_row.
    template <int Count> PairsBothWays<Count> rounded_state(int64_t p) const {
        return {{by_column.panel(p), by_column.stride}, by_row.at(0, p * kPanel / kNumbers<Element>)};
    }

    template <int Count>
    FULMEN_MEMBER void advance_and_round(int64_t p, const Operand<Element> &rows, PanelOf<Element, Count> columns) {
        if constexpr (kInFloats)
            this->advance_panels(p, decayed(key, value, p), rows, columns);
        else
            this->advance_panels(p, ScaleAndRound<PairsBothWays<Count>>{key.totals(), rounded_state<Count>(p)}, rows,
                                 columns);
    }

    void load_chunk(int64_t t, int64_t count, bool with_queries) {
        this->load_keys_and_values(t, count);
        if (with_queries) load_queries(t, count);
        load_output_gradient(t, count);
    }

    void load_queries(int64_t t, int64_t count) {
        float weights[kChunk];
        for (int i = 0; i < kChunk && !weighs_in_floats(); ++i) weights[i] = scale * key.weights().prefix[i];
        q.load(in.q.from(t, 0), count, weights);
    }

    // Scaled in floats; of pairs, whatever is multiplied by it is.
    void load_output_gradient(int64_t t, int64_t count) {
        g.load(out.output.from(t, 0), count);
        if (kInFloats) scale_rows(g.in_floats(), value.blocks());
    }

    void scale_rows(Panels x, int64_t blocks) const {
        if (scale == 1.0f) return;
        for (int64_t p = 0; p < blocks; ++p) scale_block(x.panel(p), scale);
    }

    // For the gradient of the state that enters the chunk.
    void weigh_queries() {
        if (!weighs_in_floats()) return;
        key.weigh_later(q.in_floats());
        if (kInFloats)
            value.weigh_later(g.in_floats());
        else
            scale_rows(q.in_floats(), key.blocks());
        q.round();
    }

    void expect_queries(int64_t t) {
        this->expect(in.q, t, key.size());
        this->expect(out.output, t, value.size());
    }
    void expect_inputs(int64_t t) {
        soon = {};
        expect_queries(t);
        this->expect_keys_and_values(t);
    }

    void form_scores() {
        if (weighs_in_floats()) {
            if (!key.by_channel()) transpose(q.in_floats(), key.size(), keys_transposed);
            key.pair_products(q.in_floats(), k.in_floats(), keys_transposed, scores);
        } else {
            Element *const queries = (Element *)keys_transposed;
            transpose(q.over_channels(), elements<Element>(key.size()), queries);
            key.pair_products(q.over_channels(), k.over_channels(), queries, scores);
        }
        if (!kInFloats) scale_rows(Panels{scores, 0}, 1);
    }

    // And leaves the transpose of g in values_transposed.
    void form_grads() {
        transpose(g.over_channels(), elements<Element>(value.size()), values_transposed);
        value.pair_products(g.over_channels(), v.over_channels(), values_transposed, grads);
        if (!kInFloats) scale_rows(Panels{grads, 0}, 1);
    }

    // d_keys = the rows in values_transposed times the state's transpose.
    void state_times_values() { this->state_times(by_row, values_transposed, keys_transposed, d_keys); }

    void add_pairs_to_query_gradient() {
        if (!key.by_channel()) {
            weigh_pairs(grads, key.weights().pair);
            const TransposedOf<Element> left = transposed(grads, rounded);
            for_each_panels(key.blocks(), [&](int64_t p, auto some) {
                multiply<some.kCount>(d_keys, p, 1, Add{},
                                      Times<some.kCount, Lower<TransposedOf<Element>>>{
                                          left, panels_at<some.kCount>(k.over_tokens(), p), 1});
            });
            return;
        }
        for (int64_t p = 0; p < key.blocks(); ++p) {
            channel_mix(grads, k.in_floats().panel(p), key.factors(p), inside_keys.panel(p));
            add_block(d_keys.panel(p), inside_keys.panel(p));
        }
    }

    // What pairs inside the chunk give to the keys and to the key decay, as far as it needs the unweighted k.
    void weigh_pairs_for_keys() {
        if (key.by_channel()) {
            for (int64_t p = 0; p < key.blocks(); ++p)
                channel_mix_back(grads, q.in_floats().panel(p), k.in_floats().panel(p), key.factors(p),
                                 inside_keys.panel(p), key_gradient.wanted() ? key_gradient.inside.panel(p) : nullptr);
            return;
        }
        if (key_gradient.wanted()) scalar_gradient(scores, grads, key_gradient.inside_scalar);
        weigh_pairs(grads, key.weights().pair);
    }

    void add_pairs_to_key_gradient() {
        if (!key.by_channel()) {
            const AsStoredOf<Element> left = as_stored(grads, rounded);
            for_each_panels(key.blocks(), [&](int64_t p, auto some) {
                multiply<some.kCount>(d_keys, p, 1, Add{},
                                      Times<some.kCount, Upper<AsStoredOf<Element>>>{
                                          left, panels_at<some.kCount>(q.over_tokens(), p), 1});
            });
            return;
        }
        for (int64_t p = 0; p < key.blocks(); ++p) add_block(d_keys.panel(p), inside_keys.panel(p));
    }

    // d_values, from the state and, unless channel_mix_back has them, from pairs inside the chunk.
    void read_values() {
        const AsStoredOf<Element> left = as_stored(scores, rounded);
        const float *const suffix = key.by_channel() ? kOnes : key.weights().suffix;
        for_each_panels(value.blocks(), [&](int64_t p, auto some) {
            constexpr int kCount = decltype(some)::kCount;
            const Times<kCount, Upper<AsStoredOf<Element>>> inside{left, panels_at<kCount>(g.over_tokens(), p), 1};
            if constexpr (kInFloats) {
                const Times<kCount, AsStored> from_state{k.in_floats(), panels_at<kCount>(state, p), key.blocks()};
                value.by_channel() ? multiply<kCount>(d_values, p, 1, Zero{}, from_state)
                                   : multiply<kCount>(d_values, p, 1, Zero{}, from_state, inside);
            } else {
                multiply<kCount>(
                    d_values, p, 1, Zero{},
                    Times<kCount, AsStoredOf<Pair>>{k.over_channels(), panels_at<kCount>(by_column, p), key.blocks()},
                    RowWeights{suffix}, inside);
            }
        });
    }

    float scale;
    Operand<Element> q, g;     // g is do, and in floats scale * do
    PanelsOf<Element> by_row;  // the state, in pairs rounded along its rows,
    PanelsOf<Pair> by_column;  // and along its columns
    Panels d_keys, d_values;   // gradients on either axis
    Panels inside_keys, inside_values;
    float *keys_transposed;
    Element *values_transposed;
    float *scores, *grads;  // [j][i]: q_i . k_j and do_i . v_j
    Element *rounded;       // one of these, as a factor
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
