// The worker of the delta rule: takes one head's state from chunk to chunk, and knows what each token corrects.
//
// With w_ij the decay from token j to token i of a chunk, S the state that enters and overlaps L_ij = w_ij k_i . k_j
// for j < i, the errors of a chunk's values are the solution Y of
//
//     Y_i = v_i - e^{b_i} S^T k_i - sum over j < i of L_ij beta_j Y_j
//
// and with what is written, U = beta Y, in place of V, the rest is linear attention. L depends on the chunk's inputs
// alone, and everything after it is local to a panel of the state.
//
// One decay for all channels of a token weighs what keys and queries make and what is written, so that heads that share
// q and k share these rows, their lengths and their products. A decay per channel weighs the rows themselves, in
// floats.
//
// In pairs, the state, U and rows that a decay has weighed are rounded once, where they become factors. Lengths of rows
// are then weights like those of a decay, but that a decay per channel weighs rows in floats, once they have length 1.
// L is float32, and Y is solved for in float32.
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

// A panel of the solution of a unit triangular system, [a][b] what row a takes away from row b: of later rows, or
// Upwards of earlier ones. Each row is what the rows before it leave, which later rows put right if it is off: with
// keys that are nearly alike and beta near 2, what a chunk writes is the difference of much larger numbers.
template <bool Upwards> FULMEN_INLINE void solve(const float *triangle, const float *from, float *to) {
    for (int v = 0; v < kPanel; v += kLanes) {
        Vec rows[kChunk];
#pragma GCC unroll 16
        for (int t = 0; t < kChunk; ++t) rows[t] = load(from + t * kPanel + v);
#pragma GCC unroll 16
        for (int step = 0; step < kChunk; ++step) {
            const int known = Upwards ? kChunk - 1 - step : step;
            store(to + known * kPanel + v, rows[known]);
#pragma GCC unroll 16
            for (int more = 1; more < kChunk - step; ++more) {
                const int t = Upwards ? known - more : known + more;
                rows[t] -= triangle[known * kPanel + t] * rows[known];
            }
        }
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

// The keys and queries of a chunk, and what they are multiplied with each other.
template <class Element> class DeltaRows {
public:
    DeltaRows(Arena &arena, const fulmen_delta_rule_problem &p) : DeltaRows(arena, p.attention, p.normalize_qk != 0) {}

    void load(const Head &in, int64_t t, int64_t count) const {
        load_keys(in, t, count);
        pair_keys();
        load_queries(in, t, count);
    }
    void load_keys(const Head &in, int64_t t, int64_t count) const { load(in.k.from(t, 0), count, k, k_reciprocals); }
    void pair_keys() const { pair(k, k_reciprocals, overlaps); }
    void load_queries(const Head &in, int64_t t, int64_t count) const {
        load(in.q.from(t, 0), count, q, q_reciprocals);
        pair(q, q_reciprocals, scores);
    }

    // What is left to apply of a row's length: nothing in floats, where rows have length 1.
    FULMEN_MEMBER float weight(const float *reciprocals, int t) const {
        return normalizes && !in_floats ? reciprocals[t] : 1;
    }

    const bool decay_by_channel, normalizes, in_floats;
    const Operand<Element> k, q;
    float *const k_reciprocals, *const q_reciprocals;
    float *const overlaps, *const scores;  // [j][i]: k_i . k_j and q_i . k_j, unless a decay per channel weighs them
    float *const transposed;               // one panel

private:
    DeltaRows(Arena &arena, const fulmen_problem &p, bool normalizes)
        : decay_by_channel(by_channel(p.decay_form)),
          normalizes(normalizes),
          in_floats(kNumbers<Element> == 1 || decay_by_channel),
          k(arena, kChunk, p.key_size, Use{!decay_by_channel, true, false, decay_by_channel}),
          q(arena, kChunk, p.key_size, Use{true, false, false, decay_by_channel}),
          k_reciprocals(arena.floats(kChunk)),
          q_reciprocals(arena.floats(kChunk)),
          overlaps(arena.floats(kBlock)),
          scores(arena.floats(kBlock)),
          transposed(arena.floats(padded(p.key_size) * kPanel)) {}

    void load(Rows rows, int64_t count, const Operand<Element> &to, float *reciprocals) const {
        to.load(rows, count);
        if (!normalizes) return;
        in_floats ? normalize_rows(to.in_floats(), to.size, reciprocals)
                  : row_reciprocals(rows, count, to.size, reciprocals);
    }

    void pair(const Operand<Element> &later, const float *reciprocals, float *products) const {
        if (decay_by_channel) return;
        transpose(later.over_channels(), elements<Element>(k.size), (Element *)transposed);
        multiply(products, 1, Zero{},
                 Product<AsStoredOf<Element>>{k.over_channels(), (Element *)transposed, padded(k.size) / kPanel});
        if (!normalizes || in_floats) return;
        for (int j = 0; j < kChunk; ++j)
            for (int v = 0; v < kPanel; v += kLanes) {
                float *x = products + j * kPanel + v;
                store(x, FULMEN_ISA::load(x) * k_reciprocals[j] * FULMEN_ISA::load(reciprocals + v));
            }
    }
};

// What a chunk writes, a panel of it: U, and U with the decay from each token to the state that leaves.
template <class Element> struct Written {
    Element own[kBlock], weighed[kBlock];
};

// Where it is computed: in place, or in `memory` before it is rounded.
FULMEN_INLINE Written<float> &floats_of(Written<float> &written, Written<float> &) { return written; }
FULMEN_INLINE Written<float> &floats_of(Written<Pair> &, Written<float> &memory) { return memory; }

template <class Element> class DeltaWorker : public ReadingWorker<Element> {
    typedef ReadingWorker<Element> Base;

protected:
    using Base::advance_panels, Base::factor, Base::in, Base::kInFloats, Base::prefetch_keys_and_values;

public:
    using Base::key, Base::state, Base::value;

    DeltaWorker(Arena &arena, const fulmen_problem &p, int64_t columns, const DeltaRows<Element> &rows)
        : Base(arena, p, columns, rows.k, Use{false, false, false, true}),
          rows(rows),
          v(Base::v.in_floats()),
          later_k(arena, rows.decay_by_channel ? kChunk : 0, p.key_size, Use{true, false, false, true}),
          overlaps(arena.floats(kBlock)),
          pulls(arena.floats(kBlock)),
          beta(arena.floats(kChunk)) {}

    void start(const Head &head, Rows betas) {
        Base::start(head);
        beta_rows = betas;
    }

    // The state alone, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        const int64_t count = smaller<int64_t>(kChunk, last - t);
        rows.load_keys(in, t, count);
        rows.pair_keys();
        load_corrections(t, count);
        weigh_keys();
        for (int64_t p = 0; p < value.blocks(); ++p) {
            prefetch_keys_and_values(t + kAhead, p);
            float errors[kBlock];
            Written<Element> written;
            correct(p, key.blocks(), errors, written);
            advance_panels(p, rows.k, PanelOf<Element>(written.weighed));
        }
    }

protected:
    void begin(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        gather(beta_rows, t, count, beta);
    }

    // Decays, beta, v and the overlaps, of a chunk whose keys are loaded.
    void load_corrections(int64_t t, int64_t count) {
        begin(t, count);
        pack(in.v, t, count, value.size(), v);
        weigh_products(rows.k, rows.overlaps, overlaps);
        for (int i = 0; i < kChunk; ++i) overlaps[i * kPanel + i] = 0;
        memcpy(pulls, overlaps, 4 * kBlock);
        weigh_rows(pulls, beta);
    }

    // pairs[j][i] = later_i . k_j with the decay between the two.
    void weigh_products(const Operand<Element> &later, const float *products, float *pairs) {
        if (key.by_channel())
            key.pair_products(later.in_floats(), rows.k.in_floats(), (const float *)nullptr, pairs);
        else
            weigh_pairs(products, key.weights().pair, pairs);
    }

    // A decay per channel: k becomes what goes into the state that leaves, and later_k reads the one that enters.
    void weigh_keys() {
        if (!key.by_channel()) return;
        const Panels later = later_k.in_floats();
        memcpy(later.data, rows.k.in_floats().data, 4 * (size_t)panels_size(kChunk, key.size()));
        key.weigh_later(later);
        later_k.round();
        Base::weigh_keys();
    }

    // Panel p of Y, and of U as a factor. The state's first depth blocks of rows count: all of them, or none of an
    // empty one.
    void correct(int64_t p, int64_t depth, float *errors, Written<Element> &written) {
        float recalled[kBlock];
        multiply(recalled, 1, Zero{},
                 Product<AsStoredOf<Element>>{(key.by_channel() ? later_k : rows.k).over_channels(), factor.panel(p),
                                              depth});
        for (int t = 0; t < kChunk; ++t) {
            const float weight = key.by_channel() ? 1 : key.weights().prefix[t] * rows.weight(rows.k_reciprocals, t);
            store_row(v.panel(p), t, load_row(v.panel(p), t) + -weight * load_row(recalled, t));
        }
        solve<false>(pulls, v.panel(p), errors);
        Written<float> in_floats, &u = floats_of(written, in_floats);
        for (int t = 0; t < kChunk; ++t) {
            const float weight = key.by_channel() ? 1 : key.weights().suffix[t] * rows.weight(rows.k_reciprocals, t);
            const Row row = beta[t] * load_row(errors, t);
            store_row(u.own, t, row);
            store_row(u.weighed, t, weight * row);
        }
        if constexpr (!kInFloats) {
            round_rows(u.own, kChunk, written.own);
            round_rows(u.weighed, kChunk, written.weighed);
        }
    }

    const DeltaRows<Element> rows;
    const Panels v;
    const Operand<Element> later_k;
    float *overlaps;  // [j][i], with the decay between the two, 0 for i <= j
    float *pulls;     // the same with beta_j: what an error takes away from later ones
    float *beta;
    Rows beta_rows = {};
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
