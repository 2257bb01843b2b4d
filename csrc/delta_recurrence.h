// One token of the delta rule against one state: what the state says of its value is read first, then the correction
// is written as linear attention writes a value.
#pragma once

#include <math.h>

#include "recurrence.h"

namespace fulmen {
namespace FULMEN_ISA {

// What a token reads of the state that enters and what it writes. Arrays are padded to whole vectors.
struct Correction {
    const float *decayed_q, *decayed_k;  // e^a q, e^a k
    const float *key_factors, *k;
    float *recalled, *o;  // e^a S^T k and e^a S^T q
    float *written;       // u
};

// While rows are read, later ones are fetched: sums in between keep hardware prefetchers from running ahead.
constexpr int kRowsAhead = 8;
template <class Stored>
FULMEN_INLINE void prefetch_rows(const Stored *state, int64_t stride, int rows, int64_t e_count) {
    for (int r = 0; r < rows; ++r)
        for (int64_t e = 0; e < e_count; e += 64 / (int64_t)sizeof(Stored)) __builtin_prefetch(state + r * stride + e);
}

// Adds what rows [d, d + Rows) of a state with dense rows give to either sum.
template <int Rows, class T>
FULMEN_INLINE void read_rows(T type, const typename T::Stored *state, int64_t stride, int64_t d, int64_t e_count,
                             const Correction x) {
    Vec q[Rows], k[Rows];
    for (int r = 0; r < Rows; ++r) {
        q[r] = broadcast(x.decayed_q[d + r]);
        k[r] = broadcast(x.decayed_k[d + r]);
    }
    auto read = [=](int64_t e, auto load_state) {
        Vec recalled = load(x.recalled + e), o = load(x.o + e);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            const Vec s = load_state(state + (d + r) * stride + e);
            recalled += k[r] * s;
            o += q[r] * s;
        }
        store(x.recalled + e, recalled);
        store(x.o + e, o);
    };
    prefetch_rows(state + (d + kRowsAhead) * stride, stride, Rows, e_count);
    int64_t e = 0;
    for (; e + kLanes <= e_count; e += kLanes) read(e, [&](const auto *at) { return load_as(type, at); });
    if (e < e_count) read(e, [&](const auto *at) { return load_some(type, at, e_count - e); });
}

// Rows [d, d + Rows) of the state that leaves.
template <int Rows, class T>
FULMEN_INLINE void write_rows(T type, typename T::Stored *state, int64_t stride, int64_t d, int64_t e_count,
                              const Correction x) {
    Vec factors[Rows], k[Rows];
    for (int r = 0; r < Rows; ++r) {
        factors[r] = broadcast(x.key_factors[d + r]);
        k[r] = broadcast(x.k[d + r]);
    }
    auto advanced = [&](int r, int64_t e, Vec s) { return s * factors[r] + load(x.written + e) * k[r]; };
    int64_t e = 0;
    for (; e + kLanes <= e_count; e += kLanes)
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            auto *at = state + (d + r) * stride + e;
            store_as(type, at, advanced(r, e, load_as(type, at)));
        }
    for (int r = 0; r < Rows && e < e_count; ++r) {
        auto *at = state + (d + r) * stride + e;
        store_some(type, at, advanced(r, e, load_some(type, at, e_count - e)), e_count - e);
    }
}

// Loads a token, then sweeps a state with it.
class DeltaTokenBuffer : public TokenBuffer {
public:
    static constexpr int kArrays = TokenBuffer::kArrays + 3;
    DeltaTokenBuffer(Arena &arena, int64_t key_size, int64_t value_size)
        : TokenBuffer(arena, key_size, value_size),
          decayed_q(arena.floats(padded(key_size))),
          decayed_k(arena.floats(padded(key_size))),
          recalled(arena.floats(padded(value_size))) {}

    // log_decay points at this token's values.
    void load(const Head &head, Rows betas, int64_t t, int64_t decay_form, Rows log_decay, bool normalizes,
              float scale) {
        TokenBuffer::load(head, t, decay_form, log_decay, FULMEN_DECAY_NONE, normalizes ? 1.0f : scale);
        float one[kPanel];
        gather(betas, t, 1, one);
        beta = one[0];
        if (normalizes) {
            normalize(q, scale);
            normalize(k, 1.0f);
        }
        Vec products = {};  // q and k are padded with zeros
        for (int64_t d = 0; d < d_count; d += kLanes) {
            const Vec of_q = FULMEN_ISA::load(q + d), of_k = FULMEN_ISA::load(k + d);
            const Vec factors =
                select(lane_numbers() + (int32_t)d < (int32_t)d_count, FULMEN_ISA::load(key_factors + d), Vec{});
            products += of_q * of_k;
            store(decayed_q + d, of_q * factors);
            store(decayed_k + d, of_k * factors);
        }
        overlap = sum_lanes(products);
    }

    // Reads all rows before it writes any. Four at a time, so that sums are loaded and stored once for all of them; and
    // backwards the second time, as the last ones are still in L1.
    template <class T> void sweep_rows(T type, typename T::Stored *state, int64_t stride) {
        constexpr int kTogether = 4;
        const Correction x = {decayed_q, decayed_k, key_factors, k, recalled, o, v};
        for (int64_t e = 0; e < padded(e_count); ++e) recalled[e] = o[e] = 0;
        const int64_t whole = d_count / kTogether * kTogether;
        for (int64_t d = 0; d < whole; d += kTogether) read_rows<kTogether>(type, state, stride, d, e_count, x);
        for (int64_t d = whole; d < d_count; ++d) read_rows<1>(type, state, stride, d, e_count, x);
        for (int64_t e = 0; e < e_count; ++e) correct(e);
        for (int64_t d = d_count - 1; d >= whole; --d) write_rows<1>(type, state, stride, d, e_count, x);
        for (int64_t d = whole - kTogether; d >= 0; d -= kTogether)
            write_rows<kTogether>(type, state, stride, d, e_count, x);
    }

    // A state with dense columns, s[e][d] in memory: each is read and written while it is in L1.
    template <class T> void sweep_columns(T type, typename T::Stored *state, int64_t stride) {
        for (int64_t e = 0; e < e_count; ++e) {
            typename T::Stored *column = state + e * stride;
            Vec to_recalled = {}, to_o = {};
            for (int64_t d = 0; d < d_count; d += kLanes) {
                const Vec s = load_some(type, column + d, d_count - d);
                to_recalled += FULMEN_ISA::load(decayed_k + d) * s;
                to_o += FULMEN_ISA::load(decayed_q + d) * s;
            }
            recalled[e] = sum_lanes(to_recalled);
            o[e] = sum_lanes(to_o);
            correct(e);
            for (int64_t d = 0; d < d_count; d += kLanes) {
                const Vec s = load_some(type, column + d, d_count - d) * FULMEN_ISA::load(key_factors + d) +
                              FULMEN_ISA::load(k + d) * v[e];
                store_some(type, column + d, s, d_count - d);
            }
        }
    }

private:
    void normalize(float *x, float scale) const {
        Vec squares = {};  // the rest of the last vector is 0
        for (int64_t d = 0; d < d_count; d += kLanes) squares += FULMEN_ISA::load(x + d) * FULMEN_ISA::load(x + d);
        const float factor = scale / sqrtf(sum_lanes(squares) + FULMEN_EPSILON);
        for (int64_t d = 0; d < d_count; ++d) x[d] *= factor;
    }

    // The value becomes what is written, and the output that of the state that leaves.
    FULMEN_MEMBER void correct(int64_t e) const {
        v[e] = beta * (v[e] - recalled[e]);
        o[e] += overlap * v[e];
    }

    float *decayed_q, *decayed_k, *recalled;
    float beta = 0, overlap = 0;  // q . k
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
