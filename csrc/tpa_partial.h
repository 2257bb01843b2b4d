// Softmax over some of the tokens of tensor-product attention, and how results of several tokens are merged.
#pragma once

#include "arena.h"

namespace fulmen {
namespace FULMEN_ISA {

// What exponents are taken from: the largest score, or 0 where every score so far is -inf.
FULMEN_INLINE Vec origin(Vec maximum) { return select(maximum == -__builtin_inff(), Vec{}, maximum); }

// Softmax over some of the tokens: with weights e^(score - maximum), their sum and the weighed sum of the values.
struct Partial {
    Panels output;                  // heads x value channels
    float *maximum, *sum, *weight;  // one per head; `weight` is what the tokens so far weigh beside new ones
    int64_t heads, columns;         // padded

    Partial(Arena &arena, int64_t active_heads, int64_t size)
        : output(arena.panels(active_heads, size)),
          maximum(arena.floats(padded(active_heads))),
          sum(arena.floats(padded(active_heads))),
          weight(arena.floats(padded(active_heads))),
          heads(padded(active_heads)),
          columns(padded(size)) {}

    void clear() {
        for (int64_t p = 0; p * kPanel < columns; ++p)
            for (int64_t x = 0; x < heads * kPanel; x += kLanes) store(output.panel(p) + x, Vec{});
        for (int64_t h = 0; h < heads; h += kLanes) {
            store(maximum + h, broadcast(-__builtin_inff()));
            store(sum + h, Vec{});
        }
    }

    // Adds the tokens of another one, whose own `weight` becomes what it weighs here.
    void merge(Partial &other) {
        for (int64_t h = 0; h < heads; h += kLanes) {
            const Vec a = load(maximum + h), b = load(other.maximum + h), from = origin(larger(a, b));
            const Vec own = exp_of_negative(a - from), added = exp_of_negative(b - from);
            store(maximum + h, larger(a, b));
            store(sum + h, load(sum + h) * own + load(other.sum + h) * added);
            store(weight + h, own);
            store(other.weight + h, added);
        }
        for (int64_t p = 0; p * kPanel < columns; ++p)
            for (int64_t x = 0; x < heads * kPanel; x += kLanes) {
                const int64_t h = x / kPanel;
                float *to = output.panel(p) + x;
                store(to, load(to) * weight[h] + load(other.output.panel(p) + x) * other.weight[h]);
            }
    }

    // Divides by the sum of the weights. No tokens give zeros, and tokens that all score -inf NaN.
    void normalise(int64_t value_rank, bool any_tokens) {
        for (int64_t h = 0; h < heads; ++h) weight[h] = any_tokens ? 1.0f / (sum[h] * (float)value_rank) : 0.0f;
        for (int64_t p = 0; p * kPanel < columns; ++p)
            for (int64_t x = 0; x < heads * kPanel; x += kLanes) {
                float *to = output.panel(p) + x;
                store(to, load(to) * weight[x / kPanel]);
            }
    }
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
