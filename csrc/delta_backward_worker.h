// The worker that computes the gradients of the delta rule of one head, a segment of chunks at a time: from left to
// right once more, keeping of each chunk the state S that enters and the errors Y, then from right to left with the
// gradient G of the state. It is the backward of linear attention with two reads for each token, of q with do and of k
// with -dv, where
//
//     dU = M^T do + earlier(k) G            M_ij = w_ij q_i . k_j for j <= i
//     dv_j = beta_j (dU_j - sum over i > j of L_ij dv_i)
//     Wq_ij = beta_j do_i . Y_j for j <= i           Wk_ij = -beta_j dv_i . Y_j for j < i          of M and of L
//     dbeta_j = dU_j . Y_j - sum over i of L_ij dv_i . Y_j
//     dq = later(do S^T) + sum over j <= i of Wq_ij w_ij k_j
//     dk = earlier(U G^T) - later(dv S^T) + sum over i of (Wq_ij w_ij q_i + Wk_ij w_ij k_i) + sum over j of Wk w k_j
//     G_in = e^{b_C} G + later(q)^T do - later(k)^T dv
#pragma once

#include "decay_gradient.h"
#include "delta_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

// Where one head's gradients go; rows are absent when not wanted.
struct DeltaHeadGradients {
    Rows output, q, k, v, beta;
};

// Of one chunk, from the walk to the right for the walk to the left.
struct KeptChunk {
    Panels state, errors;
    float *overlaps;
    KeptChunk(Arena &arena, const fulmen_problem &p)
        : state(arena.panels(p.key_size, p.value_size)),
          errors(arena.panels(kChunk, p.value_size)),
          overlaps(arena.floats(kBlock)) {}
};

class DeltaBackwardWorker : public DeltaWorker<float> {
public:
    DeltaBackwardWorker(Arena &arena, const fulmen_delta_rule_problem &delta, bool wants_decay)
        : DeltaBackwardWorker(arena, delta, delta.attention, wants_decay) {}

    // The chunk at token t from left to right. The state need not be `advanced` over a segment's last chunk.
    void walk_right(int64_t t, int64_t count, const KeptChunk &kept, bool advanced) {
        overlaps = kept.overlaps;
        rows.load_keys(in, t, count);
        rows.pair_keys();
        load_corrections(t, count);
        weigh_keys();
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_keys_and_values(t + kAhead, p);
            memcpy(kept.state.panel(p), state.panel(p), 4 * (size_t)(key.blocks() * kBlock));
            Written<float> written;
            correct(p, key.blocks(), kept.errors.panel(p), written);
            if (advanced) advance_panels(p, rows.k, Panel(written.weighed));
        }
    }

    // The same chunk from right to left: all gradients, and that of the state.
    void walk_left(int64_t t, int64_t count, const KeptChunk &kept) {
        overlaps = kept.overlaps;
        load_chunk(t, count);
        differentiate_corrections(kept.errors);
        differentiate_reads(kept);
        if (key_gradient.wanted()) {
            key_gradient.begin(t, count, Read{q, d_queries}, Read{k, d_keys});
            key_gradient.restart(key, value, kept.state, grad_state, Along::Keys);
        }
        key.by_channel() ? add_channel_pairs() : add_pairs();
        if (key_gradient.wanted()) key_gradient.finish(key, k, k_out, t, count);
        store_gradients(t, count);
        key.weigh_later(q);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_share(in.q, t - kAhead, key.size(), p);
            prefetch_share(in.k, t - kAhead, key.size(), p);
            prefetch_share(out.output, t - kAhead, value.size(), p);
            prefetch_share(out.q, t - kAhead, key.size(), p);
            prefetch_share(out.k, t - kAhead, key.size(), p);
            prefetch_share(out.v, t - kAhead, value.size(), p);
            multiply(grad_state.panel(p), key.blocks(), decayed(key, value, p), Product<Transposed>{q, g.panel(p), 1},
                     Product<Transposed>{minus_later_k, d_values.panel(p), 1});
            clear_padding(grad_state, key.size(), value.size(), p);
        }
    }

    AxisGradient key_gradient;
    Panels grad_state = {};  // the head's own, from segment to segment
    DeltaHeadGradients out = {};

private:
    DeltaBackwardWorker(Arena &arena, const fulmen_delta_rule_problem &delta, const fulmen_problem &p, bool wants_decay)
        : DeltaWorker<float>(arena, p, p.value_size, DeltaRows<float>(arena, delta)),
          key_gradient(arena, p.decay_form, p.key_size, wants_decay),
          q(rows.q.in_floats()),
          k(rows.k.in_floats()),
          g(arena.panels(kChunk, p.value_size)),
          earlier_k(arena.panels(kChunk, p.key_size)),
          minus_later_k(arena.panels(kChunk, p.key_size)),
          d_written(arena.panels(kChunk, p.value_size)),
          d_values(arena.panels(kChunk, p.value_size)),
          d_queries(arena.panels(kChunk, p.key_size)),
          d_keys(arena.panels(kChunk, p.key_size)),
          k_out(arena.panels(kChunk, p.key_size)),
          g_transposed(arena.floats(padded(p.value_size) * kPanel)),
          values_transposed(arena.floats(padded(p.value_size) * kPanel)),
          scores(arena.floats(kBlock)),
          grads_q(arena.floats(kBlock)),
          grads_k(arena.floats(kBlock)),
          scale((float)p.scale) {}

    void load_chunk(int64_t t, int64_t count) {
        begin(t, count);
        rows.load_keys(in, t, count);
        rows.load_queries(in, t, count);
        pack(out.output, t, count, value.size(), g);
        for (int64_t p = 0; p < value.blocks() && scale != 1.0f; ++p) scale_block(g.panel(p), scale);
        weigh_products(rows.q, rows.scores, scores);
        for (int64_t p = 0; p < key.blocks(); ++p)
            for (int x = 0; x < kBlock; x += kLanes) store(minus_later_k.panel(p) + x, -load(k.panel(p) + x));
        key.weigh_later(minus_later_k);
        memcpy(earlier_k.data, k.data, 4 * (size_t)panels_size(kChunk, key.size()));
        key.weigh_earlier(earlier_k);
    }

    // dU, dv, dbeta, Wq and Wk.
    void differentiate_corrections(Panels errors) {
        float pulls_back[kBlock];  // [i][j]
        transpose_block(overlaps, pulls_back);
        weigh_rows(pulls_back, beta);
        for (int64_t p = 0; p < value.blocks(); ++p) {
            multiply(d_written.panel(p), 1, Zero{}, Product<AsStored>{earlier_k, grad_state.panel(p), key.blocks()},
                     Product<Upper<AsStored>>{AsStored(Panels{scores, 0}), g.panel(p), 1});
            solve<true>(pulls_back, d_written.panel(p), d_values.panel(p));
            weigh_rows(d_values.panel(p), beta);
        }
        transpose(g, value.size(), g_transposed);
        transpose(d_values, value.size(), values_transposed);
        for (int64_t p = 0; p < value.blocks(); ++p) scale_block(values_transposed + p * kBlock, -1.0f);
        multiply(grads_q, 1, Zero{}, Product<AsStored>{errors, g_transposed, value.blocks()});
        multiply(grads_k, 1, Zero{}, Product<AsStored>{errors, values_transposed, value.blocks()});
        row_dots(d_written, errors, value.size(), d_beta);
        for (int j = 0; j < kChunk; ++j) {
            Vec sum = {};
            for (int v = 0; v < kPanel; v += kLanes) {
                float *of_q = grads_q + j * kPanel + v, *of_k = grads_k + j * kPanel + v;
                const IntVec i = lane_numbers() + v;
                sum += load(overlaps + j * kPanel + v) * load(of_k);
                store(of_q, select(i >= j, load(of_q) * beta[j], Vec{}));
                store(of_k, select(i > j, load(of_k) * beta[j], Vec{}));
            }
            d_beta[j] += sum_lanes(sum);
        }
    }

    // What comes from the states: of q and k through the one that enters, of k through the one that leaves.
    void differentiate_reads(const KeptChunk &kept) {
        float *const scratch = rows.transposed;
        state_times(kept.state, g_transposed, scratch, d_queries);
        state_times(kept.state, values_transposed, scratch, d_keys);
        transpose(kept.errors, value.size(), values_transposed);
        weigh_columns(values_transposed, value.blocks(), beta);
        state_times(grad_state, values_transposed, scratch, k_out);
        key.weigh_later(d_queries);
        key.weigh_later(d_keys);
        key.weigh_earlier(k_out);
    }

    // What comes from pairs inside the chunk.
    void add_pairs() {
        if (key_gradient.wanted()) {
            float of_k[kChunk];
            scalar_gradient(scores, grads_q, key_gradient.inside_scalar);
            scalar_gradient(overlaps, grads_k, of_k);
            for (int t = 0; t < kChunk; ++t) key_gradient.inside_scalar[t] += of_k[t];
        }
        weigh_pairs(grads_q, key.weights().pair);
        weigh_pairs(grads_k, key.weights().pair);
        float both_ways[kBlock];
        transpose_block(grads_k, both_ways);
        add_block(both_ways, grads_k);
        for (int64_t p = 0; p < key.blocks(); ++p) {
            multiply(d_queries.panel(p), 1, Add{},
                     Product<Lower<Transposed>>{Transposed(Panels{grads_q, 0}), k.panel(p), 1});
            multiply(d_keys.panel(p), 1, Add{}, Product<Upper<AsStored>>{AsStored(Panels{grads_q, 0}), q.panel(p), 1});
            multiply(d_keys.panel(p), 1, Add{}, Product<AsStored>{Panels{both_ways, 0}, k.panel(p), 1});
        }
    }

    void add_channel_pairs() {
        float found[kBlock], gradient[kBlock];
        const bool wanted = key_gradient.wanted();
        for (int64_t p = 0; p < key.blocks(); ++p) {
            const float *factors = key.factors(p);
            float *const inside = wanted ? key_gradient.inside.panel(p) : nullptr;
            channel_mix(grads_q, k.panel(p), factors, found);
            add_block(d_queries.panel(p), found);
            channel_mix(grads_k, k.panel(p), factors, found);
            add_block(d_keys.panel(p), found);
            channel_mix_back(grads_q, q.panel(p), k.panel(p), factors, found, inside);
            add_block(d_keys.panel(p), found);
            channel_mix_back(grads_k, k.panel(p), k.panel(p), factors, found, wanted ? gradient : nullptr);
            add_block(d_keys.panel(p), found);
            if (wanted) add_block(inside, gradient);
        }
    }

    void store_gradients(int64_t t, int64_t count) {
        if (out.q.present()) {
            if (rows.normalizes) differentiate_normalization(q, rows.q_reciprocals, d_queries);
            unpack(d_queries, t, count, key.size(), out.q);
        }
        if (out.k.present()) {
            for (int64_t p = 0; p < key.blocks(); ++p) add_block(d_keys.panel(p), k_out.panel(p));
            if (rows.normalizes) differentiate_normalization(k, rows.k_reciprocals, d_keys);
            unpack(d_keys, t, count, key.size(), out.k);
        }
        if (out.v.present()) unpack(d_values, t, count, value.size(), out.v);
        if (out.beta.present()) scatter(d_beta, out.beta, t, count);
    }

    // From the gradient of unit rows to that of the rows they were.
    void differentiate_normalization(Panels unit, const float *reciprocals, Panels gradient) const {
        float along[kChunk];
        row_dots(unit, gradient, key.size(), along);
        for (int64_t p = 0; p < key.blocks(); ++p)
            for (int t = 0; t < kChunk; ++t) {
                const Row across = load_row(gradient.panel(p), t) + -along[t] * load_row(unit.panel(p), t);
                store_row(gradient.panel(p), t, reciprocals[t] * across);
            }
    }

    // Columns are tokens, of blocks one below the other.
    static void weigh_columns(float *block, int64_t blocks, const float *weights) {
        for (int64_t r = 0; r < blocks * kPanel; ++r)
            for (int v = 0; v < kPanel; v += kLanes)
                store(block + r * kPanel + v, load(block + r * kPanel + v) * load(weights + v));
    }

    Panels q, k, g;  // g is scale * do
    Panels earlier_k, minus_later_k, d_written, d_values, d_queries, d_keys, k_out;
    float *g_transposed, *values_transposed;
    float *scores, *grads_q, *grads_k;  // [j][i]: M, Wq and Wk
    float d_beta[kChunk];
    float scale;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
