// Segments of one sequence at once: summarise each from nothing (its state and what it decays in all), fold the summaries
// into the states that enter the segments, then run each segment from its own. States fold from the left, gradients of
// states from the right.
#pragma once

#include "chunk.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int64_t kWorthCutting = 1024;  // tokens

FULMEN_INLINE bool may_cut(const fulmen_problem &p) {
    return !p.deterministic && (p.schedule == FULMEN_PARALLEL || p.schedule == FULMEN_AUTO || p.schedule == FULMEN_RECOMPUTE);
}

// As many as occupy the threads, when there are fewer tasks than threads.
FULMEN_INLINE int64_t segments_for(const fulmen_problem &p, int64_t tasks, int64_t threads) {
    return may_cut(p) && tasks > 0 && tasks < threads && p.tokens >= kWorthCutting ? threads / tasks : 1;
}

FULMEN_INLINE int64_t segment_start(int64_t tokens, int64_t segment, int64_t segments) {
    const int64_t chunks = (tokens + kChunk - 1) / kChunk;
    return smaller(tokens, chunks * segment / segments * kChunk);
}

class Summary {
public:
    Summary(Arena &arena, int64_t rows, int64_t columns)
        : key_totals(arena.floats(padded(rows))),
          value_totals(arena.floats(padded(columns))),
          rows_(padded(rows)),
          columns_(padded(columns)),
          state_(arena.panels(rows, columns)) {}

    void begin() {
        for (int64_t d = 0; d < rows_; ++d) key_totals[d] = 1;
        for (int64_t e = 0; e < columns_; ++e) value_totals[e] = 1;
    }
    void pass(const Axis &key, const Axis &value) {
        key.multiply_into(key_totals);
        value.multiply_into(value_totals);
    }
    void keep(Panels state) { memcpy(state_.data, state.data, 4 * panels_size(rows_, columns_)); }
    void restore(Panels state) const { memcpy(state.data, state_.data, 4 * panels_size(rows_, columns_)); }

    // Replaces the state the segment leaves by the one that enters it, and carries the latter to the segment's end.
    void fold(Panels entering) {
        for (int64_t p = 0; p * kPanel < columns_; ++p)
            for (int64_t d = 0; d < rows_; ++d)
                for (int c = 0; c < kPanel; c += kLanes) {
                    float *before = entering.panel(p) + d * kPanel + c, *own = state_.panel(p) + d * kPanel + c;
                    const Vec decayed = load(before) * key_totals[d] * load(value_totals + p * kPanel + c);
                    const Vec after = decayed + load(own);
                    store(own, load(before));
                    store(before, after);
                }
    }

    static int64_t bytes(const fulmen_problem &p, int64_t columns) {
        Arena counting(nullptr);
        Summary(counting, p.key_features, columns);
        return counting.bytes();
    }

    float *key_totals, *value_totals;

private:
    int64_t rows_, columns_;
    Panels state_;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
