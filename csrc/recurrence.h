// One token against one state: decay, update and read-out in a single sweep, which memory bandwidth bounds.
#pragma once

#include <type_traits>

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

// A state with dense rows: s[d][e].
static inline void sweep_rows(float *state, int64_t stride, int64_t d_count, int64_t e_count, const Token &x) {
    constexpr int kTogether = 4;  // rows that share one pass over v and o
    for (int64_t e = 0; e < e_count; ++e) x.o[e] = 0;
    for (int64_t d = 0; d < d_count; d += kTogether) {
        const int rows = (int)smaller<int64_t>(kTogether, d_count - d);
        float *row = state + d * stride;
        int64_t e = 0;
        auto sweep = [&](auto fixed_rows, auto with_value_factors) {
            constexpr int n = decltype(fixed_rows)::value;
            for (; e + kLanes <= e_count; e += kLanes) {
                const Vec v = load(x.v + e);
                Vec o = load(x.o + e);
                Vec factor = broadcast(1.0f);
                if constexpr (decltype(with_value_factors)::value) factor = load(x.value_factors + e);
#pragma GCC unroll 4
                for (int r = 0; r < n; ++r) {
                    Vec s = load(row + r * stride + e) * x.key_factors[d + r];
                    if constexpr (decltype(with_value_factors)::value) s *= factor;
                    s += v * x.k[d + r];
                    store(row + r * stride + e, s);
                    o += s * x.q[d + r];
                }
                store(x.o + e, o);
            }
        };
        if (rows == kTogether) {
            std::integral_constant<int, kTogether> all;
            x.value_factors ? sweep(all, std::true_type()) : sweep(all, std::false_type());
        }
        for (int64_t rest = e; rest < e_count; ++rest)
            for (int r = 0; r < rows; ++r) {
                float &s = row[r * stride + rest];
                const float factor = x.key_factors[d + r] * (x.value_factors ? x.value_factors[rest] : 1.0f);
                s = s * factor + x.k[d + r] * x.v[rest];
                x.o[rest] += x.q[d + r] * s;
            }
    }
}

// A state with dense columns: s[e][d] in memory.
static inline void sweep_columns(float *state, int64_t stride, int64_t d_count, int64_t e_count, const Token &x) {
    for (int64_t e = 0; e < e_count; ++e) {
        float *column = state + e * stride;
        const float v = x.v[e], factor = x.value_factors ? x.value_factors[e] : 1.0f;
        Vec sum = {};
        int64_t d = 0;
        for (; d + kLanes <= d_count; d += kLanes) {
            const Vec s = load(column + d) * (load(x.key_factors + d) * factor) + load(x.k + d) * v;
            store(column + d, s);
            sum += load(x.q + d) * s;
        }
        float o = sum_lanes(sum);
        for (; d < d_count; ++d) {
            column[d] = column[d] * (x.key_factors[d] * factor) + x.k[d] * v;
            o += x.q[d] * column[d];
        }
        x.o[e] = o;
    }
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
