// The worker that walks one head from left to right, with the state in its cache:
//
//     o_i   = q_i (e^{b_i} S_in) + sum over j <= i of (q_i e^{b_i - b_j} . k_j) v_j
//     S_out = e^{b_C} S_in + sum over j of (e^{b_C - b_j} k_j) v_j^T
//
// Panels of the state are 16 value features wide: a panel is read for the output and advanced while it stands in L1.
#pragma once

#include "chunk.h"

namespace fulmen {
namespace FULMEN_ISA {

class ForwardWorker {
public:
    ForwardWorker(Arena &arena, const fulmen_problem &p, int64_t columns)
        : key(arena, p.decay_form, p.key_features),
          value(arena, p.decay_v_form, columns),
          q(arena.panels(kChunk, p.key_features)),
          k(arena.panels(kChunk, p.key_features)),
          v(arena.panels(kChunk, columns)),
          o(arena.panels(kChunk, columns)),
          q_transposed(arena.floats(padded(p.key_features) * kPanel)),
          pairs(arena.floats(kBlock)),
          state(arena.panels(p.key_features, columns)),
          scale((float)p.scale) {}

    void attend(const Head &head, Rows output, int64_t first, int64_t last) {
        key.start(head.decay);
        value.start(head.decay_v);
        for (int64_t t = first; t < last; t += kChunk) {
            const int64_t count = smaller<int64_t>(kChunk, last - t);
            load_keys_and_values(head, t, count);
            pack(head.q, t, count, key.features(), q);
            scale_queries();
            if (!key.by_feature()) transpose(q, key.features(), q_transposed);
            key.pair_products(q, k, q_transposed, pairs);
            key.weigh_later(q);
            key.weigh_earlier(k);
            for (int64_t p = 0; p < value.blocks(); ++p) {
                prefetch_share(head.q, t, head.tokens, key.features(), p);
                prefetch_keys_and_values(head, t, p);
                value.by_feature() ? read_panel_with_value_decay(p) : read_panel(p);
                advance_panel(state.panel(p), key, value, p, k, v.panel(p));
            }
            unpack(o, t, count, value.features(), output);
        }
    }

    // The state alone, without reading it; the totals are multiplied by what the stretch decays.
    void advance(const Head &head, int64_t first, int64_t last, float *key_totals, float *value_totals) {
        key.start(head.decay);
        value.start(head.decay_v);
        for (int64_t t = first; t < last; t += kChunk) {
            load_keys_and_values(head, t, smaller<int64_t>(kChunk, last - t));
            key.weigh_earlier(k);
            value.weigh_earlier(v);
            for (int64_t p = 0; p < value.blocks(); ++p) {
                prefetch_keys_and_values(head, t, p);
                advance_panel(state.panel(p), key, value, p, k, v.panel(p));
            }
            key.multiply_into(key_totals);
            value.multiply_into(value_totals);
        }
    }

    Axis key, value;
    Panels q, k, v, o;
    float *q_transposed, *pairs;
    Panels state;
    float scale;

private:
    void load_keys_and_values(const Head &head, int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        pack(head.k, t, count, key.features(), k);
        pack(head.v, t, count, value.features(), v);
    }

    // While panel p of the chunk at token t is computed. Always inline: GCC drops calls that only prefetch.
    FULMEN_MEMBER void prefetch_share(Rows rows, int64_t t, int64_t tokens, int64_t features, int64_t p) const {
        prefetch(rows, t + kAhead, smaller<int64_t>(kChunk, tokens - t - kAhead), features, p, value.blocks());
    }
    FULMEN_MEMBER void prefetch_keys_and_values(const Head &head, int64_t t, int64_t p) const {
        prefetch_share(head.k, t, head.tokens, key.features(), p);
        prefetch_share(head.v, t, head.tokens, value.features(), p);
        if (key.by_feature()) prefetch_share(head.decay, t, head.tokens, key.features(), p);
        if (value.by_feature()) prefetch_share(head.decay_v, t, head.tokens, value.features(), p);
    }

    void scale_queries() {
        if (scale == 1.0f) return;
        for (int64_t p = 0; p < key.blocks(); ++p)
            for (int x = 0; x < kBlock; x += kLanes) store(q.panel(p) + x, load(q.panel(p) + x) * scale);
    }

    void read_panel(int64_t p) {
        multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q, state.panel(p), key.blocks()},
                 Product<Transposed>{Panels{pairs, 0}, v.panel(p), 1});
    }

    void read_panel_with_value_decay(int64_t p) {
        float inside[kBlock];
        feature_mix(pairs, v.panel(p), value.factors(p), inside);
        multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q, state.panel(p), key.blocks()});
        weigh_by_prefix(o.panel(p), value.factors(p));
        for (int x = 0; x < kBlock; x += kLanes) store(o.panel(p) + x, load(o.panel(p) + x) + load(inside + x));
        weigh_by_suffix(v.panel(p), value.factors(p));
    }
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
