// One token of the delta rule against one state: what the state says of its value is read first, then the correction
// is written as linear attention writes a value.
#pragma once

#include <math.h>

#include "recurrence.h"

namespace fulmen {
namespace FULMEN_ISA {

// recalled[e] = sum over d of decayed_k[d] s[d][e], of a state with dense rows, whole rows one after the other.
template <int Vecs, class T>
FULMEN_INLINE void recall_columns_of_rows(T type, const typename T::Stored *state, int64_t stride, int64_t d_count,
                                          int64_t n, const float *decayed_k, float *recalled) {
    Vec sum[Vecs] = {};
    for (int64_t d = 0; d < d_count; ++d) {
        const typename T::Stored *row = state + d * stride;
        const Vec k = broadcast(decayed_k[d]);
#pragma GCC unroll 32
        for (int c = 0; c < Vecs; ++c)
            sum[c] += k * (Vecs == 1 ? load_some(type, row, n) : load_as(type, row + c * kLanes));
    }
#pragma GCC unroll 32
    for (int c = 0; c < Vecs; ++c) store(recalled + c * kLanes, sum[c]);
}

template <class T>
static inline void recall_rows(T type, const typename T::Stored *state, int64_t stride, int64_t d_count,
                               int64_t e_count, const float *decayed_k, float *recalled) {
    constexpr int kTogether = 8;  // in registers
    int64_t e = 0;
    for (; e + kTogether * kLanes <= e_count; e += kTogether * kLanes)
        recall_columns_of_rows<kTogether>(type, state + e, stride, d_count, kLanes, decayed_k, recalled + e);
    for (; e < e_count; e += kLanes)
        recall_columns_of_rows<1>(type, state + e, stride, d_count, e_count - e, decayed_k, recalled + e);
}

// The same of a state with dense columns: s[e][d] in memory.
template <class T>
static inline void recall_columns(T type, const typename T::Stored *state, int64_t stride, int64_t d_count,
                                  int64_t e_count, const float *decayed_k, float *recalled) {
    for (int64_t e = 0; e < e_count; ++e) {
        const typename T::Stored *column = state + e * stride;
        Vec sum = {};
        for (int64_t d = 0; d < d_count; d += kLanes)
            sum += load(decayed_k + d) * load_some(type, column + d, d_count - d);
        recalled[e] = sum_lanes(sum);
    }
}

// Loads a token, then sweeps a state with it.
class DeltaTokenBuffer : public TokenBuffer {
public:
    static constexpr int kArrays = TokenBuffer::kArrays + 2;
    DeltaTokenBuffer(Arena &arena, int64_t key_size, int64_t value_size)
        : TokenBuffer(arena, key_size, value_size),
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
        for (int64_t d = 0; d < padded(d_count); ++d) decayed_k[d] = d < d_count ? k[d] * key_factors[d] : 0.0f;
    }

    template <class T> void sweep_rows(T type, typename T::Stored *state, int64_t stride) {
        recall_rows(type, state, stride, d_count, e_count, decayed_k, recalled);
        correct();
        TokenBuffer::sweep_rows(type, state, stride);
    }
    template <class T> void sweep_columns(T type, typename T::Stored *state, int64_t stride) {
        recall_columns(type, state, stride, d_count, e_count, decayed_k, recalled);
        correct();
        TokenBuffer::sweep_columns(type, state, stride);
    }

private:
    void normalize(float *x, float scale) const {
        Vec squares = {};  // the rest of the last vector is 0
        for (int64_t d = 0; d < d_count; d += kLanes) squares += FULMEN_ISA::load(x + d) * FULMEN_ISA::load(x + d);
        const float factor = scale / sqrtf(sum_lanes(squares) + FULMEN_EPSILON);
        for (int64_t d = 0; d < d_count; ++d) x[d] *= factor;
    }

    // The value becomes what is written.
    void correct() const {
        for (int64_t e = 0; e < e_count; ++e) v[e] = beta * (v[e] - recalled[e]);
    }

    float *decayed_k, *recalled;
    float beta = 0;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
