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
    using Base::factor, Base::in, Base::k, Base::kInFloats, Base::prefetch_share, Base::v;

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
          o(arena.floats(kBlock)),
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
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_queries_and_keys(t + kAhead, p);
            this->prefetch_values(t + kAhead, p);
            prefetch_share(output, t + kAhead, value.size(), p);
            attend_panel(output, p, t, count, depth, inside);
            if (advances) advance_panel(p);
        }
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
    FULMEN_MEMBER void prefetch_queries_and_keys(int64_t t, int64_t p) const {
        prefetch_share(in.q, t, key.size(), index * value.blocks() + p, sharers);
        prefetch_share(in.k, t, key.size(), index * value.blocks() + p, sharers);
    }

    // The state's first depth blocks of rows: all of them, or none of an empty one.
    void attend_panel(Rows output, int64_t p, int64_t t, int64_t count, int64_t depth, TransposedOf<Element> inside) {
        const bool whole = count == kChunk && (p + 1) * kPanel <= value.size();
        if constexpr (!kInFloats)
            if (whole && output.dtype == FULMEN_BFLOAT16) {
                const Rows to = output.from(t, p * kPanel);
                return read_panel(p, depth, inside, ToRows{(uint16_t *)to.data, to.stride});
            }
        value.by_channel() ? read_panel_with_value_decay(p, depth) : read_panel(p, depth, inside, Zero{});
        unpack_panel(o, p, t, count, value.size(), output);
    }

    template <class Start> void read_panel(int64_t p, int64_t depth, TransposedOf<Element> inside, const Start &start) {
        multiply(o, 1, start, Product<AsStoredOf<Element>>{rows.q.over_channels(), factor.panel(p), depth},
                 RowWeights{row_weights}, Product<Lower<TransposedOf<Element>>>{inside, v.over_tokens().panel(p), 1});
    }

    void read_panel_with_value_decay(int64_t p, int64_t depth) {
        if constexpr (kInFloats) {
            float *const values = v.in_floats().panel(p);
            float inside[kBlock];
            channel_mix(pairs, values, value.factors(p), inside);
            multiply(o, 1, Zero{}, Product<AsStored>{rows.q.in_floats(), state.panel(p), depth});
            weigh_rows(o, row_weights);
            weigh_by_prefix(o, value.factors(p));
            for (int x = 0; x < kBlock; x += kLanes) store(o + x, load(o + x) + load(inside + x));
            weigh_by_suffix(values, value.factors(p));
        }
    }

    void advance_panel(int64_t p) {
        if constexpr (kInFloats) {
            if (value_weights.present())
                weigh_rows(v.in_floats().panel(p), weighed_suffix);
            else if (key.decays() && !key.by_channel())
                weigh_rows(v.in_floats().panel(p), key.weights().suffix);
        }
        Base::advance_panel(p, k, v.weighed().panel(p));
    }

    const QueriesAndKeys<Element> rows;
    const int64_t index, sharers;
    float *const o;  // one panel
    float *const pairs;
    Element *const rounded_pairs;
    float row_weights[kChunk] = {};
    Rows value_weights = {};
    float skip = 0, own_weights[kChunk], weighed_suffix[kChunk];  // of the chunk
};

template <class Element> using ForwardWorker = HeadsTogether<QueriesAndKeys<Element>, ForwardHead<Element>>;

}  // namespace FULMEN_ISA
}  // namespace fulmen
