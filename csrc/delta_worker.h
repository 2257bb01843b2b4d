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
//
// In pairs, the state, U and rows that a decay has weighed are rounded once, where they become factors. Lengths of rows
// are then weights like those of a decay, but that a decay per channel weighs rows in floats, once they have length 1.
// X is float32, and so is its product.
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

// One over the lengths of rows in the caller's memory, and of nothing after them.
static inline void row_reciprocals(Rows rows, int64_t count, int64_t size, float *reciprocals) {
    with_type(rows.dtype, [&](auto type) {
        typedef typename decltype(type)::Stored Stored;
        for (int64_t t = 0; t < kChunk; ++t) {
            Vec sum = {};
            for (int64_t f = 0; f < size && t < count; f += kLanes) {
                const Vec x = load_some(type, (const Stored *)rows.row(t) + f, size - f);
                sum += x * x;
            }
            reciprocals[t] = 1.0f / sqrtf(sum_lanes(sum) + FULMEN_EPSILON);
        }
    });
}

// pairs[j][i] times a weight of j and one of i; what was forgotten stays so, even of a row whose length is NaN.
static inline void weigh_rows_and_columns(float *pairs, const float *rows, const float *columns) {
    for (int j = 0; j < kChunk; ++j)
        for (int v = 0; v < kPanel; v += kLanes) {
            float *x = pairs + j * kPanel + v;
            store(x, select(load(x) == Vec{}, Vec{}, load(x) * rows[j] * load(columns + v)));
        }
}

template <class Element> class DeltaWorker : public StateWorker<Element> {
    typedef StateWorker<Element> Base;

protected:
    using Base::in, Base::kInFloats, Base::prefetch_keys_and_values, Base::prefetch_share, Base::weighs_in_floats;

public:
    using Base::key, Base::state, Base::value;

    DeltaWorker(Arena &arena, const fulmen_delta_rule_problem &p, int64_t columns)
        : Base(arena, p.attention, columns,
               Base::advancing_keys(p.attention, Use{!by_channel(p.attention.decay_form), false, p.normalize_qk != 0}),
               Use{false, false, false, true}),
          keys(Base::k),
          k(keys.in_floats()),
          v(Base::v.in_floats()),
          minus_later_k(arena, weighs_in_floats() ? kChunk : 0, p.attention.key_size, Use{true, false, false, true}),
          factor(kInFloats ? PanelsOf<Pair>{} : arena.panels<Pair>(elements<Pair>(p.attention.key_size), columns)),
          transposed(arena.floats(padded(p.attention.key_size) * kPanel)),
          overlaps(arena.floats(kBlock)),
          inverse(arena.floats(kBlock)),
          beta(arena.floats(kChunk)),
          k_reciprocals(arena.floats(kChunk)),
          normalizes(p.normalize_qk != 0) {}

    void start(const Head &head, Rows betas) {
        Base::start(head);
        beta_rows = betas;
    }

    // The state alone, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        load_corrections(t, smaller<int64_t>(kChunk, last - t));
        weigh_keys();
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_keys_and_values(t + kAhead, p);
            float errors[kBlock];
            Element written[kBlock];
            correct(p, key.blocks(), errors, written);
            advance_panel(p, written);
        }
    }

protected:
    // Decays, k and beta of a chunk.
    void load_keys(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        gather(beta_rows, t, count, beta);
        load_rows(keys, in.k.from(t, 0), count, key.weights().suffix, k_reciprocals);
    }

    // Rows of q or k: in floats of length 1 where they are normalized; else their reciprocals are to be applied, and
    // are in the weights.
    void load_rows(const Operand<Element> &to, Rows rows, int64_t count, const float *weights, float *reciprocals) {
        if (weighs_in_floats()) {
            to.load(rows, count);
            if (normalizes) normalize_rows(to.in_floats(), to.size, reciprocals);
            return;
        }
        float both[kChunk];
        if (normalizes) row_reciprocals(rows, count, to.size, reciprocals);
        for (int t = 0; t < kChunk; ++t) {
            if (!normalizes) reciprocals[t] = 1;
            both[t] = weights[t] * reciprocals[t];
        }
        to.load(rows, count, both);
    }

    // pairs[j][i] = later_i . k_j with the decay between the two.
    void pair_with_keys(const Operand<Element> &later, const float *reciprocals, float *pairs) {
        if (weighs_in_floats()) {
            if (!key.by_channel()) transpose(later.in_floats(), key.size(), transposed);
            key.pair_products(later.in_floats(), k, transposed, pairs);
        } else {
            transpose(later.over_channels(), elements<Element>(key.size()), (Element *)transposed);
            key.pair_products(later.over_channels(), keys.over_channels(), (Element *)transposed, pairs);
            if (normalizes) weigh_rows_and_columns(pairs, k_reciprocals, reciprocals);
        }
    }

    // Also v, the overlaps and their inverse.
    void load_corrections(int64_t t, int64_t count) {
        load_keys(t, count);
        pack(in.v, t, count, value.size(), v);
        pair_with_keys(keys, k_reciprocals, overlaps);
        for (int i = 0; i < kChunk; ++i) overlaps[i * kPanel + i] = 0;
        invert(overlaps, beta, inverse);
    }

    // k becomes what goes into the state that leaves; minus_later_k reads the one that enters.
    void weigh_keys() {
        if (weighs_in_floats()) copy_later_keys();
        Base::weigh_keys();
    }
    void copy_later_keys() {
        const Panels later = minus_later_k.in_floats();
        for (int64_t p = 0; p < key.blocks(); ++p)
            for (int x = 0; x < kBlock; x += kLanes) store(later.panel(p) + x, -load(k.panel(p) + x));
        key.weigh_later(later);
        minus_later_k.round();
    }

    // Panel p of Y, and of U as a factor. The state's first depth blocks of rows count: all of them, or none of an
    // empty one.
    void correct(int64_t p, int64_t depth, float *errors, Element *written) {
        if constexpr (kInFloats)
            multiply(v.panel(p), 1, Add{}, Product<AsStored>{minus_later_k.in_floats(), state.panel(p), depth});
        else
            subtract_recalled(p, depth);
        multiply(errors, 1, Zero{}, Product<AsStored>{Panels{inverse, 0}, v.panel(p), 1});
        float in_floats[kBlock];
        float *const u = kInFloats ? (float *)written : in_floats;
        for (int t = 0; t < kChunk; ++t) store_row(u, t, beta[t] * load_row(errors, t));
        if constexpr (!kInFloats) round_rows(u, kChunk, written);
    }

    // In pairs: what the state says of the values.
    void subtract_recalled(int64_t p, int64_t depth) {
        const bool weighed = weighs_in_floats();
        float recalled[kBlock];
        multiply(
            recalled, 1, Zero{},
            Product<AsStoredOf<Element>>{(weighed ? minus_later_k : keys).over_channels(), factor.panel(p), depth});
        for (int t = 0; t < kChunk; ++t) {
            const float weight = weighed ? 1 : -key.weights().prefix[t] * k_reciprocals[t];
            store_row(v.panel(p), t, load_row(v.panel(p), t) + weight * load_row(recalled, t));
        }
    }

    // S = e^{b_C} S + earlier(k)^T U, panel p of S and U; k was weighed.
    void advance_panel(int64_t p, const Element *written) {
        if constexpr (kInFloats)
            Base::advance_panel(p, decayed(key, value, p), keys, written);
        else
            Base::advance_panel(p, ScaleAndRound{decayed(key, value, p), factor.panel(p)}, keys, written);
    }

    // In pairs, the state as a factor, before a walk's first chunk.
    void round_state() {
        for (int64_t p = 0; p < value.blocks(); ++p) round_rows(state.panel(p), key.blocks() * kPanel, factor.panel(p));
    }

    const Operand<Element> &keys;
    const Panels k, v;  // in floats; k if it is weighed in floats
    Operand<Element> minus_later_k;
    PanelsOf<Pair> factor;  // the state, rounded
    float *transposed;      // keys or queries, one panel
    float *overlaps;        // [j][i], 0 for i <= j
    float *inverse;         // [i][j]
    float *beta, *k_reciprocals;
    bool normalizes;
    Rows beta_rows = {};
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
