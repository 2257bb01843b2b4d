// The decay of one axis, keys or values, over the current chunk.
#pragma once

#include "arena.h"
#include "decay.h"
#include "gemm.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {

// begin() prepares the weights of a chunk; the rest applies them. A chunk may be several blocks of 16 tokens, which
// have weights each.
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
            factors_ = arena.panels(tokens, size);
            if (token_blocks_ > 1) block_totals_ = arena.floats(token_blocks_ * padded(size));
        }
    }

    bool by_channel() const { return form_ == FULMEN_DECAY_CHANNEL; }
    bool grows() const { return grows_; }  // whether a log-decay was above 0
    bool decays() const { return form_ != FULMEN_DECAY_NONE; }
    const float *totals() const { return totals_; }  // one per channel
    const ScalarWeights &weights(int64_t block = 0) const { return weights_[block]; }
    // Of channels from a panel on, where there is a decay of each.
    const float *block_totals(int64_t block, int64_t p) const { return block_totals_ + (block * blocks_ + p) * kPanel; }

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
            prepare_channel_weights(first, count);
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
            if (by_channel()) {
                float by_later[kBlock];
                channel_pair_products(later, earlier, by_later);
                return transpose_block(by_later, pairs);
            }
        multiply(pairs, 1, Zero{}, Product<AsStoredOf<Element>>{earlier, later_transposed, blocks_});
        weigh_pairs(pairs, weights_->pair);
    }

    // The same transposed, [i][j], of a block of tokens with a decay of each channel.
    void channel_pair_products(Panels later, Panels earlier, float *pairs, int64_t block = 0) const {
        float transposed[kBlock];
        memset(pairs, 0, sizeof transposed);
        for (int64_t p = 0; p < blocks_; ++p) {
            transpose_block(earlier.panel(p), transposed);
            channel_pairs(later.panel(p), transposed, factors(p, block), pairs);
        }
        for (int i = 0; i < kPanel; ++i)
            for (int j = 0; j < kPanel; j += kLanes)
                store(pairs + i * kPanel + j, select(lane_numbers() + j <= i, load(pairs + i * kPanel + j), Vec{}));
    }

    const float *factors(int64_t p, int64_t block = 0) const { return factors_.panel(p) + block * kBlock; }

    void weigh_later(Panels x, int64_t block = 0) const {
        for (int64_t p = 0; p < blocks_ && decays(); ++p)
            by_channel() ? weigh_by_prefix(x.panel(p), factors(p, block))
                         : weigh_rows(x.panel(p), weights_[block].prefix);
    }

    void weigh_earlier(Panels x, int64_t block = 0) const {
        for (int64_t p = 0; p < blocks_ && decays(); ++p)
            by_channel() ? weigh_by_suffix(x.panel(p), factors(p, block))
                         : weigh_rows(x.panel(p), weights_[block].suffix);
    }

    int64_t size() const { return size_; }
    int64_t blocks() const { return blocks_; }

private:
    void prepare_channel_weights(int64_t first, int64_t count) {
        IntVec positive = {};
        for (int64_t b = 0; b < token_blocks_; ++b)
            pack(log_decay_, first + b * kChunk, tokens_of_block(b, count), size_,
                 {factors_.data + b * kBlock, factors_.stride});
        for (int64_t p = 0; p < blocks_; ++p) {
            Row sum = {};
            for (int64_t b = 0; b < token_blocks_; ++b) {
                const Row own = channel_factors(factors_.panel(p) + b * kBlock, positive);
                for (int v = 0; v < kVecs && token_blocks_ > 1; ++v)
                    store(block_totals_ + (b * blocks_ + p) * kPanel + v * kLanes, exp(own.x[v]));
                sum = sum + own;
            }
            channel_totals(sum, totals_ + p * kPanel, owed_ + p * kPanel);
        }
        grows_ |= any(positive);
    }

    void prepare_scalar_weights(int64_t first, int64_t count) {
        const bool varies = form_ == FULMEN_DECAY_TOKEN;
        if (!varies && prepared_ == count) return;
        prepared_ = count;
        for (int64_t b = 0; b < token_blocks_; ++b) {
            const int64_t n = tokens_of_block(b, count);
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

    static int64_t tokens_of_block(int64_t block, int64_t count) {
        return larger<int64_t>(0, smaller<int64_t>(kChunk, count - block * kChunk));
    }

    int64_t form_, size_, blocks_, token_blocks_;
    Rows log_decay_ = {};
    bool delayed_ = false, grows_ = false;
    int64_t prepared_ = -1;  // the number of tokens that the scalar weights are for
    float *totals_;
    float *owed_;  // what rounding the last total left out, relative to it; the scalar forms have one
    ScalarWeights *weights_;
    Panels factors_ = {};
    float *block_totals_ = nullptr;  // where a chunk is several blocks
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
