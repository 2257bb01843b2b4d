// Segments of one sequence at once: summarise each from nothing (its state and what it decays in all), fold the
// summaries into the states that enter the segments, then run each segment from its own. States fold from the left,
// gradients of states from the right.
#pragma once

#include "axis.h"
#include "state.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int64_t kWorthPartitioning = 1024;  // tokens

FULMEN_INLINE bool may_partition(const fulmen_problem &p) {
    return !p.deterministic &&
           (p.schedule == FULMEN_PARALLEL || p.schedule == FULMEN_AUTO || p.schedule == FULMEN_RECOMPUTE);
}

// As many as occupy the threads, when there are fewer tasks than threads.
FULMEN_INLINE int64_t segments_for(const fulmen_problem &p, int64_t tasks, int64_t threads) {
    return may_partition(p) && tasks > 0 && tasks < threads && p.tokens >= kWorthPartitioning ? threads / tasks : 1;
}

FULMEN_INLINE int64_t chunks_of(int64_t tokens, int64_t chunk = kChunk) { return (tokens + chunk - 1) / chunk; }

FULMEN_INLINE int64_t segment_start(int64_t tokens, int64_t segment, int64_t segments) {
    return smaller(tokens, chunks_of(tokens) * segment / segments * kChunk);
}

// What a segment decays in all: a factor for each channel of either axis.
class Totals {
public:
    Totals(Arena &arena, int64_t key_size, int64_t columns)
        : keys_(padded(key_size)),
          columns_(padded(columns)),
          key_(arena.floats(keys_)),
          value_(arena.floats(columns_)) {}

    // Takes a worker with an empty state through the segment; pass(chunk) takes it through one of its chunks.
    template <class Worker, class Pass> void summarise(Worker &worker, int64_t chunks, Pass pass) const {
        worker.enter(Matrix{});
        for (int64_t d = 0; d < keys_; ++d) key_[d] = 1;
        for (int64_t e = 0; e < columns_; ++e) value_[e] = 1;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            pass(chunk);
            for (int64_t d = 0; d < keys_; ++d) key_[d] *= worker.key.totals()[d];
            for (int64_t e = 0; e < columns_; ++e) value_[e] *= worker.value.totals()[e];
        }
    }

    // From the state that enters and what the segment makes of an empty one: the state that leaves. put(entering, own,
    // n, before, after) stores n or more columns of a row.
    template <class State, class Put>
    void fold(State entering, State own, int64_t rows, int64_t columns, Put put) const {
        for (int64_t d = 0; d < rows; ++d)
            for (int64_t e = 0; e < columns; e += kLanes) {
                float *to = entering.at(d, e), *from = own.at(d, e);
                const Vec before = load_some(Float32(), to, columns - e);
                const Vec decayed = before * key_[d] * load(value_ + e);
                put(to, from, columns - e, before, decayed + load_some(Float32(), from, columns - e));
            }
    }

private:
    int64_t keys_, columns_;  // padded
    float *key_, *value_;
};

// A segment's totals, and its own state until the summaries are folded, then the one that enters it.
class Summary {
public:
    Summary(Arena &arena, int64_t key_size, int64_t columns)
        : totals_(arena, key_size, columns),
          rows_(padded(key_size)),
          columns_(padded(columns)),
          state_(arena.panels(key_size, columns)) {}

    template <class Worker, class Pass> void summarise(Worker &worker, int64_t chunks, Pass pass) {
        totals_.summarise(worker, chunks, pass);
        memcpy(state_.data, worker.state.data, bytes());
    }
    // Takes the entering state to the segment's end.
    void fold(Panels entering) {
        totals_.fold(entering, state_, rows_, columns_, [](float *state, float *own, int64_t, Vec before, Vec after) {
            store(own, before);
            store(state, after);
        });
    }
    Panels state() const { return state_; }

private:
    size_t bytes() const { return 4 * (size_t)panels_size(rows_, columns_); }

    Totals totals_;
    int64_t rows_, columns_;
    Panels state_;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
