// Decay weights inside a chunk of 16 tokens, and what a chunk does with them.
//
// A weight between two tokens is a running product of e^a, each factor in [0, 1] for a <= 0: no quotient and no
// difference of sums, so that -inf is an exact 0 and magnitudes may mix.
//
// One decay value per token needs a 16 x 16 table of weights. One per token and channel has a table for every
// channel; instead, adjacent runs of tokens meet at their boundary: when i lies in the second run and j in the first,
// their weight is (product from the second's start up to i) * (product after j to the first's end). Runs of 1, 2, 4
// and 8 tokens cover every pair j < i once, and doubling a run multiplies by its neighbour's total.
#pragma once

#include <math.h>

#include "panels.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int kChunk = kPanel;  // a chunk is one block of tokens
constexpr int kVecs = kPanel / kLanes;

// a_t . b_t for each token.
static inline void row_dots(Panels a, Panels b, int64_t size, float *dots) {
    for (int t = 0; t < kChunk; ++t) {
        Vec sum = {};
        for (int64_t p = 0; p * kPanel < size; ++p)
            for (int v = 0; v < kPanel; v += kLanes)
                sum += load(a.panel(p) + t * kPanel + v) * load(b.panel(p) + t * kPanel + v);
        dots[t] = sum_lanes(sum);
    }
}

// ---- one value per token ----

struct ScalarWeights {
    float pair[kBlock];    // [j][i]: from token j to token i >= j, 0 where i < j
    float prefix[kChunk];  // from the state that enters the chunk to token i
    float suffix[kChunk];  // from token j to the state that leaves
    float factor[kChunk];  // of each token
    double total;
};

// log_decay has 16 values, 0 after the last token.
static inline void scalar_weights(const float *log_decay, ScalarWeights &w) {
    for (int v = 0; v < kChunk; v += kLanes) store(w.factor + v, exp(load(log_decay + v)));
    double sum = 0, product = 1;
    for (int i = 0; i < kChunk; ++i) {
        sum += log_decay[i];
        product *= w.factor[i];
        w.prefix[i] = (float)product;
    }
    // exp of the sum rather than the product: the rounding of equal factors would add up over thousands of chunks.
    w.total = ::exp(sum);
    Vec row[kVecs] = {};
    for (int j = kChunk - 1; j >= 0; --j) {
        for (int v = 0; v < kVecs; ++v) {
            IntVec own = lane_numbers() + v * kLanes == j;
            row[v] = select(own, broadcast(1.0f), row[v]);
            store(w.pair + j * kPanel + v * kLanes, row[v]);
            row[v] *= w.factor[j];
        }
        w.suffix[j] = w.pair[j * kPanel + kChunk - 1];
    }
}

// pairs[j][i], an exact 0 for i < j: not even NaN comes from a later token. Between the others a weight of 0 is a
// factor like any other, which NaN passes, as it passes from state to state.
// The earlier tokens may have weights of their own.
constexpr float kOnes[kChunk] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
static inline void weigh_pairs(const float *products, const float *weights, float *pairs, const float *own = kOnes) {
    for (int j = 0; j < kChunk; ++j)
        for (int v = 0; v < kPanel; v += kLanes) {
            const int x = j * kPanel + v;
            const Vec weighed = load(products + x) * (load(weights + x) * own[j]);
            store(pairs + x, select(lane_numbers() + v >= j, weighed, Vec{}));
        }
}
static inline void weigh_pairs(float *pairs, const float *weights) { weigh_pairs(pairs, weights, pairs); }

static inline void weigh_rows(float *block, const float *weights) {
    for (int r = 0; r < kChunk; ++r)
        for (int v = 0; v < kVecs; ++v) {
            float *x = block + r * kPanel + v * kLanes;
            store(x, load(x) * weights[r]);
        }
}

static inline void scale_block(float *block, float scale) {
    for (int x = 0; x < kBlock; x += kLanes) store(block + x, load(block + x) * scale);
}

static inline void add_block(float *to, const float *from) {
    for (int x = 0; x < kBlock; x += kLanes) store(to + x, load(to + x) + load(from + x));
}

// The gradient of each token's decay from pairs inside the chunk: the sum over j < t <= i of pair gradients
// scores * grads, both [j][i], one of the two weighted.
static inline void scalar_gradient(const float *scores, const float *grads, float *gradient) {
    Vec from[kVecs] = {};  // sum over j < t of pair (j, i), for each i
    for (int t = 0; t < kChunk; ++t) {
        Vec crossing = {};
        for (int v = 0; v < kVecs; ++v) {
            IntVec later = lane_numbers() + v * kLanes >= t;
            crossing += select(later, from[v], Vec{});
            const int x = t * kPanel + v * kLanes;
            from[v] += load(scores + x) * load(grads + x);
        }
        gradient[t] = sum_lanes(crossing);
    }
}

// ---- one value per token and channel: all blocks are [token][16 channels] ----

struct Row {
    Vec x[kVecs];
};
FULMEN_INLINE Row load_row(const float *block, int r) {
    Row row;
    for (int v = 0; v < kVecs; ++v) row.x[v] = load(block + r * kPanel + v * kLanes);
    return row;
}
FULMEN_INLINE void store_row(float *block, int r, Row row) {
    for (int v = 0; v < kVecs; ++v) store(block + r * kPanel + v * kLanes, row.x[v]);
}
FULMEN_INLINE Row operator*(Row a, Row b) {
    for (int v = 0; v < kVecs; ++v) a.x[v] *= b.x[v];
    return a;
}
FULMEN_INLINE Row operator*(float a, Row b) {
    for (int v = 0; v < kVecs; ++v) b.x[v] *= a;
    return b;
}
FULMEN_INLINE Row operator+(Row a, Row b) {
    for (int v = 0; v < kVecs; ++v) a.x[v] += b.x[v];
    return a;
}

// Logarithms to factors, in place; their sum over the chunk, one per channel. `positive` learns of logarithms above 0.
static inline Row channel_factors(float *block, IntVec &positive) {
    Row sum = {};
    for (int t = 0; t < kChunk; ++t) {
        Row row = load_row(block, t);
        sum = sum + row;
        for (int v = 0; v < kVecs; ++v) {
            positive |= row.x[v] > Vec{};
            row.x[v] = exp(row.x[v]);
        }
        store_row(block, t, row);
    }
    return sum;
}

// total = exp(sum), one per channel. `owed` is what rounding the total before this one left out; then what rounding
// this one does.
static inline void channel_totals(Row sum, float *total, float *owed) {
    for (int v = 0; v < kVecs; ++v) {
        Vec rest;
        store(total + v * kLanes, exp(sum.x[v] + load(owed + v * kLanes), rest));
        store(owed + v * kLanes, rest);
    }
}

// block[i] *= product of factors up to and including i
static inline void weigh_by_prefix(float *block, const float *factors) {
    Row weight = load_row(factors, 0);
    for (int t = 0; t < kChunk; ++t) {
        if (t > 0) weight = weight * load_row(factors, t);
        store_row(block, t, load_row(block, t) * weight);
    }
}

// block[j] *= product of factors after j
static inline void weigh_by_suffix(float *block, const float *factors) {
    Row weight = load_row(factors, kChunk - 1);
    for (int t = kChunk - 2; t >= 0; --t) {
        store_row(block, t, load_row(block, t) * weight);
        weight = weight * load_row(factors, t);
    }
}

// Calls meet(start, half) for every two runs [start, start + half) and [start + half, start + 2 half) that meet,
// with `later` weighted from its run's start and `earlier` weighted to its run's end.
template <class Meet>
FULMEN_INLINE void for_each_meeting(Row (&later)[kChunk], Row (&earlier)[kChunk], Row (&total)[kChunk], Meet meet) {
    for (int t = 0; t < kChunk; ++t) later[t] = later[t] * total[t];
    for (int half = 1; half < kChunk; half *= 2)
        for (int start = 0; start < kChunk; start += 2 * half) {
            const int middle = start + half;
            meet(start, half);
            for (int i = middle; i < middle + half; ++i) later[i] = later[i] * total[start];
            for (int j = start; j < middle; ++j) earlier[j] = earlier[j] * total[middle];
            total[start] = total[start] * total[middle];
        }
}

// Adds what a panel's channels contribute to sums[i][j] = sum of later_i * weight_ij * earlier_j, for rows i from
// `First` on and kLanes of the earlier tokens, from token `From` on. Those are given transposed, and on their way from
// row to row take the factor of each row after their own; where i < j, sums come to nothing that means anything.
template <int First, int Rows, int From>
FULMEN_INLINE void channel_pairs(const float *later, const float *earlier_transposed, const float *factors,
                                 float *sums) {
    constexpr int kAtOnce = 2;  // channels, which share the masks of lanes
    Vec sum[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sum[r] = load(sums + (First + r) * kPanel + From);
    for (int d = 0; d < kPanel; d += kAtOnce) {
        Vec earlier[kAtOnce];
        for (int x = 0; x < kAtOnce; ++x) earlier[x] = load(earlier_transposed + (d + x) * kPanel + From);
#pragma GCC unroll 16
        for (int i = From; i < First + Rows; ++i)
#pragma GCC unroll 2
            for (int x = 0; x < kAtOnce; ++x) {
                const Vec decayed = earlier[x] * factors[i * kPanel + d + x];
                if (i > From)
                    earlier[x] = i >= From + kLanes ? decayed : select(lane_numbers() < i - From, decayed, earlier[x]);
                if (i >= First) sum[i - First] += earlier[x] * later[i * kPanel + d + x];
            }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) store(sums + (First + r) * kPanel + From, sum[r]);
}
// All of them, as many rows at a time as there are registers for.
template <int First = 0, int From = 0>
FULMEN_INLINE void channel_pairs(const float *later, const float *earlier_transposed, const float *factors,
                                 float *sums) {
    constexpr int kRows = kLanes == 16 ? 16 : 8;
    if constexpr (From < kPanel) {
        if constexpr (First < kPanel) {
            if constexpr (First + kRows > From)
                channel_pairs<First, kRows, From>(later, earlier_transposed, factors, sums);
            channel_pairs<First + kRows, From>(later, earlier_transposed, factors, sums);
        } else {
            channel_pairs<0, From + kLanes>(later, earlier_transposed, factors, sums);
        }
    }
}

// out_i = sum over j <= i of matrix_ji * weight_ij * earlier_j; matrix is [j][i].
static inline void channel_mix(const float *matrix, const float *earlier, const float *factors, float *out) {
    Row weight[kChunk], k[kChunk], total[kChunk];
    for (int t = 0; t < kChunk; ++t) {
        for (int v = 0; v < kVecs; ++v) weight[t].x[v] = broadcast(1.0f);
        k[t] = load_row(earlier, t);
        total[t] = load_row(factors, t);
        store_row(out, t, matrix[t * kPanel + t] * k[t]);
    }
    for_each_meeting(weight, k, total, [&](int start, int half) {
        for (int i = start + half; i < start + 2 * half; ++i) {
            Row sum = {};
            for (int j = start; j < start + half; ++j) sum = sum + matrix[j * kPanel + i] * k[j];
            store_row(out, i, load_row(out, i) + weight[i] * sum);
        }
    });
}

// The gradients that pairs inside the chunk send back to earlier_j and to the decay of each token:
//     out_j      = sum over i >= j of matrix_ji * weight_ij * later_i
//     gradient_t = sum over j < t <= i of matrix_ji * weight_ij * later_i * earlier_j    (null: not wanted)
static inline void channel_mix_back(const float *matrix, const float *later, const float *earlier, const float *factors,
                                    float *out, float *gradient) {
    Row q[kChunk], k[kChunk], total[kChunk], suffix[kChunk];
    for (int t = 0; t < kChunk; ++t) {
        q[t] = load_row(later, t);
        k[t] = load_row(earlier, t);
        total[t] = load_row(factors, t);
        for (int v = 0; v < kVecs; ++v) suffix[t].x[v] = broadcast(1.0f);
        store_row(out, t, matrix[t * kPanel + t] * q[t]);
        if (gradient) store_row(gradient, t, Row{});
    }
    for_each_meeting(q, k, total, [&](int start, int half) {
        const int middle = start + half, end = middle + half;
        Row before = {};
        for (int j = start; j < middle; ++j) {
            Row sum = {};
            for (int i = middle; i < end; ++i) sum = sum + matrix[j * kPanel + i] * q[i];
            store_row(out, j, load_row(out, j) + suffix[j] * sum);
            if (gradient) {
                store_row(gradient, j, load_row(gradient, j) + before);
                before = before + k[j] * sum;
            }
        }
        if (gradient) {
            Row after = {};
            for (int i = end - 1; i >= middle; --i) {
                Row sum = {};
                for (int j = start; j < middle; ++j) sum = sum + matrix[j * kPanel + i] * k[j];
                after = after + q[i] * sum;
                store_row(gradient, i, load_row(gradient, i) + after);
            }
        }
        for (int j = start; j < middle; ++j) suffix[j] = suffix[j] * total[middle];
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
