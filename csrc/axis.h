// The decay of one axis, keys or values, over the current chunk.
#pragma once

#include "arena.h"
#include "decay.h"
#include "gemm.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {

// begin() prepares the weights of a chunk; the rest applies them. Where they are the same for all channels, a chunk may
// be several blocks of 16 tokens, which have weights each.
//
// float32 knows a total of 1 - 1e-5 to 3e-8, and over thousands of chunks the same error would multiply the state again
// and again. So what rounding one total leaves out goes into the next one: the product of many is as good as one of
// them.
class Axis {
public:
    Axis(Arena &arena, int64_t form, int64_t size, int64_t tokens = kChunk)
        : form_(form), size_(size), blocks_(padded(size) / kPanel), token_blocks_(tokens / kChunk) {
        totals_ = arena.floats(padded(size));
        owed_ = arena.floats(padded(size));
        weights_ = (ScalarWeights *)arena.floats(token_blocks_ * (int64_t)sizeof(ScalarWeights) / 4);
        if (by_channel()) {
            factors_ = arena.panels(kChunk, size);
            pairs_ = (Vec *)arena.floats(kBlock * kLanes);
        }
    }

    bool by_channel() const { return form_ == FULMEN_DECAY_CHANNEL; }
    bool grows() const { return grows_; }  // whether a log-decay was above 0
    bool decays() const { return form_ != FULMEN_DECAY_NONE; }
    const float *totals() const { return totals_; }  // one per channel
    const ScalarWeights &weights(int64_t block = 0) const { return weights_[block]; }

    // `delayed`: what a token decays, it does to the state that leaves it and not to the one that enters. The rows
    // begin with the token before the first, then, whose decay is not read: that of the last one would be the next.
    void start(Rows log_decay, bool delayed = false) {
        log_decay_ = log_decay;
        delayed_ = delayed;
        prepared_ = -1;
    }

    // Before a walk's first chunk.
    void enter() {
        for (int64_t f = 0; f < blocks_ * kPanel; ++f) owed_[f] = 0;
    }

    void begin(int64_t first, int64_t count) {
        if (by_channel()) {
            pack(log_decay_, first, count, size_, factors_);
            IntVec positive = {};
            for (int64_t p = 0; p < blocks_; ++p)
                channel_factors(factors_.panel(p), totals_ + p * kPanel, owed_ + p * kPanel, positive);
            grows_ |= any(positive);
            return;
        }
        prepare_scalar_weights(first, count);
        double exact = 1 + (double)owed_[0];
        for (int64_t b = 0; b < token_blocks_; ++b) exact *= weights_[b].total;
        const float total = (float)exact;
        const double rest = exact - total;
        owed_[0] = fabs(rest) < 0x1p-23 * total ? (float)(rest / total) : 0.0f;  // of a normal number
        for (int64_t f = 0; f < blocks_ * kPanel; ++f) totals_[f] = total;
    }

    // pairs[j][i] = later_i . earlier_j with the weight between the two, 0 for i < j.
    // later_transposed is later's transpose, one panel; only the scalar forms read it, and only they take pairs.
    template <class Element>
    void pair_products(PanelsOf<Element> later, PanelsOf<Element> earlier, const Element *later_transposed,
                       float *pairs) const {
        if constexpr (std::is_same<Element, float>::value)
            if (by_channel()) return channel_pair_products(later, earlier, pairs);
        multiply(pairs, 1, Zero{}, Product<AsStoredOf<Element>>{earlier, later_transposed, blocks_});
        weigh_pairs(pairs, weights_->pair);
    }

    const float *factors(int64_t p) const { return factors_.panel(p); }

    void weigh_later(Panels x) const {
        for (int64_t p = 0; p < blocks_ && decays(); ++p)
            by_channel() ? weigh_by_prefix(x.panel(p), factors(p)) : weigh_rows(x.panel(p), weights_->prefix);
    }

    void weigh_earlier(Panels x) const {
        for (int64_t p = 0; p < blocks_ && decays(); ++p)
            by_channel() ? weigh_by_suffix(x.panel(p), factors(p)) : weigh_rows(x.panel(p), weights_->suffix);
    }

    int64_t size() const { return size_; }
    int64_t blocks() const { return blocks_; }

private:
    void channel_pair_products(Panels later, Panels earlier, float *pairs) const {
        memset(pairs_, 0, kBlock * sizeof(Vec));
        for (int64_t p = 0; p < blocks_; ++p)
            channel_pairs(later.panel(p), earlier.panel(p), factors_.panel(p), pairs_);
        for (int i = 0; i < kChunk; ++i)
            for (int j = 0; j < kChunk; ++j) pairs[j * kPanel + i] = j <= i ? sum_lanes(pairs_[i * kChunk + j]) : 0.0f;
    }

    void prepare_scalar_weights(int64_t first, int64_t count) {
        const bool varies = form_ == FULMEN_DECAY_TOKEN;
        if (!varies && prepared_ == count) return;
        prepared_ = count;
        for (int64_t b = 0; b < token_blocks_; ++b) {
            const int64_t n = larger<int64_t>(0, smaller<int64_t>(kChunk, count - b * kChunk));
            float log_decay[kChunk + 1] = {};
            const int64_t unread = delayed_ && first + b * kChunk == 0 ? smaller<int64_t>(1, n) : 0;
            if (varies)
                gather(log_decay_, first + b * kChunk + unread, n - unread, log_decay + unread);
            else if (decays()) {
                float value[kChunk];
                gather(log_decay_, 0, 1, value);
                for (int64_t t = 0; t < n; ++t) log_decay[t] = value[0];
            }
            for (int64_t t = 0; t < kChunk; ++t) grows_ |= log_decay[t] > 0;
            scalar_weights(log_decay, weights_[b]);
        }
    }

    int64_t form_, size_, blocks_, token_blocks_;
    Rows log_decay_ = {};
    bool delayed_ = false, grows_ = false;
    int64_t prepared_ = -1;  // the number of tokens that the scalar weights are for
    float *totals_;
    float *owed_;  // what rounding the last total left out, relative to it; the scalar forms have one
    ScalarWeights *weights_;
    Panels factors_ = {};
    Vec *pairs_ = nullptr;
};

// S = diag(key totals) S diag(value totals), for panel p of S.
FULMEN_INLINE Scale decayed(const Axis &key, const Axis &value, int64_t p) {
    return {key.totals(), value.decays() ? value.totals() + p * kPanel : nullptr};
}
FULMEN_INLINE void decay_panel(float *state, const Axis &key, const Axis &value, int64_t p) {
    multiply(state, key.blocks(), decayed(key, value, p));
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
