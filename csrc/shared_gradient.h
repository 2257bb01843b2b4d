// Gradients of inputs that several heads read.
#pragma once

#include "chunk.h"

namespace fulmen {
namespace FULMEN_ISA {

// A gradient that several heads contribute to: each writes float32 rows of its own, summed in the order of heads.
struct SharedGradient {
    const fulmen_tensor *tensor;
    int64_t heads, features;
    int64_t stretch;        // tokens between two sums
    float *rows = nullptr;  // [sequence and head][stretch][features]
    bool shared(const fulmen_problem &p) const { return tensor->data && heads < p.heads; }

    void reserve(Arena &arena, const fulmen_problem &p) {
        if (shared(p)) rows = arena.floats(sequences_of(p) * p.heads * stretch * features);
    }
    Rows own(const fulmen_problem &p, Rows unshared, int64_t index, int64_t first) const {
        if (!shared(p)) return unshared;
        return Rows{(char *)(rows + index * stretch * features) - first * features * 4, FULMEN_FLOAT32, features};
    }
    void sum(const fulmen_problem &p, int64_t threads, int64_t first) const {
        if (!shared(p)) return;
        const int64_t group = p.heads / heads;
        parallel_for(threads, sequences_of(p) * heads, [&](int64_t task, int64_t) {
            const Sequence s = sequence(p, task / heads);
            const int64_t h = task % heads, count = smaller(stretch, s.tokens - first);
            const Rows to = rows_of(*tensor, s.batch, h).from(s.first, 0);
            float *total = rows + (task / heads * p.heads + h * group) * stretch * features;
            for (int64_t t = 0; t < count; ++t) {
                float *row = total + t * features;
                for (int64_t other = 1; other < group; ++other)
                    for (int64_t f = 0; f < features; ++f) row[f] += row[other * stretch * features + f];
                with_type(to.dtype, [&](auto type) {
                    store_features(type, row, features, (typename decltype(type)::Stored *)to.row(first + t));
                });
            }
        });
    }
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
