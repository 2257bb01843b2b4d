// The worker that walks heads from left to right and reads their states:
//
//     o_i = e^{b_i} (q_i S_in) + sum over j <= i of e^{b_i - b_j} (q_i . k_j) v_j
//
// A panel of a state is read for the output and advanced while it stands in L1.
//
// Neighbouring heads are walked together, chunk by chunk: their rows of a token stand side by side in memory, often on
// one page, where those of one head are kilobytes apart. One decay for all channels of a token weighs the values, and
// what queries and keys make, so that rows of q and k that heads share are packed and multiplied with each other once
// for all of them. A decay per channel weighs q and k themselves, in floats.
//
// In pairs, the state and the sums q.k are rounded too, once, where they become factors.
#pragma once

#include "head_slice.h"
#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int64_t kMostTogether = 8;  // heads

// Whether each n neighbouring heads have the rows of q and k in common, and no weights of their own for them.
FULMEN_INLINE bool share_queries_and_keys(const fulmen_problem &p, int64_t n) {
    return !by_channel(p.decay_form) && p.heads / p.query_heads % n == 0 && p.heads / p.key_heads % n == 0;
}

// The queries and keys of a chunk.
template <class Element> class QueriesAndKeys {
public:
    QueriesAndKeys(Arena &arena, const fulmen_problem &p)
        : decay_by_channel(by_channel(p.decay_form)),
          scale((float)p.scale),
          q(arena, kChunk, p.key_size, Use{true, false, false, decay_by_channel}),
          k(arena, kChunk, p.key_size, Use{!decay_by_channel, true, false, decay_by_channel}),
          products(arena.floats(kBlock)),
          q_transposed((Element *)arena.floats(padded(p.key_size) * kPanel)) {}

    void load(const Head &in, int64_t t, int64_t count) const {
        const int64_t blocks = padded(q.size) / kPanel;
        q.load(in.q.from(t, 0), count);
        k.load(in.k.from(t, 0), count);
        if (decay_by_channel) {
            for (int64_t p = 0; p < blocks && scale != 1.0f; ++p) scale_block(q.in_floats().panel(p), scale);
            return;
        }
        transpose(q.over_channels(), elements<Element>(q.size), q_transposed);
        multiply(products, 1, Zero{}, Product<AsStoredOf<Element>>{k.over_channels(), q_transposed, blocks});
        if (scale != 1.0f) scale_block(products, scale);
    }

    const bool decay_by_channel;  // then q is scaled, and there are no products
    const float scale;
    const Operand<Element> q, k;
    float *const products;  // [j][i]: scale q_i . k_j

private:
    Element *const q_transposed;
};

// Number `index` of `sharers`, the heads that share queries and keys.
template <class Element> class ForwardHead : public StateWorker<Element> {
    typedef StateWorker<Element> Base;
    using Base::in, Base::k, Base::kInFloats, Base::prefetch_share, Base::v;

public:
    using Base::key, Base::state, Base::value;

    ForwardHead(Arena &arena, const fulmen_problem &p, int64_t columns, const QueriesAndKeys<Element> &rows,
                int64_t index, int64_t sharers)
        : Base(arena, p, columns, rows.k,
               Base::advancing_values(Use{false, true, decays(p.decay_form) && !by_channel(p.decay_form)})),
          rows(rows),
          index(index),
          sharers(sharers),
          o(arena.panels(kChunk, columns)),
          factor(factor_of_state(arena)),
          pairs(arena.floats(kBlock)),
          rounded_pairs(kInFloats ? nullptr : (Element *)arena.floats(kBlock)) {}

    void round_state() {
        for (int64_t p = 0; p < value.blocks(); ++p)
            if constexpr (!kInFloats) round_rows(state.panel(p), key.blocks() * kPanel, factor.panel(p));
    }

    // A chunk whose queries and keys are loaded. The state that enters may be `empty`, and need not be there then.
    void attend(Rows output, int64_t t, int64_t count, bool empty, bool advances) {
        const int64_t depth = empty ? 0 : key.blocks();
        load_values(t, count);
        weigh_queries_and_keys(empty);
        const TransposedOf<Element> inside = transposed(pairs, rounded_pairs);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_queries_and_keys(t + kAhead, p);
            this->prefetch_values(t + kAhead, p);
            value.by_channel() ? read_panel_with_value_decay(p, depth) : read_panel(p, depth, inside);
            if (advances) advance_panel(p);
        }
        unpack(o, t, count, value.size(), output);
    }

    // The state alone, without reading it, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        const int64_t count = smaller<int64_t>(kChunk, last - t);
        k.load(in.k.from(t, 0), count);
        load_values(t, count);
        if (key.by_channel()) this->weigh_keys();
        if constexpr (kInFloats) value.weigh_earlier(v.in_floats());
        for (int64_t p = 0; p < value.blocks(); ++p) {
            this->prefetch_keys_and_values(t + kAhead, p);
            advance_panel(p);
        }
    }

private:
    PanelsOf<Element> factor_of_state(Arena &arena) const {
        if constexpr (kInFloats)
            return state;
        else
            return arena.panels<Pair>(elements<Pair>(key.size()), value.size());
    }

    void load_values(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        v.load(in.v.from(t, 0), count, key.weights().suffix);
    }

    // Pairs of tokens, and what reads the state that enters the chunk.
    void weigh_queries_and_keys(bool empty) {
        if (key.by_channel()) {
            key.pair_products(rows.q.in_floats(), k.in_floats(), (const float *)nullptr, pairs);
            key.weigh_later(rows.q.in_floats());
            rows.q.round();
            this->weigh_keys();
        } else {
            weigh_pairs(rows.products, key.weights().pair, pairs);
        }
        for (int i = 0; i < kChunk && !empty; ++i)
            row_weights[i] = key.by_channel() ? 1 : rows.scale * key.weights().prefix[i];
    }

    // Heads have a part each in the rows that they share.
    FULMEN_MEMBER void prefetch_queries_and_keys(int64_t t, int64_t p) const {
        prefetch_share(in.q, t, key.size(), index * value.blocks() + p, sharers);
        prefetch_share(in.k, t, key.size(), index * value.blocks() + p, sharers);
    }

    // The state's first depth blocks of rows: all of them, or none of an empty one.
    void read_panel(int64_t p, int64_t depth, TransposedOf<Element> inside) {
        multiply(o.panel(p), 1, Zero{}, Product<AsStoredOf<Element>>{rows.q.over_channels(), factor.panel(p), depth},
                 RowWeights{row_weights}, Product<TransposedOf<Element>>{inside, v.over_tokens().panel(p), 1});
    }

    void read_panel_with_value_decay(int64_t p, int64_t depth) {
        if constexpr (kInFloats) {
            float *const values = v.in_floats().panel(p);
            float inside[kBlock];
            channel_mix(pairs, values, value.factors(p), inside);
            multiply(o.panel(p), 1, Zero{}, Product<AsStored>{rows.q.in_floats(), state.panel(p), depth});
            weigh_rows(o.panel(p), row_weights);
            weigh_by_prefix(o.panel(p), value.factors(p));
            for (int x = 0; x < kBlock; x += kLanes) store(o.panel(p) + x, load(o.panel(p) + x) + load(inside + x));
            weigh_by_suffix(values, value.factors(p));
        }
    }

    void advance_panel(int64_t p) {
        const Scale start = decayed(key, value, p);
        if constexpr (kInFloats) {
            if (key.decays() && !key.by_channel()) weigh_rows(v.in_floats().panel(p), key.weights().suffix);
            Base::advance_panel(p, start, k, v.weighed().panel(p));
        } else {
            Base::advance_panel(p, ScaleAndRound{start, factor.panel(p)}, k, v.weighed().panel(p));
        }
    }

    const QueriesAndKeys<Element> rows;
    const int64_t index, sharers;
    const Panels o;
    const PanelsOf<Element> factor;  // the state, rounded in pairs
    float *const pairs;
    Element *const rounded_pairs;
    float row_weights[kChunk] = {};
};

// Neighbouring heads, or one head.
template <class Element> class ForwardWorker {
public:
    ForwardWorker(Arena &arena, const fulmen_problem &p, int64_t columns, int64_t together)
        : rows(arena, p), together(together), sharers(share_queries_and_keys(p, together) ? together : 1) {
        for (int64_t i = 0; i < together; ++i)
            heads[i] = arena.place<ForwardHead<Element>>(p, columns, rows, i % sharers, sharers);
    }

    ForwardHead<Element> &head(int64_t i) const { return *heads[i]; }

    // Heads have been started, and states have entered. `empty`: they are, and need not be there. `final`: the states
    // that leave are wanted; they are not advanced over the last chunk else.
    void attend(const HeadSlice *slices, int64_t first, int64_t last, bool empty, bool final) const {
        for (int64_t i = 0; i < together && !empty; ++i) heads[i]->round_state();
        for (int64_t t = first; t < last; t += kChunk, empty = false) {
            const int64_t count = smaller<int64_t>(kChunk, last - t);
            for (int64_t i = 0; i < together; ++i) {
                if (i % sharers == 0) rows.load(slices[i].head, t, count);
                heads[i]->attend(slices[i].output, t, count, empty, final || t + kChunk < last);
            }
        }
    }

private:
    const QueriesAndKeys<Element> rows;
    const int64_t together, sharers;  // of which all or none share
    ForwardHead<Element> *heads[kMostTogether];
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
