// The gradient of token t's decay is the sum over all pairs j < t <= i. For a chunk with t inside, they are
//     j before, i inside:   the sum over i >= t of q_i . (first term of dq_i)              first walk, left to right
//     j inside, i inside:   from the chunk's pairs
//     j inside, i after:    the sum over j < t of k_j . (first term of dk_j)               second walk, right to left
//     j before, i after:    a constant of the chunk, `across`
// None of them subtracts. Where the first walk kept the state that enters the chunk, `across` is
// rowsum(decayed S * dS). Elsewhere it is a difference: pairs that cross the boundary after a chunk are its `across`
// and all its third kind; those that cross the boundary before it are `across` and all its first kind. So one number
// per channel walks from boundary to boundary. The value axis is alike, with o do and v dv in place of q dq and k dk.
//
// The difference has lost its digits where a chunk decays so much that `across` is far smaller than the third kind, and
// that counts where the whole gradient is as small. In a chunk of 16 tokens it is not, but in a shorter one it may be:
// the state that enters the last chunk is always kept.
#pragma once

#include "axis.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

// With a weight this small, what crosses a whole chunk is less than the rounding of the difference it would come from.
constexpr float kForgotten = 1e-7f;

enum class Along { Keys, Values };

// Pairs that lie on both sides of a whole chunk: rowsum(decayed S * dS), one number per key channel; or column sums.
static inline void pairs_across(const Axis &key, const Axis &value, Panels entering, Panels grad_leaving, Along axis,
                                float *sums) {
    // A total of 0 forgets exactly.
    auto weigh = [](float *sums, const float *totals) {
        store(sums, select(load(totals) == Vec{}, Vec{}, load(sums) * load(totals)));
    };
    if (axis == Along::Values) {
        for (int64_t p = 0; p < value.blocks(); ++p) {
            Row sum = {};
            for (int64_t d = 0; d < key.size(); ++d)
                sum = sum +
                      key.totals()[d] * (load_row(entering.panel(p), (int)d) * load_row(grad_leaving.panel(p), (int)d));
            store_row(sums + p * kPanel, 0, sum);
        }
        for (int64_t e = 0; e < value.size(); e += kLanes) weigh(sums + e, value.totals() + e);
        return;
    }
    for (int64_t d = 0; d < key.size(); ++d) {
        Vec sum = {};
        for (int64_t p = 0; p < value.blocks(); ++p)
            for (int v = 0; v < kPanel; v += kLanes)
                sum += load(entering.panel(p) + d * kPanel + v) * load(grad_leaving.panel(p) + d * kPanel + v) *
                       load(value.totals() + p * kPanel + v);
        sums[d] = sum_lanes(sum);
    }
    for (int64_t d = 0; d < key.size(); d += kLanes) weigh(sums + d, key.totals() + d);
}

static inline double sum_of(const float *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
}

// The rows that read the state which enters a chunk, and the part of their gradient that comes from it.
struct Read {
    Panels later, grad;
};

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

    // First walk: the sums over i >= t of later_i * grad_i, for each of what a token reads the state with.
    template <class... Reads> void begin(int64_t first, int64_t count, Reads... reads) {
        if (by_channel_) {
            for (int64_t p = 0; p * kPanel < size_; ++p) {
                Row sum = {};
                for (int t = kChunk - 1; t >= 0; --t) {
                    ((sum = sum + load_row(reads.later.panel(p), t) * load_row(reads.grad.panel(p), t)), ...);
                    store_row(gradient_.panel(p), t, sum);
                }
            }
            unpack(gradient_, first, count, size_, gradient_rows_);
        } else {
            float dots[sizeof...(reads)][kChunk], sum = 0, *own = dots[0];
            ((row_dots(reads.later, reads.grad, size_, own), own += kChunk), ...);
            for (int64_t t = count - 1; t >= 0; --t) {
                for (const auto &of_read : dots) sum += of_read[t];
                *token(first + t) = sum;
            }
        }
    }

    // Second walk: what lies across the chunk that is finished next, from the state that enters it.
    void restart(const Axis &key, const Axis &value, Panels entering, Panels grad_leaving, Along axis) {
        pairs_across(key, value, entering, grad_leaving, axis, crossing_);
        if (!by_channel_) crossing_[0] = (float)sum_of(crossing_, size_);
        restarted_ = true;
    }

    // Second walk: completes the chunk's gradients. `earlier` and `grad` are weighted such that their product is
    // k_j . (first term of dk_j). Pairs inside the chunk are in `inside` or, for scalar forms, inside_scalar.
    void finish(const Axis &axis, Panels earlier, Panels grad, int64_t first, int64_t count) {
        const bool known = restarted_, nothing_before = first == 0 && starts_empty_;
        restarted_ = false;
        if (by_channel_) {
            pack(gradient_rows_, first, count, size_, gradient_);
            for (int64_t p = 0; p * kPanel < size_; ++p)
                finish_panel(axis, p, earlier.panel(p), grad.panel(p), known, nothing_before);
            unpack(gradient_, first, count, size_, gradient_rows_);
            return;
        }
        float dots[kChunk], after = 0;
        row_dots(earlier, grad, size_, dots);
        for (int64_t t = 0; t < count; ++t) after += dots[t];
        const ScalarWeights &w = axis.weights();
        const bool nothing = nothing_before || (!known && w.total < kForgotten);
        const float across = nothing ? 0.0f : known ? crossing_[0] : crossing_[0] - after;
        crossing_[0] = across + *token(first);
        float before = 0;
        for (int64_t t = 0; t < count; ++t) {
            const float own = *token(first + t) + inside_scalar[t] + before + across;
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

    void finish_panel(const Axis &axis, int64_t p, const float *earlier, const float *grad, bool known,
                      bool nothing_before) {
        float *gradient = gradient_.panel(p), *crossing = crossing_ + p * kPanel;
        const float *factors = axis.factors(p), *total = axis.totals() + p * kPanel;
        Row before = {}, across = nothing_before ? Row{} : load_row(crossing, 0);
        if (!known && !nothing_before) {
            Row after = {};
            for (int t = 0; t < kChunk; ++t) after = after + load_row(earlier, t) * load_row(grad, t);
            for (int v = 0; v < kVecs; ++v)
                across.x[v] = select(load(total + v * kLanes) < kForgotten, Vec{}, across.x[v] - after.x[v]);
        }
        store_row(crossing, 0, across + load_row(gradient, 0));
        for (int t = 0; t < kChunk; ++t) {
            Row own = load_row(gradient, t) + load_row(inside.panel(p), t) + before + across;
            before = before + load_row(earlier, t) * load_row(grad, t);
            for (int v = 0; v < kVecs; ++v)
                own.x[v] = select(load(factors + t * kPanel + v * kLanes) == Vec{}, Vec{}, own.x[v]);
            store_row(gradient, t, own);
        }
    }

    bool wanted_, by_channel_, starts_empty_ = false, restarted_ = false;
    int64_t size_;
    float *crossing_ = nullptr;  // pairs that cross the boundary the walk has reached; after restart(), the next chunk
    Panels gradient_ = {};
    Rows gradient_rows_ = {};
};

// The decay gradient of one axis of chunk_states. In a chunk of the caller's, gradients enter only at its end, so that
// every pair that crosses token t has its i after the chunk, and nothing is subtracted anywhere:
//     gradient_t = what crosses the chunk's start + the sum over j < t of k_j . dk_j
class StatesAxisGradient {
public:
    StatesAxisGradient(Arena &arena, int64_t form, int64_t size, bool wanted)
        : wanted_(wanted), by_channel_(form == FULMEN_DECAY_CHANNEL), size_(size) {
        if (!wanted) return;
        crossing_ = arena.floats(padded(size));
        if (by_channel_) products_ = arena.panels(kChunk, size);
    }

    bool wanted() const { return wanted_; }

    void start(Rows gradient) { gradient_rows_ = gradient; }

    // From right to left: each token's k_j . dk_j, kept where its gradient will be.
    void keep(Panels earlier, Panels grad, int64_t first, int64_t count) {
        if (!by_channel_) {
            float dots[kChunk];
            row_dots(earlier, grad, size_, dots);
            for (int64_t t = 0; t < count; ++t) *token(first + t) = dots[t];
            return;
        }
        for (int64_t p = 0; p * kPanel < size_; ++p)
            for (int x = 0; x < kBlock; x += kLanes)
                store(products_.panel(p) + x, load(earlier.panel(p) + x) * load(grad.panel(p) + x));
        unpack(products_, first, count, size_, gradient_rows_);
    }

    // From left to right, once tokens [first, last) are kept. The state enters the first 16 of them, at most.
    void finish(const Axis &key, const Axis &value, Panels entering, Panels grad_leaving, Along axis, int64_t first,
                int64_t last) {
        pairs_across(key, value, entering, grad_leaving, axis, crossing_);
        if (!by_channel_) {
            double crossing = sum_of(crossing_, size_);
            for (int64_t t = first; t < last; ++t) {
                const double own = *token(t);
                *token(t) = (float)crossing;
                sum += crossing;
                crossing += own;
            }
            return;
        }
        for (int64_t t = first; t < last; ++t)
            for (int64_t f = 0; f < size_; f += kLanes) {
                float *gradient = token(t) + f;
                const Vec crossing = load(crossing_ + f), own = load_some(Float32(), gradient, size_ - f);
                store_some(Float32(), gradient, crossing, size_ - f);
                store(crossing_ + f, crossing + own);
            }
    }

    double sum = 0;  // over all tokens that are finished, of a gradient that is not by channel

private:
    float *token(int64_t t) const { return (float *)gradient_rows_.row(t); }

    bool wanted_, by_channel_;
    int64_t size_;
    float *crossing_ = nullptr;
    Panels products_ = {};
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
