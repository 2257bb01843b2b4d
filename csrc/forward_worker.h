// The worker that walks one head from left to right and reads its state:
//
//     o_i = q_i (e^{b_i} S_in) + sum over j <= i of (q_i e^{b_i - b_j} . k_j) v_j
//
// A panel of the state is read for the output and advanced while it stands in L1.
//
// In pairs, the state and the sums q.k are rounded too, once, where they become factors. Where one decay serves all
// channels, e^{b_i} and the scale weigh what was multiplied, in floats, and cost nothing.
#pragma once

#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

template <class Element> class ForwardWorker : public StateWorker<Element> {
    typedef StateWorker<Element> Base;
    using Base::in, Base::k, Base::kInFloats, Base::prefetch_share, Base::v, Base::weighs_in_floats;

public:
    using Base::key, Base::state, Base::value;

    ForwardWorker(Arena &arena, const fulmen_problem &p, int64_t columns)
        : Base(arena, p, columns, Base::advancing_keys(p, Use{!by_channel(p.decay_form), false}),
               Base::advancing_values()),
          q(arena, kChunk, p.key_size, Use{true, false, false, key.by_channel()}),
          o(arena.panels(kChunk, columns)),
          factor(kInFloats ? PanelsOf<Pair>{} : arena.panels<Pair>(elements<Pair>(p.key_size), columns)),
          q_transposed((Element *)arena.floats(padded(p.key_size) * kPanel)),
          pairs(arena.floats(kBlock)),
          rounded_pairs(kInFloats ? nullptr : (Element *)arena.floats(kBlock)),
          scale((float)p.scale) {}

    // `empty`: the state that enters is, and need not be there. `final`: the state that leaves is wanted; it is not
    // advanced over the last chunk else.
    void attend(Rows output, int64_t first, int64_t last, bool empty, bool final) {
        if (!kInFloats && !empty) round_state();
        for (int64_t t = first; t < last; t += kChunk, empty = false) {
            const bool advances = final || t + kChunk < last;
            const int64_t depth = empty ? 0 : key.blocks();
            const int64_t count = smaller<int64_t>(kChunk, last - t);
            this->load_keys_and_values(t, count);
            q.load(in.q.from(t, 0), count);
            form_pairs();
            if (!empty) weigh_queries();
            if (advances) this->weigh_keys();
            const TransposedOf<Element> inside = transposed(pairs, rounded_pairs);
            for (int64_t p = 0; p < value.blocks(); ++p) {
                prefetch_share(in.q, t + kAhead, key.size(), p);
                this->prefetch_keys_and_values(t + kAhead, p);
                value.by_channel() ? read_panel_with_value_decay(p, depth) : read_panel(p, depth, inside);
                if (advances) advance_panel(p);
            }
            unpack(o, t, count, value.size(), output);
        }
    }

private:
    // pairs[j][i], with the weight between the two and the scale.
    void form_pairs() {
        if (weighs_in_floats()) {
            scale_block_rows(q.in_floats(), key.blocks());
            if constexpr (kInFloats)
                if (!key.by_channel()) transpose(q.in_floats(), key.size(), q_transposed);
            key.pair_products(q.in_floats(), k.in_floats(), (const float *)q_transposed, pairs);
        } else {
            transpose(q.over_channels(), elements<Element>(key.size()), q_transposed);
            key.pair_products(q.over_channels(), k.over_channels(), q_transposed, pairs);
            scale_block_rows(Panels{pairs, 0}, 1);
        }
    }

    // For the state that enters the chunk: queries in floats, or what they make of it.
    void weigh_queries() {
        if (weighs_in_floats()) {
            key.weigh_later(q.in_floats());
            q.round();
        }
        for (int i = 0; i < kChunk; ++i) row_weights[i] = weighs_in_floats() ? 1 : scale * key.weights().prefix[i];
    }

    void scale_block_rows(Panels x, int64_t blocks) const {
        if (scale == 1.0f) return;
        for (int64_t p = 0; p < blocks; ++p) scale_block(x.panel(p), scale);
    }

    void round_state() {
        for (int64_t p = 0; p < value.blocks(); ++p) round_rows(state.panel(p), key.blocks() * kPanel, factor.panel(p));
    }

    // The state's first depth blocks of rows: all of them, or none of an empty one.
    void read_panel(int64_t p, int64_t depth, TransposedOf<Element> inside) {
        const Product<TransposedOf<Element>> of_pairs{inside, v.over_tokens().panel(p), 1};
        if constexpr (kInFloats)
            multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q.over_channels(), state.panel(p), depth}, of_pairs);
        else
            multiply(o.panel(p), 1, Zero{}, Product<AsStoredOf<Pair>>{q.over_channels(), factor.panel(p), depth},
                     RowWeights{row_weights}, of_pairs);
    }

    void advance_panel(int64_t p) {
        const Scale start = decayed(key, value, p);
        if constexpr (kInFloats)
            Base::advance_panel(p, start, k, v.over_tokens().panel(p));
        else
            Base::advance_panel(p, ScaleAndRound{start, factor.panel(p)}, k, v.over_tokens().panel(p));
    }

    void read_panel_with_value_decay(int64_t p, int64_t depth) {
        if constexpr (kInFloats) {
            float *const values = v.in_floats().panel(p);
            float inside[kBlock];
            channel_mix(pairs, values, value.factors(p), inside);
            multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q.in_floats(), state.panel(p), depth});
            weigh_by_prefix(o.panel(p), value.factors(p));
            for (int x = 0; x < kBlock; x += kLanes) store(o.panel(p) + x, load(o.panel(p) + x) + load(inside + x));
            weigh_by_suffix(values, value.factors(p));
        }
    }

    Operand<Element> q;
    Panels o;
    PanelsOf<Pair> factor;  // the state, rounded
    Element *q_transposed;
    float *pairs;
    Element *rounded_pairs;
    float row_weights[kChunk] = {};
    float scale;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
