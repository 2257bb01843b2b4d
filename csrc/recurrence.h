// One token against one state: decay, update and read-out in a single sweep, which memory bandwidth bounds.
#pragma once

#include "arena.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

// One head's token in float32. Arrays are padded to whole vectors; padding may hold anything finite.
struct Token {
    const float *q, *k, *v;
    const float *key_factors;    // e^a, one per key channel
    const float *value_factors;  // e^c, one per value channel, or null
    float *o;                    // one per value channel
};

// A state with dense rows: s[d][e]. Whole rows, or eight cache lines of them, one row after the other: the order that
// hardware prefetchers follow. Their outputs stay in registers with AVX-512, else in L1. Of a single vector, only n
// columns may exist.
template <int Vecs, bool WithValueFactors, class T>
FULMEN_INLINE void sweep_columns_of_rows(T type, typename T::Stored *state, int64_t stride, int64_t d_count, int64_t e,
                                         int64_t n, const Token &x) {
    Vec o[Vecs] = {}, v[Vecs];
#pragma GCC unroll 32
    for (int c = 0; c < Vecs; ++c) v[c] = load(x.v + e + c * kLanes);
    for (int64_t d = 0; d < d_count; ++d) {
        typename T::Stored *row = state + d * stride + e;
        const Vec factor = broadcast(x.key_factors[d]), k = broadcast(x.k[d]), q = broadcast(x.q[d]);
#pragma GCC unroll 32
        for (int c = 0; c < Vecs; ++c) {
            Vec s = (Vecs == 1 ? load_some(type, row, n) : load_as(type, row + c * kLanes)) * factor;
            if constexpr (WithValueFactors) s *= load(x.value_factors + e + c * kLanes);
            s += v[c] * k;
            Vecs == 1 ? store_some(type, row, s, n) : store_as(type, row + c * kLanes, s);
            o[c] += s * q;
        }
    }
#pragma GCC unroll 32
    for (int c = 0; c < Vecs; ++c) store(x.o + e + c * kLanes, o[c]);
}

template <bool WithValueFactors, class T>
FULMEN_INLINE void sweep_all_rows(T type, typename T::Stored *state, int64_t stride, int64_t d_count, int64_t e_count,
                                  const Token &x) {
    constexpr int kTogether = 128 / kLanes;
    int64_t e = 0;
    for (; e + kTogether * kLanes <= e_count; e += kTogether * kLanes)
        sweep_columns_of_rows<kTogether, WithValueFactors>(type, state, stride, d_count, e, kLanes, x);
    for (; e < e_count; e += kLanes)
        sweep_columns_of_rows<1, WithValueFactors>(type, state, stride, d_count, e, e_count - e, x);
}

template <class T>
static inline void sweep_rows(T type, typename T::Stored *state, int64_t stride, int64_t d_count, int64_t e_count,
                              const Token &x) {
    x.value_factors ? sweep_all_rows<true>(type, state, stride, d_count, e_count, x)
                    : sweep_all_rows<false>(type, state, stride, d_count, e_count, x);
}

// A state with dense columns: s[e][d] in memory.
template <class T>
static inline void sweep_columns(T type, typename T::Stored *state, int64_t stride, int64_t d_count, int64_t e_count,
                                 const Token &x) {
    for (int64_t e = 0; e < e_count; ++e) {
        typename T::Stored *column = state + e * stride;
        const float v = x.v[e], factor = x.value_factors ? x.value_factors[e] : 1.0f;
        auto advanced = [&](int64_t d, Vec s) { return s * (load(x.key_factors + d) * factor) + load(x.k + d) * v; };
        Vec sum = {};
        int64_t d = 0;
        for (; d + kLanes <= d_count; d += kLanes) {
            const Vec s = advanced(d, load_as(type, column + d));
            store_as(type, column + d, s);
            sum += load(x.q + d) * s;
        }
        float o = sum_lanes(sum), rest[kLanes];
        if (d < d_count) {
            const Vec s = advanced(d, load_some(type, column + d, d_count - d));
            store_some(type, column + d, s, d_count - d);
            store(rest, s);
        }
        for (int64_t l = 0; d + l < d_count; ++l) o += x.q[d + l] * rest[l];
        x.o[e] = o;
    }
}

// A head's token in float32 buffers, from tensors of any dtype.
class TokenBuffer {
public:
    static constexpr int kArrays = 6;
    TokenBuffer(Arena &arena, int64_t key_size, int64_t value_size)
        : d_count(key_size),
          e_count(value_size),
          q(arena.floats(padded(key_size))),
          k(arena.floats(padded(key_size))),
          v(arena.floats(padded(value_size))),
          key_factors(arena.floats(padded(key_size))),
          value_factors(arena.floats(padded(value_size))),
          o(arena.floats(padded(value_size))) {}

    // decay and decay_v point at this token's values; a decay form of HEAD or TOKEN is one value.
    void load(const Head &head, int64_t t, int64_t decay_form, Rows log_decay, int64_t decay_v_form, float scale) {
        load_row(head.q, t, d_count, q);
        load_row(head.k, t, d_count, k);
        load_row(head.v, t, e_count, v);
        for (int64_t d = 0; d < d_count; ++d) q[d] *= scale;
        if (by_channel(decay_form)) {
            load_row(log_decay, 0, d_count, key_factors);
            exp_in_place(key_factors, d_count);
        } else {
            float one[kPanel] = {};
            if (decays(decay_form)) load_row(log_decay, 0, 1, one);
            exp_in_place(one, 1);
            for (int64_t d = 0; d < d_count; ++d) key_factors[d] = one[0];
        }
        if (decays(decay_v_form)) {
            load_row(head.log_decay_v, t, e_count, value_factors);
            exp_in_place(value_factors, e_count);
        }
        token = {q, k, v, key_factors, decays(decay_v_form) ? value_factors : nullptr, o};
    }

    template <class T> void sweep_rows(T type, typename T::Stored *state, int64_t stride) const {
        FULMEN_ISA::sweep_rows(type, state, stride, d_count, e_count, token);
    }
    template <class T> void sweep_columns(T type, typename T::Stored *state, int64_t stride) const {
        FULMEN_ISA::sweep_columns(type, state, stride, d_count, e_count, token);
    }

    bool grows() const { return grows_; }  // whether a log-decay was above 0

    void store_output(Rows output, int64_t t) const {
        with_type(output.dtype, [&](auto type) {
            store_channels(type, o, e_count, (typename decltype(type)::Stored *)output.row(t));
        });
    }

protected:
    static void load_row(Rows rows, int64_t t, int64_t n, float *to) {
        with_type(rows.dtype,
                  [&](auto type) { load_channels(type, (const typename decltype(type)::Stored *)rows.row(t), n, to); });
    }
    void exp_in_place(float *x, int64_t n) {
        IntVec positive = {};
        for (int64_t f = 0; f < n; f += kLanes) {
            const Vec log_factor = FULMEN_ISA::load(x + f);
            positive |= log_factor > Vec{};
            store(x + f, exp(log_factor));
        }
        grows_ |= any(positive);
    }

    int64_t d_count, e_count;
    float *q, *k, *v, *key_factors, *value_factors, *o;
    Token token = {};
    bool grows_ = false;
};

// Decoding: one token for every head, whose state is updated in place. load(buffer, head, log_decay, batch, h) fills a
// buffer.
template <class Buffer, class Load> int64_t step_heads(const fulmen_step_call &call, Load load) {
    // A thread is worth waking for some 64 KiB of state.
    const int64_t heads = call.batch * call.heads, cells = call.key_size * call.value_size;
    const int64_t threads = smaller(call.header.threads, 1 + heads * cells / 16384);
    Notice grows;
    parallel_for_in_place(threads, heads, [&](int64_t index) {
        const int64_t batch = index / call.heads, h = index % call.heads;
        Head head;
        head.q = rows_of(call.q, batch, h / (call.heads / call.query_heads));
        head.k = rows_of(call.k, batch, h / (call.heads / call.key_heads));
        head.v = rows_of(call.v, batch, h / (call.heads / call.value_heads));
        head.log_decay_v = rows_of(call.log_decay_v, batch, h);

        alignas(64) float memory[Buffer::kArrays * FULMEN_MAX_SIZE];
        Arena arena(memory);
        Buffer buffer(arena, call.key_size, call.value_size);
        load(buffer, head, rows_of(call.log_decay, batch, h), batch, h);
        const fulmen_state &s = call.state;
        with_type(s.dtype, [&](auto type) {
            auto *state = (typename decltype(type)::Stored *)s.data + batch * s.stride_batch + h * s.stride_head;
            if (s.stride_column == 1)
                buffer.sweep_rows(type, state, s.stride_row);
            else
                buffer.sweep_columns(type, state, s.stride_column);
        });
        buffer.store_output(rows_of(call.output, batch, h), 0);
        grows |= buffer.grows();
    });
    return grows ? FULMEN_GROWS : FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
