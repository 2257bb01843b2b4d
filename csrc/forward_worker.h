// The worker that walks one head from left to right and reads its state:
//
//     o_i = q_i (e^{b_i} S_in) + sum over j <= i of (q_i e^{b_i - b_j} . k_j) v_j
//
// A panel of the state is read for the output and advanced while it stands in L1.
#pragma once

#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

class ForwardWorker : public StateWorker {
public:
    ForwardWorker(Arena &arena, const fulmen_problem &p, int64_t columns)
        : StateWorker(arena, p, columns),
          q(arena.panels(kChunk, p.key_size)),
          o(arena.panels(kChunk, columns)),
          q_transposed(arena.floats(padded(p.key_size) * kPanel)),
          pairs(arena.floats(kBlock)),
          scale((float)p.scale) {}

    // `empty`: the state that enters is, and need not be there. `final`: the state that leaves is wanted; it is not
    // advanced over the last chunk else.
    void attend(Rows output, int64_t first, int64_t last, bool empty, bool final) {
        for (int64_t t = first; t < last; t += kChunk, empty = false) {
            const bool advances = final || t + kChunk < last;
            const int64_t depth = empty ? 0 : key.blocks();
            const int64_t count = smaller<int64_t>(kChunk, last - t);
            load_keys_and_values(t, count);
            pack(in.q, t, count, key.size(), q);
            scale_queries();
            if (!key.by_channel()) transpose(q, key.size(), q_transposed);
            key.pair_products(q, k, q_transposed, pairs);
            if (!empty) key.weigh_later(q);
            if (advances) key.weigh_earlier(k);
            for (int64_t p = 0; p < value.blocks(); ++p) {
                prefetch_share(in.q, t + kAhead, key.size(), p);
                prefetch_keys_and_values(t + kAhead, p);
                value.by_channel() ? read_panel_with_value_decay(p, depth) : read_panel(p, depth);
                if (advances) advance_panel(state.panel(p), key, value, p, k, v.panel(p));
            }
            unpack(o, t, count, value.size(), output);
        }
    }

private:
    void scale_queries() {
        if (scale == 1.0f) return;
        for (int64_t p = 0; p < key.blocks(); ++p)
            for (int x = 0; x < kBlock; x += kLanes) store(q.panel(p) + x, load(q.panel(p) + x) * scale);
    }

    // The state's first depth blocks of rows: all of them, or none of an empty one.
    void read_panel(int64_t p, int64_t depth) {
        multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q, state.panel(p), depth},
                 Product<Transposed>{Panels{pairs, 0}, v.panel(p), 1});
    }

    void read_panel_with_value_decay(int64_t p, int64_t depth) {
        float inside[kBlock];
        channel_mix(pairs, v.panel(p), value.factors(p), inside);
        multiply(o.panel(p), 1, Zero{}, Product<AsStored>{q, state.panel(p), depth});
        weigh_by_prefix(o.panel(p), value.factors(p));
        for (int x = 0; x < kBlock; x += kLanes) store(o.panel(p) + x, load(o.panel(p) + x) + load(inside + x));
        weigh_by_suffix(v.panel(p), value.factors(p));
    }

    Panels q, o;
    float *q_transposed, *pairs;
    float scale;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
