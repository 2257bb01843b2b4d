// One token against one state: decay, update and read-out in a single sweep, which memory bandwidth bounds.
#pragma once

#include "chunk.h"

namespace fulmen {
namespace FULMEN_ISA {

// One head's token in float32. Arrays are padded to whole vectors; padding may hold anything finite.
struct Token {
    const float *q, *k, *v;
    const float *key_factors;    // e^a, one per key feature
    const float *value_factors;  // e^c, one per value feature, or null
    float *o;                    // one per value feature
};

// Lines of a state that one pass updates together, so that what they have in common is loaded once.
constexpr int kTogether = 4;
constexpr int kRowsAhead = 2 * kTogether;  // how far to prefetch
constexpr int kLine = 16;                  // floats in a cache line

// Rows d to d + Rows of a state with dense rows: s[d][e].
template <int Rows, bool WithValueFactors>
FULMEN_INLINE void sweep_rows_together(float *row, int64_t stride, int64_t d, int64_t e_count, const Token &x) {
    Vec factor[Rows], k[Rows], q[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
        factor[r] = broadcast(x.key_factors[d + r]);
        k[r] = broadcast(x.k[d + r]);
        q[r] = broadcast(x.q[d + r]);
    }
    auto update = [&](int64_t e) {
        const Vec v = load(x.v + e);
        Vec o = load(x.o + e);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            Vec s = load(row + r * stride + e) * factor[r];
            if constexpr (WithValueFactors) s *= load(x.value_factors + e);
            s += v * k[r];
            store(row + r * stride + e, s);
            o += s * q[r];
        }
        store(x.o + e, o);
    };
    int64_t e = 0;
    for (; e + kLine <= e_count; e += kLine) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) __builtin_prefetch(row + (r + kRowsAhead) * stride + e, 1, 3);
#pragma GCC unroll 4
        for (int v = 0; v < kLine; v += kLanes) update(e + v);
    }
    for (; e + kLanes <= e_count; e += kLanes) update(e);
    for (; e < e_count; ++e)
        for (int r = 0; r < Rows; ++r) {
            float &s = row[r * stride + e];
            s *= x.key_factors[d + r];
            if constexpr (WithValueFactors) s *= x.value_factors[e];
            s += x.k[d + r] * x.v[e];
            x.o[e] += x.q[d + r] * s;
        }
}

template <bool WithValueFactors>
FULMEN_INLINE void sweep_all_rows(float *state, int64_t stride, int64_t d_count, int64_t e_count, const Token &x) {
    for (int64_t e = 0; e < e_count; ++e) x.o[e] = 0;
    int64_t d = 0;
    for (; d + kTogether <= d_count; d += kTogether)
        sweep_rows_together<kTogether, WithValueFactors>(state + d * stride, stride, d, e_count, x);
    for (; d < d_count; ++d) sweep_rows_together<1, WithValueFactors>(state + d * stride, stride, d, e_count, x);
}

static inline void sweep_rows(float *state, int64_t stride, int64_t d_count, int64_t e_count, const Token &x) {
    x.value_factors ? sweep_all_rows<true>(state, stride, d_count, e_count, x)
                    : sweep_all_rows<false>(state, stride, d_count, e_count, x);
}

// Columns e to e + Columns of a state with dense columns: s[e][d] in memory.
template <int Columns>
FULMEN_INLINE void sweep_columns_together(float *column, int64_t stride, int64_t d_count, int64_t e, const Token &x) {
    Vec factor[Columns], v[Columns], sum[Columns];
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c) {
        factor[c] = broadcast(x.value_factors ? x.value_factors[e + c] : 1.0f);
        v[c] = broadcast(x.v[e + c]);
        sum[c] = Vec{};
    }
    auto update = [&](int64_t d) {
        const Vec key_factor = load(x.key_factors + d), k = load(x.k + d), q = load(x.q + d);
#pragma GCC unroll 4
        for (int c = 0; c < Columns; ++c) {
            const Vec s = load(column + c * stride + d) * (key_factor * factor[c]) + k * v[c];
            store(column + c * stride + d, s);
            sum[c] += q * s;
        }
    };
    int64_t d = 0;
    for (; d + kLine <= d_count; d += kLine) {
#pragma GCC unroll 4
        for (int c = 0; c < Columns; ++c) __builtin_prefetch(column + (c + kRowsAhead) * stride + d, 1, 3);
#pragma GCC unroll 4
        for (int f = 0; f < kLine; f += kLanes) update(d + f);
    }
    for (; d + kLanes <= d_count; d += kLanes) update(d);
#pragma GCC unroll 4
    for (int c = 0; c < Columns; ++c) {
        float o = sum_lanes(sum[c]);
        for (int64_t rest = d; rest < d_count; ++rest) {
            float &s = column[c * stride + rest];
            s = s * (x.key_factors[rest] * (x.value_factors ? x.value_factors[e + c] : 1.0f)) + x.k[rest] * x.v[e + c];
            o += x.q[rest] * s;
        }
        x.o[e + c] = o;
    }
}

static inline void sweep_columns(float *state, int64_t stride, int64_t d_count, int64_t e_count, const Token &x) {
    int64_t e = 0;
    for (; e + kTogether <= e_count; e += kTogether)
        sweep_columns_together<kTogether>(state + e * stride, stride, d_count, e, x);
    for (; e < e_count; ++e) sweep_columns_together<1>(state + e * stride, stride, d_count, e, x);
}

// A head's token in float32 buffers, from tensors of any dtype.
class TokenBuffer {
public:
    TokenBuffer(Arena &arena, int64_t key_features, int64_t value_features)
        : d_count(key_features),
          e_count(value_features),
          q(arena.floats(padded(key_features))),
          k(arena.floats(padded(key_features))),
          v(arena.floats(padded(value_features))),
          key_factors(arena.floats(padded(key_features))),
          value_factors(arena.floats(padded(value_features))),
          o(arena.floats(padded(value_features))) {}

    // decay and decay_v point at this token's values; a decay form of HEAD or TOKEN is one value.
    Token load(const Head &head, int64_t t, int64_t decay_form, Rows decay, int64_t decay_v_form, float scale) {
        load_row(head.q, t, d_count, q);
        load_row(head.k, t, d_count, k);
        load_row(head.v, t, e_count, v);
        for (int64_t d = 0; d < d_count; ++d) q[d] *= scale;
        if (decay_form == FULMEN_DECAY_FEATURE) {
            load_row(decay, 0, d_count, key_factors);
            exp_in_place(key_factors, d_count);
        } else {
            float one[kPanel] = {};
            if (decay_form != FULMEN_DECAY_NONE) load_row(decay, 0, 1, one);
            exp_in_place(one, 1);
            for (int64_t d = 0; d < d_count; ++d) key_factors[d] = one[0];
        }
        if (decay_v_form != FULMEN_DECAY_NONE) {
            load_row(head.decay_v, t, e_count, value_factors);
            exp_in_place(value_factors, e_count);
        }
        return {q, k, v, key_factors, decay_v_form != FULMEN_DECAY_NONE ? value_factors : nullptr, o};
    }

    void store_output(Rows output, int64_t t) const {
        with_type(output.dtype, [&](auto type) {
            store_features(type, o, e_count, (typename decltype(type)::Stored *)output.row(t));
        });
    }

private:
    static void load_row(Rows rows, int64_t t, int64_t n, float *to) {
        with_type(rows.dtype, [&](auto type) {
            load_features(type, (const typename decltype(type)::Stored *)rows.row(t), n, to);
        });
    }
    static void exp_in_place(float *x, int64_t n) {
        for (int64_t f = 0; f < n; f += kLanes) store(x + f, exp(FULMEN_ISA::load(x + f)));
    }

    int64_t d_count, e_count;
    float *q, *k, *v, *key_factors, *value_factors, *o;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
