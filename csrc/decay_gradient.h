// The gradient of token t's decay is the sum over all pairs j < t <= i. For a chunk with t inside, they are
//     j before, i inside:   the sum over i >= t of q_i . (first term of dq_i)              first walk, left to right
//     j inside, i inside:   from the chunk's pairs
//     j inside, i after:    the sum over j < t of k_j . (first term of dk_j)               second walk, right to left
//     j before, i after:    a constant of the chunk, `across`
// None of them subtracts. Pairs that cross the boundary after a chunk are its `across` and all its third kind; those
// that cross the boundary before it are `across` and all its first kind. So one number per channel walks from boundary
// to boundary, and restarts from rowsum(S * dS) wherever the first walk kept a state. The value axis is alike, with o
// do and v dv in place of q dq and k dk.
#pragma once

#include "axis.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

// With a weight this small, what crosses a whole chunk is less than the rounding of the difference it would come from.
constexpr float kForgotten = 1e-7f;

enum class Along { Keys, Values };

// The decay gradient of one axis.
class AxisGradient {
public:
    AxisGradient(Arena &arena, int64_t form, int64_t size, bool wanted)
        : wanted_(wanted), by_channel_(form == FULMEN_DECAY_CHANNEL), size_(size) {
        if (!wanted) return;
        crossing_ = arena.floats(padded(size));
        if (by_channel_) {
            inside = arena.panels(kChunk, size);
            gradient_ = arena.panels(kChunk, size);
        }
    }

    bool wanted() const { return wanted_; }

    // Nothing lies before a sequence that starts from an empty state, so nothing crosses its first chunk: said rather
    // than left to a difference, the gradient is an exact 0 where no pair exists.
    void start(Rows gradient, bool starts_empty) {
        gradient_rows_ = gradient;
        starts_empty_ = starts_empty;
    }

    // First walk: the sums over i >= t of later_i * grad_i.
    void begin(Panels later, Panels grad, int64_t first, int64_t count) {
        if (by_channel_) {
            for (int64_t p = 0; p * kPanel < size_; ++p) {
                Row sum = {};
                for (int t = kChunk - 1; t >= 0; --t) {
                    sum = sum + load_row(later.panel(p), t) * load_row(grad.panel(p), t);
                    store_row(gradient_.panel(p), t, sum);
                }
            }
            unpack(gradient_, first, count, size_, gradient_rows_);
        } else {
            float dots[kChunk], sum = 0;
            row_dots(later, grad, dots);
            for (int64_t t = count - 1; t >= 0; --t) *token(first + t) = sum += dots[t];
        }
    }

    // Second walk: the pairs that cross the boundary after the chunk, from the states that meet there.
    void restart(Panels state, Panels grad_state, int64_t rows, int64_t columns, Along axis) {
        if (axis == Along::Values) {
            for (int64_t p = 0; p * kPanel < columns; ++p) {
                Row sum = {};
                for (int64_t d = 0; d < rows; ++d)
                    sum = sum + load_row(state.panel(p), (int)d) * load_row(grad_state.panel(p), (int)d);
                store_row(crossing_ + p * kPanel, 0, sum);
            }
            return;
        }
        double all = 0;
        for (int64_t d = 0; d < rows; ++d) {
            Vec sum = {};
            for (int64_t p = 0; p * kPanel < columns; ++p)
                for (int v = 0; v < kPanel; v += kLanes)
                    sum += load(state.panel(p) + d * kPanel + v) * load(grad_state.panel(p) + d * kPanel + v);
            crossing_[d] = sum_lanes(sum);
            all += crossing_[d];
        }
        if (!by_channel_) crossing_[0] = (float)all;
    }

    // Second walk: completes the chunk's gradients. `earlier` and `grad` are weighted such that their product is
    // k_j . (first term of dk_j). Pairs inside the chunk are in `inside` or, for scalar forms, inside_scalar.
    void finish(const Axis &axis, Panels earlier, Panels grad, int64_t first, int64_t count, bool has_begun) {
        if (by_channel_) {
            if (has_begun) pack(gradient_rows_, first, count, size_, gradient_);
            for (int64_t p = 0; p * kPanel < size_; ++p) {
                if (!has_begun) memset(gradient_.panel(p), 0, kBlock * sizeof(float));
                finish_panel(axis, p, earlier.panel(p), grad.panel(p), first == 0 && starts_empty_);
            }
            unpack(gradient_, first, count, size_, gradient_rows_);
            return;
        }
        float dots[kChunk], after = 0;
        row_dots(earlier, grad, dots);
        for (int64_t t = 0; t < count; ++t) after += dots[t];
        const ScalarWeights &w = axis.weights();
        const bool nothing = w.total < kForgotten || (first == 0 && starts_empty_);
        const float across = nothing ? 0.0f : crossing_[0] - after;
        crossing_[0] = across + (has_begun ? *token(first) : 0.0f);
        float before = 0;
        for (int64_t t = 0; t < count; ++t) {
            const float own = (has_begun ? *token(first + t) : 0.0f) + inside_scalar[t] + before + across;
            before += dots[t];
            *token(first + t) = w.factor[t] == 0.0f ? 0.0f : own;
            sum += *token(first + t);
        }
    }

    // Pairs inside the current chunk.
    Panels inside = {};
    float inside_scalar[kChunk] = {};

    double sum = 0;  // over all tokens that are finished, of a gradient that is not by channel

private:
    float *token(int64_t t) const { return (float *)gradient_rows_.row(t); }

    void row_dots(Panels a, Panels b, float *dots) const {
        for (int t = 0; t < kChunk; ++t) {
            Vec sum = {};
            for (int64_t p = 0; p * kPanel < size_; ++p)
                for (int v = 0; v < kPanel; v += kLanes)
                    sum += load(a.panel(p) + t * kPanel + v) * load(b.panel(p) + t * kPanel + v);
            dots[t] = sum_lanes(sum);
        }
    }

    void finish_panel(const Axis &axis, int64_t p, const float *earlier, const float *grad, bool nothing_before) {
        float *gradient = gradient_.panel(p), *crossing = crossing_ + p * kPanel;
        const float *factors = axis.factors(p), *total = axis.totals() + p * kPanel;
        Row after = {}, before = {}, across, front = load_row(gradient, 0);
        for (int t = 0; t < kChunk; ++t) after = after + load_row(earlier, t) * load_row(grad, t);
        for (int v = 0; v < kVecs; ++v) {
            const Vec rest = load(crossing + v * kLanes) - after.x[v];
            across.x[v] = nothing_before ? Vec{} : select(load(total + v * kLanes) < kForgotten, Vec{}, rest);
        }
        store_row(crossing, 0, across + front);
        for (int t = 0; t < kChunk; ++t) {
            Row own = load_row(gradient, t) + load_row(inside.panel(p), t) + before + across;
            before = before + load_row(earlier, t) * load_row(grad, t);
            for (int v = 0; v < kVecs; ++v)
                own.x[v] = select(load(factors + t * kPanel + v * kLanes) == Vec{}, Vec{}, own.x[v]);
            store_row(gradient, t, own);
        }
    }

    bool wanted_, by_channel_, starts_empty_ = false;
    int64_t size_;
    float *crossing_ = nullptr;  // pairs that cross the boundary the walk has reached
    Panels gradient_ = {};
    Rows gradient_rows_ = {};
};

// The gradient of a decay of form [H]: its heads' sums, added over batch or sequences.
static inline void sum_over_sequences(const fulmen_problem &p, const double *sums, const fulmen_tensor &dlog_decay) {
    if (!dlog_decay.data || p.decay_form != FULMEN_DECAY_HEAD) return;
    for (int64_t h = 0; h < p.heads; ++h) {
        double sum = 0;
        for (int64_t s = 0; s < sequences_of(p); ++s) sum += sums[s * p.heads + h];
        ((float *)dlog_decay.data)[h * dlog_decay.stride_head] = (float)sum;
    }
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
