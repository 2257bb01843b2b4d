// The worker that walks heads from left to right and reads their states:
//
//     o_i = e^{b_i} (q_i S_in) + sum over j <= i of e^{b_i - b_j} (q_i . k_j) v_j
//
// A panel of a state is read for the output and advanced while it stands in L1.
//
// One decay for all channels of a token weighs the values, and what queries and keys make, so that rows of q and k that
// heads share are packed and multiplied with each other once for all of them. A decay per channel weighs q and k
// themselves, in floats.
//
// In pairs, the state and the sums q.k are rounded too, once, where they become factors.
//
// Values may have weights of their own, and be added to the output: v_j stands for weight_j v_j then, and o_i gets
// skip v_i. That is a factor of what weighs the values anyway, and a term of the pairs of a token with itself.
#pragma once

#include "head_slice.h"
#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

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
template <class Element> class ForwardHead : public ReadingWorker<Element> {
    typedef ReadingWorker<Element> Base;
    using Base::factor, Base::in, Base::k, Base::kInFloats, Base::soon, Base::v;

public:
    static constexpr bool kExpects = false;
    using Base::key, Base::state, Base::value;
    using Base::kTokens;

    ForwardHead(Arena &arena, const fulmen_problem &p, int64_t columns, const QueriesAndKeys<Element> &rows,
                int64_t index, int64_t sharers)
        : Base(arena, p, columns, rows.k,
               Base::advancing_values(Use{false, true, decays(p.decay_form) && !by_channel(p.decay_form)})),
          rows(rows),
          index(index),
          sharers(sharers),
          o(arena.panels(kChunk, kPanelsAtOnce * kPanel)),
          pairs(arena.floats(kBlock)),
          rounded_pairs(kInFloats ? nullptr : (Element *)arena.floats(kBlock)) {}

    // In floats, values may have weights, one of each token.
    void start(const Head &head, Rows weights_of_values = {}, float skip_of_values = 0) {
        Base::start(head);
        value_weights = weights_of_values;
        skip = skip_of_values;
    }

    // A chunk whose queries and keys are loaded. The state that enters may be `empty`, and need not be there then.
    void attend(Rows output, int64_t t, int64_t count, bool empty, bool advances) {
        const int64_t depth = empty ? 0 : key.blocks();
        load_values(t, count);
        weigh_queries_and_keys(empty);
        const TransposedOf<Element> inside = transposed(pairs, rounded_pairs);
        expect_chunk(output, t + kAhead);
        soon.spread(this->advancing_steps() * (!empty + advances));
        for_each_panels(value.blocks(), [&](int64_t p, auto some) {
            attend_panels<some.kCount>(output, p, t, count, depth, inside);
            if (advances) advance_panels<some.kCount>(p);
        });
    }

    // The state alone, without reading it, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        const int64_t count = smaller<int64_t>(kChunk, last - t);
        k.load(in.k.from(t, 0), count);
        load_values(t, count);
        if (key.by_channel()) this->weigh_keys();
        if constexpr (kInFloats) value.weigh_earlier(v.in_floats());
        soon = {};
        this->expect_keys_and_values(t + kAhead);
        soon.spread(this->advancing_steps());
        for_each_panels(value.blocks(), [&](int64_t p, auto some) { advance_panels<some.kCount>(p); });
    }

private:
    void load_values(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        v.load(in.v.from(t, 0), count, key.weights().suffix);
        if (!value_weights.present()) return;
        gather(value_weights, t, count, own_weights);
        for (int j = 0; j < kChunk; ++j) weighed_suffix[j] = key.weights().suffix[j] * own_weights[j];
    }

    // Pairs of tokens, and what reads the state that enters the chunk.
    void weigh_queries_and_keys(bool empty) {
        if (key.by_channel()) {
            key.pair_products(rows.q.in_floats(), k.in_floats(), (const float *)nullptr, pairs);
            key.weigh_later(rows.q.in_floats());
            rows.q.round();
            this->weigh_keys();
        } else {
            weigh_pairs(rows.products, key.weights().pair, pairs, value_weights.present() ? own_weights : kOnes);
            for (int i = 0; i < kChunk && skip != 0; ++i) pairs[i * kPanel + i] += skip;
        }
        for (int i = 0; i < kChunk && !empty; ++i)
            row_weights[i] = key.by_channel() ? 1 : rows.scale * key.weights().prefix[i];
    }

    // Heads have a part each in the rows that they share.
    void expect_chunk(Rows output, int64_t t) {
        soon = {};
        for (Rows rows : {in.q, in.k})
            soon.add(rows, key.size(), t + index, smaller<int64_t>(kChunk, in.tokens - t) - index, sharers);
        this->expect_values(t);
        this->expect(output, t, value.size());
    }

    // The state's first depth blocks of rows: all of them, or none of an empty one.
    template <int Count>
    void attend_panels(Rows output, int64_t p, int64_t t, int64_t count, int64_t depth, TransposedOf<Element> inside) {
        const bool whole = count == kChunk && (p + Count) * kPanel <= value.size();
        if constexpr (!kInFloats)
            if (whole && output.dtype == FULMEN_BFLOAT16) {
                const Rows to = output.from(t, p * kPanel);
                return read_panels<Count>(p, depth, inside, ToRows{(uint16_t *)to.data, to.stride});
            }
        value.by_channel() ? read_panels_with_value_decay<Count>(p, depth)
                           : read_panels<Count>(p, depth, inside, Zero{});
        for (int i = 0; i < Count; ++i) unpack_panel(o.panel(i), p + i, t, count, value.size(), output);
    }

    template <int Count, class Start>
    void read_panels(int64_t p, int64_t depth, TransposedOf<Element> inside, const Start &start) {
        multiply<Count>(o, 0, 1, start,
                        Times<Count, AsStoredOf<Element>, Prefetching>{
                            rows.q.over_channels(), panels_at<Count>(factor, p), depth, {&soon}},
                        RowWeights{row_weights},
                        Times<Count, Lower<TransposedOf<Element>>>{inside, panels_at<Count>(v.over_tokens(), p), 1});
    }

    template <int Count> void read_panels_with_value_decay(int64_t p, int64_t depth) {
        if constexpr (kInFloats) {
            multiply<Count>(
                o, 0, 1, Zero{},
                Times<Count, AsStored, Prefetching>{rows.q.in_floats(), panels_at<Count>(state, p), depth, {&soon}});
            for (int i = 0; i < Count; ++i) add_pairs_with_value_decay(p + i, o.panel(i));
        }
    }
    void add_pairs_with_value_decay(int64_t p, float *from_state) {
        float *const values = v.in_floats().panel(p);
        float inside[kBlock];
        channel_mix(pairs, values, value.factors(p), inside);
        weigh_rows(from_state, row_weights);
        weigh_by_prefix(from_state, value.factors(p));
        add_block(from_state, inside);
        weigh_by_suffix(values, value.factors(p));
    }

    template <int Count> void advance_panels(int64_t p) {
        if constexpr (kInFloats)
            for (int i = 0; i < Count; ++i) {
                if (value_weights.present())
                    weigh_rows(v.in_floats().panel(p + i), weighed_suffix);
                else if (key.decays() && !key.by_channel())
                    weigh_rows(v.in_floats().panel(p + i), key.weights().suffix);
            }
        Base::advance_panels(p, k, panels_at<Count>(v.weighed(), p));
    }

    const QueriesAndKeys<Element> rows;
    const int64_t index, sharers;
    const Panels o;
    float *const pairs;
    Element *const rounded_pairs;
    float row_weights[kChunk] = {};
    Rows value_weights = {};
    float skip = 0, own_weights[kChunk], weighed_suffix[kChunk];  // of the chunk
};

template <class Element> using ForwardWorker = HeadsTogether<QueriesAndKeys<Element>, ForwardHead<Element>>;

}  // namespace FULMEN_ISA
}  // namespace fulmen
