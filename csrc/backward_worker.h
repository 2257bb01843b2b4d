// The worker that computes the gradients of one head, in two walks over its chunks that keep nothing from the forward.
//
// Left to right, with the state S:
//     dq_i  = e^{b_i} (S_in do_i) + sum over j <= i of e^{b_i - b_j} k_j (v_j . do_i)
// Right to left, with the gradient dS of the state:
//     dk_j  = e^{b_C - b_j} (dS v_j) + sum over i >= j of e^{b_i - b_j} q_i (v_j . do_i)
//     dv_j  = dS^T (e^{b_C - b_j} k_j) + sum over i >= j of (q_i e^{b_i - b_j} . k_j) do_i
//     dS_in = e^{b_C} dS + sum over i of (e^{b_i} q_i) do_i^T
#pragma once

#include "decay_gradient.h"
#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

// Where one head's gradients go; rows are absent when not wanted.
struct HeadGradients {
    Rows output, q, k, v, log_decay, log_decay_v;
};

class BackwardWorker : public StateWorker {
public:
    BackwardWorker(Arena &arena, const fulmen_problem &p, bool wants_decay, bool wants_decay_v)
        : StateWorker(arena, p, p.value_size),
          key_gradient(arena, p.decay_form, p.key_size, wants_decay),
          value_gradient(arena, p.decay_v_form, p.value_size, wants_decay_v),
          q(arena.panels(kChunk, p.key_size)),
          g(arena.panels(kChunk, p.value_size)),
          d_keys(arena.panels(kChunk, p.key_size)),
          d_values(arena.panels(kChunk, p.value_size)),
          inside_keys(arena.panels(kChunk, p.key_size)),
          inside_values(arena.panels(kChunk, p.value_size)),
          keys_transposed(arena.floats(padded(p.key_size) * kPanel)),
          values_transposed(arena.floats(padded(p.value_size) * kPanel)),
          scores(arena.floats(kBlock)),
          grads(arena.floats(kBlock)),
          scale((float)p.scale) {}

    // The first walk's chunk: dq, the decay gradient's first kind, and the state.
    void walk_right(int64_t t, int64_t count) {
        load_chunk(t, count, key_gradient.wanted() || value_gradient.wanted());
        transpose(g, value.size(), values_transposed);
        value.pair_products(g, v, values_transposed, grads);
        value.weigh_later(g);
        if (value.decays()) transpose(g, value.size(), values_transposed);
        state_times(values_transposed, keys_transposed, d_keys);
        key.weigh_later(d_keys);
        if (key_gradient.wanted()) key_gradient.begin(q, d_keys, t, count);
        if (out.q.present()) {
            add_pairs_to_query_gradient();
            unpack(d_keys, t, count, key.size(), out.q);
        }
        if (value_gradient.wanted()) {
            key.weigh_later(q);
            for (int64_t p = 0; p < value.blocks(); ++p)
                multiply(d_values.panel(p), 1, Zero{}, Product<AsStored>{q, state.panel(p), key.blocks()});
            value_gradient.begin(d_values, g, t, count);
        }
        key.weigh_earlier(k);
        value.weigh_earlier(v);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_inputs(t + kAhead, p);
            advance_panel(state.panel(p), key, value, p, k, v.panel(p));
        }
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
        if (values || key_gradient.wanted()) {
            transpose(q, key.size(), keys_transposed);
            key.pair_products(q, k, keys_transposed, scores);
        }
        if (keys) {
            transpose(g, value.size(), values_transposed);
            value.pair_products(g, v, values_transposed, grads);
        }
        if (values && value.by_channel())
            for (int64_t p = 0; p < value.blocks(); ++p)
                channel_mix_back(scores, g.panel(p), v.panel(p), value.factors(p), inside_values.panel(p),
                                 value_gradient.wanted() ? value_gradient.inside.panel(p) : nullptr);
        value.weigh_earlier(v);
        if (keys) {
            weigh_pairs_for_keys();
            transpose(v, value.size(), values_transposed);
            state_times(values_transposed, keys_transposed, d_keys);
        }
        key.weigh_earlier(k);
        if (key_gradient.wanted()) key_gradient.finish(key, k, d_keys, t, count);
        if (out.k.present()) {
            key.weigh_earlier(d_keys);
            add_pairs_to_key_gradient();
            unpack(d_keys, t, count, key.size(), out.k);
        }
        for (int64_t p = 0; p < value.blocks() && values; ++p) read_values(p);
        if (value_gradient.wanted()) value_gradient.finish(value, v, d_values, t, count);
        if (out.v.present()) {
            value.weigh_earlier(d_values);
            if (value.by_channel())
                for (int64_t p = 0; p < value.blocks(); ++p) add_block(d_values.panel(p), inside_values.panel(p));
            unpack(d_values, t, count, value.size(), out.v);
        }
        key.weigh_later(q);
        value.weigh_later(g);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_inputs(t - kAhead, p);
            advance_panel(state.panel(p), key, value, p, q, g.panel(p));
        }
    }

    // The gradient of the state alone, over the chunk that begins at token t.
    void retreat(int64_t t, int64_t last) {
        const int64_t count = smaller<int64_t>(kChunk, last - t);
        key.begin(t, count);
        value.begin(t, count);
        pack(in.q, t, count, key.size(), q);
        load_output_gradient(t, count);
        key.weigh_later(q);
        value.weigh_later(g);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_queries(t - kAhead, p);
            advance_panel(state.panel(p), key, value, p, q, g.panel(p));
        }
    }

    AxisGradient key_gradient, value_gradient;
    HeadGradients out = {};  // where the results go; may change from chunk to chunk

private:
    void load_chunk(int64_t t, int64_t count, bool with_queries) {
        load_keys_and_values(t, count);
        if (with_queries) pack(in.q, t, count, key.size(), q);
        load_output_gradient(t, count);
    }

    void load_output_gradient(int64_t t, int64_t count) {
        pack(out.output, t, count, value.size(), g);
        if (scale == 1.0f) return;
        for (int64_t p = 0; p < value.blocks(); ++p)
            for (int x = 0; x < kBlock; x += kLanes) store(g.panel(p) + x, load(g.panel(p) + x) * scale);
    }

    FULMEN_MEMBER void prefetch_queries(int64_t t, int64_t p) const {
        prefetch_share(in.q, t, key.size(), p);
        prefetch_share(out.output, t, value.size(), p);
    }
    FULMEN_MEMBER void prefetch_inputs(int64_t t, int64_t p) const {
        prefetch_queries(t, p);
        prefetch_keys_and_values(t, p);
    }

    static void add_block(float *to, const float *from) {
        for (int x = 0; x < kBlock; x += kLanes) store(to + x, load(to + x) + load(from + x));
    }

    void add_pairs_to_query_gradient() {
        if (!key.by_channel()) weigh_pairs(grads, key.weights().pair);
        for (int64_t p = 0; p < key.blocks(); ++p) {
            if (key.by_channel()) {
                channel_mix(grads, k.panel(p), key.factors(p), inside_keys.panel(p));
                add_block(d_keys.panel(p), inside_keys.panel(p));
            } else {
                multiply(d_keys.panel(p), 1, Add{}, Product<Transposed>{Panels{grads, 0}, k.panel(p), 1});
            }
        }
    }

    // What pairs inside the chunk give to the keys and to the key decay, as far as it needs the unweighted k.
    void weigh_pairs_for_keys() {
        if (key.by_channel()) {
            for (int64_t p = 0; p < key.blocks(); ++p)
                channel_mix_back(grads, q.panel(p), k.panel(p), key.factors(p), inside_keys.panel(p),
                                 key_gradient.wanted() ? key_gradient.inside.panel(p) : nullptr);
            return;
        }
        if (key_gradient.wanted()) scalar_gradient(scores, grads, key_gradient.inside_scalar);
        weigh_pairs(grads, key.weights().pair);
    }

    void add_pairs_to_key_gradient() {
        for (int64_t p = 0; p < key.blocks(); ++p)
            if (key.by_channel())
                add_block(d_keys.panel(p), inside_keys.panel(p));
            else
                multiply(d_keys.panel(p), 1, Add{}, Product<AsStored>{Panels{grads, 0}, q.panel(p), 1});
    }

    void read_values(int64_t p) {
        const Product<AsStored> from_state{k, state.panel(p), key.blocks()};
        if (value.by_channel())
            multiply(d_values.panel(p), 1, Zero{}, from_state);
        else
            multiply(d_values.panel(p), 1, Zero{}, from_state, Product<AsStored>{Panels{scores, 0}, g.panel(p), 1});
    }

    Panels q, g;              // g is scale * do
    Panels d_keys, d_values;  // gradients on either axis
    Panels inside_keys, inside_values;
    float *keys_transposed, *values_transposed;
    float *scores, *grads;  // [j][i]: q_i . k_j and do_i . v_j
    float scale;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
