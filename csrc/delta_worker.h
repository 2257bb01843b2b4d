// The worker of the delta rule: takes one head's state from chunk to chunk, and knows what each token corrects.
//
// With w_ij the decay from token j to token i of a chunk, S the state that enters and overlaps L_ij = w_ij k_i . k_j
// for j < i, the errors of a chunk's values are the solution Y of
//
//     Y_i = v_i - e^{b_i} S^T k_i - sum over j < i of L_ij beta_j Y_j       so  Y = X (V - later(k) S)
//     X   = (I + L diag(beta))^-1                                           unit lower triangular
//
// and with what is written, U = beta Y, in place of V, the rest is linear attention. X depends on the chunk's inputs
// alone, and everything after it is local to a panel of the state.
#pragma once

#include "state_worker.h"

namespace fulmen {
namespace FULMEN_ISA {

// Rows over their lengths; reciprocals are one over these.
static inline void normalize_rows(Panels x, int64_t size, float *reciprocals) {
    row_dots(x, x, size, reciprocals);
    for (int t = 0; t < kChunk; ++t) reciprocals[t] = 1.0f / sqrtf(reciprocals[t] + FULMEN_EPSILON);
    for (int64_t p = 0; p * kPanel < size; ++p) weigh_rows(x.panel(p), reciprocals);
}

// Row i of the inverse is e_i - sum over j < i of L_ij beta_j (row j): forward substitution, the form that keeps its
// digits where keys are nearly alike. overlaps are [j][i], inverse is [i][j].
static inline void invert(const float *overlaps, const float *beta, float *inverse) {
    for (int i = 0; i < kChunk; ++i) {
        Row row;
        for (int v = 0; v < kVecs; ++v) row.x[v] = select(lane_numbers() + v * kLanes == i, broadcast(1.0f), Vec{});
        for (int j = 0; j < i; ++j) row = row + -(overlaps[j * kPanel + i] * beta[j]) * load_row(inverse, j);
        store_row(inverse, i, row);
    }
}

class DeltaWorker : public StateWorker<float> {
public:
    DeltaWorker(Arena &arena, const fulmen_delta_rule_problem &p, int64_t columns)
        : StateWorker<float>(arena, p.attention, columns),
          k(StateWorker<float>::k.in_floats()),
          v(StateWorker<float>::v.in_floats()),
          minus_later_k(arena.panels(kChunk, p.attention.key_size)),
          transposed(arena.floats(padded(p.attention.key_size) * kPanel)),
          overlaps(arena.floats(kBlock)),
          inverse(arena.floats(kBlock)),
          beta(arena.floats(kChunk)),
          k_reciprocals(arena.floats(kChunk)),
          normalizes(p.normalize_qk != 0) {}

    void start(const Head &head, Rows betas) {
        StateWorker<float>::start(head);
        beta_rows = betas;
    }

    // The state alone, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        load_corrections(t, smaller<int64_t>(kChunk, last - t));
        weigh_keys();
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_keys_and_values(t + kAhead, p);
            float errors[kBlock], written[kBlock];
            correct(p, key.blocks(), errors, written);
            advance_panel(p, written);
        }
    }

protected:
    // Decays, k and beta of a chunk.
    void load_keys(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        pack(in.k, t, count, key.size(), k);
        gather(beta_rows, t, count, beta);
        if (normalizes) normalize_rows(k, key.size(), k_reciprocals);
    }

    // Also v, the overlaps and their inverse.
    void load_corrections(int64_t t, int64_t count) {
        load_keys(t, count);
        pack(in.v, t, count, value.size(), v);
        if (!key.by_channel()) transpose(k, key.size(), transposed);
        key.pair_products(k, k, transposed, overlaps);
        for (int i = 0; i < kChunk; ++i) overlaps[i * kPanel + i] = 0;
        invert(overlaps, beta, inverse);
    }

    // k becomes what goes into the state that leaves; minus_later_k reads the one that enters.
    void weigh_keys() {
        copy_later_keys();
        key.weigh_earlier(k);
    }
    void copy_later_keys() {
        for (int64_t p = 0; p < key.blocks(); ++p)
            for (int x = 0; x < kBlock; x += kLanes) store(minus_later_k.panel(p) + x, -load(k.panel(p) + x));
        key.weigh_later(minus_later_k);
    }

    // Panel p of Y and of U. The state's first depth blocks of rows count: all of them, or none of an empty one.
    void correct(int64_t p, int64_t depth, float *errors, float *written) {
        multiply(v.panel(p), 1, Add{}, Product<AsStored>{minus_later_k, state.panel(p), depth});
        multiply(errors, 1, Zero{}, Product<AsStored>{Panels{inverse, 0}, v.panel(p), 1});
        for (int t = 0; t < kChunk; ++t) store_row(written, t, beta[t] * load_row(errors, t));
    }

    // S = e^{b_C} S + earlier(k)^T U, panel p of S and U; k was weighed.
    void advance_panel(int64_t p, const float *written) {
        multiply(state.panel(p), key.blocks(), decayed(key, value, p), Product<Transposed>{k, written, 1});
    }

    Panels k, v, minus_later_k;
    float *transposed;  // keys or queries, one panel
    float *overlaps;    // [j][i], 0 for i <= j
    float *inverse;     // [i][j]
    float *beta, *k_reciprocals;
    bool normalizes;
    Rows beta_rows = {};
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
