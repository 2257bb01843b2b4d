// The worker that has one head's state in its cache and takes it from chunk to chunk:
//
//     S_out = e^{b_C} S_in + sum over j of (e^{b_C - b_j} k_j) v_j^T
//
// Panels of the state are 16 value channels wide. Workers that also read the state build on this one.
#pragma once

#include "axis.h"
#include "state.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

class StateWorker {
public:
    StateWorker(Arena &arena, const fulmen_problem &p, int64_t columns)
        : key(arena, p.decay_form, p.key_size),
          value(arena, p.decay_v_form, columns),
          state(arena.panels(p.key_size, columns)),
          k(arena.panels(kChunk, p.key_size)),
          v(arena.panels(kChunk, columns)) {}

    void start(const Head &head) {
        in = head;
        key.start(head.log_decay);
        value.start(head.log_decay_v);
    }

    // Before a walk's first chunk; without a state, what it holds does not matter.
    void enter() {
        key.enter();
        value.enter();
    }
    void enter(Matrix given) {
        enter();
        load_state(given, key.size(), value.size(), state);
    }
    void enter(Panels given) {
        enter();
        memcpy(state.data, given.data, 4 * (size_t)panels_size(key.size(), value.size()));
    }

    // The state alone, without reading it, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        load_keys_and_values(t, smaller<int64_t>(kChunk, last - t));
        key.weigh_earlier(k);
        value.weigh_earlier(v);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_keys_and_values(t + kAhead, p);
            advance_panel(state.panel(p), key, value, p, k, v.panel(p));
        }
    }

    bool grows() const { return key.grows() || value.grows(); }

    Axis key, value;
    Panels state;

protected:
    void load_keys_and_values(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        pack(in.k, t, count, key.size(), k);
        pack(in.v, t, count, value.size(), v);
    }

    // result = (state * values^T)^T: [token][key channel]. Both others are transposed, one panel.
    void state_times(const float *values, float *scratch, Panels result) const {
        multiply(scratch, key.blocks(), Zero{}, Product<AsStored>{state, values, value.blocks()});
        for (int64_t p = 0; p < key.blocks(); ++p) transpose_block(scratch + p * kBlock, result.panel(p));
    }

    // Panel p's share of the rows of the chunk at token t. Always inline: GCC drops calls that only prefetch.
    FULMEN_MEMBER void prefetch_share(Rows rows, int64_t t, int64_t size, int64_t p) const {
        if (t >= 0) prefetch(rows, t, smaller<int64_t>(kChunk, in.tokens - t), size, p, value.blocks());
    }
    FULMEN_MEMBER void prefetch_keys_and_values(int64_t t, int64_t p) const {
        prefetch_share(in.k, t, key.size(), p);
        prefetch_share(in.v, t, value.size(), p);
        if (key.by_channel()) prefetch_share(in.log_decay, t, key.size(), p);
        if (value.by_channel()) prefetch_share(in.log_decay_v, t, value.size(), p);
    }

    Head in = {};
    Panels k, v;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
