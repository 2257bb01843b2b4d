// What forward, backward and states share: the decay of one axis (keys or values) over the current chunk, and the
// split of a call into tasks.
#pragma once

#include "decay.h"
#include "parallel.h"
#include "views.h"

namespace fulmen {
namespace FULMEN_ISA {

// The decay of one axis. begin() prepares the weights of a chunk; the rest applies them.
class Axis {
public:
    Axis(Arena &arena, int64_t form, int64_t features)
        : form_(form), features_(features), blocks_(padded(features) / kPanel) {
        totals_ = arena.floats(padded(features));
        weights_ = (ScalarWeights *)arena.floats(sizeof(ScalarWeights) / 4);
        if (by_feature()) {
            factors_ = arena.panels(kChunk, features);
            pairs_ = (Vec *)arena.floats(kBlock * kLanes);
        }
    }

    bool by_feature() const { return form_ == FULMEN_DECAY_FEATURE; }
    bool decays() const { return form_ != FULMEN_DECAY_NONE; }
    const float *totals() const { return totals_; }  // one per feature
    const ScalarWeights &weights() const { return *weights_; }

    void start(Rows decay) {
        decay_ = decay;
        prepared_ = -1;
    }

    void begin(int64_t first, int64_t count) {
        if (by_feature()) {
            pack(decay_, first, count, features_, factors_);
            for (int64_t p = 0; p < blocks_; ++p) feature_factors(factors_.panel(p), totals_ + p * kPanel);
            return;
        }
        const bool varies = form_ == FULMEN_DECAY_TOKEN;
        if (!varies && prepared_ == count) return;
        prepared_ = count;
        float log_decay[kChunk] = {};
        if (varies)
            gather(decay_, first, count, log_decay);
        else if (decays()) {
            float value[kChunk];
            gather(decay_, 0, 1, value);
            for (int64_t t = 0; t < count; ++t) log_decay[t] = value[0];
        }
        scalar_weights(log_decay, *weights_);
        for (int64_t f = 0; f < blocks_ * kPanel; ++f) totals_[f] = weights_->total;
    }

    // pairs[j][i] = later_i . earlier_j with the weight between the two, 0 for i < j.
    // later_transposed is later's transpose, one panel; only the scalar forms read it.
    void pair_products(Panels later, Panels earlier, const float *later_transposed, float *pairs) const {
        if (!by_feature()) {
            multiply(pairs, 1, Zero{}, Product<AsStored>{earlier, later_transposed, blocks_});
            weigh_pairs(pairs, weights_->pair);
            return;
        }
        memset(pairs_, 0, kBlock * sizeof(Vec));
        for (int64_t p = 0; p < blocks_; ++p)
            feature_pairs(later.panel(p), earlier.panel(p), factors_.panel(p), pairs_);
        for (int i = 0; i < kChunk; ++i)
            for (int j = 0; j < kChunk; ++j)
                pairs[j * kPanel + i] = j <= i ? sum_lanes(pairs_[i * kChunk + j]) : 0.0f;
    }

    const float *factors(int64_t p) const { return factors_.panel(p); }

    void weigh_later(Panels x) const {
        for (int64_t p = 0; p < blocks_ && decays(); ++p)
            by_feature() ? weigh_by_prefix(x.panel(p), factors(p)) : weigh_rows(x.panel(p), weights_->prefix);
    }

    void weigh_earlier(Panels x) const {
        for (int64_t p = 0; p < blocks_ && decays(); ++p)
            by_feature() ? weigh_by_suffix(x.panel(p), factors(p)) : weigh_rows(x.panel(p), weights_->suffix);
    }

    // What a stretch of chunks decays in all, feature by feature.
    void multiply_into(float *stretch_totals) const {
        for (int64_t f = 0; f < blocks_ * kPanel; ++f) stretch_totals[f] *= totals_[f];
    }

    int64_t features() const { return features_; }
    int64_t blocks() const { return blocks_; }

private:
    int64_t form_, features_, blocks_;
    Rows decay_ = {};
    int64_t prepared_ = -1;  // the number of tokens that the scalar weights are for
    float *totals_;
    ScalarWeights *weights_;
    Panels factors_ = {};
    Vec *pairs_ = nullptr;
};

// S = diag(key totals) S diag(value totals) + keys^T values, for panel p of S and of the values.
FULMEN_INLINE void advance_panel(float *state, const Axis &key, const Axis &value, int64_t p, Panels keys,
                                 const float *values) {
    Scale decayed{key.totals(), value.decays() ? value.totals() + p * kPanel : nullptr};
    multiply(state, key.blocks(), decayed, Product<Transposed>{keys, values, 1});
}

// ---- tasks ----

// One sequence of the batch or of the pack.
struct Sequence {
    int64_t batch;  // whose tensors
    int64_t first;  // token
    int64_t tokens;
    int64_t state;  // whose states
};

FULMEN_INLINE int64_t sequences_of(const fulmen_problem &p) { return p.cu_seqlens ? p.sequences : p.batch; }

FULMEN_INLINE Sequence sequence(const fulmen_problem &p, int64_t s) {
    if (p.cu_seqlens) return {0, p.cu_seqlens[s], p.cu_seqlens[s + 1] - p.cu_seqlens[s], s};
    return {s, 0, p.tokens, s};
}

FULMEN_INLINE int64_t longest_sequence(const fulmen_problem &p) {
    int64_t longest = 0;
    for (int64_t s = 0; s < sequences_of(p); ++s) longest = larger(longest, sequence(p, s).tokens);
    return longest;
}

// The inputs of one head of one sequence, with value features from `column` on.
struct Head {
    Rows q, k, v, decay, decay_v;
    int64_t tokens;
};

FULMEN_INLINE Head head_of(const fulmen_problem &p, const Sequence &s, int64_t h, int64_t column) {
    Head head;
    head.q = rows_of(p.q, s.batch, h / (p.heads / p.query_heads)).from(s.first, 0);
    head.k = rows_of(p.k, s.batch, h / (p.heads / p.key_heads)).from(s.first, 0);
    head.v = rows_of(p.v, s.batch, h / (p.heads / p.value_heads)).from(s.first, column);
    head.decay = rows_of(p.decay, p.decay_form == FULMEN_DECAY_HEAD ? 0 : s.batch, h);
    if (p.decay_form != FULMEN_DECAY_HEAD) head.decay = head.decay.from(s.first, 0);
    head.decay_v = rows_of(p.decay_v, s.batch, h).from(s.first, column);
    head.tokens = s.tokens;
    return head;
}

FULMEN_INLINE int64_t useful_threads(const fulmen_problem &p, double flops_per_token) {
    return worthwhile_threads(p.threads, flops_per_token * (double)p.batch * (double)p.tokens * (double)p.heads);
}

// The value features are cut into slices of whole panels when heads alone do not occupy the threads evenly.
struct Slices {
    int64_t count, width;
};

FULMEN_INLINE Slices slices_of(int64_t tasks, int64_t threads, int64_t features) {
    const int64_t blocks = padded(features) / kPanel;
    int64_t count = 1;
    while (tasks * count < 4 * threads && tasks * count % threads != 0 && 4 * count <= blocks) count *= 2;
    const int64_t width = (blocks + count - 1) / count * kPanel;
    return {(features + width - 1) / width, width};
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
