// The worker that has one head's state in its cache and takes it from chunk to chunk:
//
//     S_out = e^{b_C} S_in + sum over j of (e^{b_C - b_j} k_j) v_j^T
//
// Panels of the state are 16 value channels wide. Workers that also read the state build on this one.
//
// Elements are what rows are multiplied as. Pairs are rounded once: a row where a weight is applied to it. Where one
// decay serves all channels, that is a number for each token while its rows are loaded; a decay per channel weighs rows
// in floats first, as it weighs all rows of floats.
#pragma once

#include "axis.h"
#include "operand.h"
#include "state.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

template <class Element> class StateWorker {
public:
    static constexpr int64_t kTokens = kChunk;

    StateWorker(Arena &arena, const fulmen_problem &p, int64_t columns)
        : StateWorker(arena, p, columns, advancing_keys(p), advancing_values()) {}

    void start(const Head &head) {
        in = head;
        key.start(head.log_decay);
        value.start(head.log_decay_v);
    }

    // Before a walk's first chunk; without a state, what it holds does not matter.
    void enter() {
        key.enter();
        value.enter();
    }
    void enter(Matrix given) {
        enter();
        load_state(given, key.size(), value.size(), state);
    }
    void enter(Panels given) {
        enter();
        memcpy(state.data, given.data, 4 * (size_t)panels_size(key.size(), value.size()));
    }

    // The state alone, without reading it, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        load_keys_and_values(t, smaller<int64_t>(kChunk, last - t));
        weigh_keys();
        if constexpr (kInFloats) value.weigh_earlier(v.in_floats());
        soon = {};
        expect_keys_and_values(t + kAhead);
        soon.spread(advancing_steps());
        for_each_panels(value.blocks(), [&](int64_t p, auto some) {
            advance_panels(p, decayed(key, value, p), k, panels_at<some.kCount>(v.over_tokens(), p));
        });
    }

    bool grows() const { return key.grows() || value.grows(); }

    Axis key, value;
    Panels state;

protected:
    static constexpr bool kInFloats = kNumbers<Element> == 1;

    StateWorker(Arena &arena, const fulmen_problem &p, int64_t columns, Use keys, Use values)
        : StateWorker(arena, p, columns, Operand<Element>(arena, kChunk, p.key_size, keys), values) {}
    StateWorker(Arena &arena, const fulmen_problem &p, int64_t columns, Operand<Element> keys, Use values)
        : key(arena, p.decay_form, p.key_size),
          value(arena, p.decay_v_form, columns),
          state(arena.panels(p.key_size, columns)),
          k(keys),
          v(arena, kChunk, columns, values) {}

    // What advances the state, beside what else a worker multiplies.
    static Use advancing_keys(const fulmen_problem &p, Use use = {}) {
        use.in_floats |= by_channel(p.decay_form);
        (decays(p.decay_form) ? use.weighed : use.over_tokens) = true;
        return use;
    }
    static Use advancing_values(Use use = {}) {
        use.over_tokens = true;
        return use;
    }

    // Whether keys and queries are weighed in floats, and not a token at a time while they are loaded.
    FULMEN_MEMBER bool weighs_in_floats() const { return kInFloats || key.by_channel(); }

    void load_keys_and_values(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        k.load(in.k.from(t, 0), count, key.weights().suffix);
        v.load(in.v.from(t, 0), count);
    }

    // For the state that leaves the chunk.
    void weigh_keys() {
        if (weighs_in_floats()) key.weigh_earlier(k.in_floats());
        k.round();
    }

    // S = start(S) + keys^T values, for some panels of S from p on, and as many of the values.
    template <class Start, int Count>
    FULMEN_MEMBER void advance_panels(int64_t p, const Start &start, const Operand<Element> &keys,
                                      PanelOf<Element, Count> values) {
        multiply<Count>(state, p, key.blocks(), start,
                        FirstBlock<TransposedOf<Element>, Count>{keys.weighed(), values, {&soon}});
        for (int i = 0; i < Count; ++i) {
            clear_padding(state, key.size(), value.size(), p + i);
            if (key.size() % kPanel != 0 || (p + i + 1) * kPanel > value.size()) round_again(p, i, start);
        }
    }
    // What the product rounded still has the padding that was cleared.
    FULMEN_MEMBER void round_again(int64_t, int, const Scale &) const {}
    template <class Rounded>
    FULMEN_MEMBER void round_again(int64_t p, int i, const ScaleAndRound<Rounded> &start) const {
        round_state_panel(p + i, start.rounded.one(i));
    }
    template <class Rounded> FULMEN_MEMBER void round_state_panel(int64_t p, const Rounded &rounded) const {
        round_panel(state.panel(p), key.blocks() * kPanel, rounded);
    }

    // result = (left * values^T)^T: [token][key channel]; left is the state, as floats or rounded along its rows. Both
    // others are transposed, one panel.
    void state_times(PanelsOf<Element> left, const Element *values, float *scratch, Panels result) const {
        multiply(scratch, key.blocks(), Zero{}, Product<AsStoredOf<Element>>{left, values, value.blocks()});
        for (int64_t p = 0; p < key.blocks(); ++p) transpose_block(scratch + p * kBlock, result.panel(p));
    }

    // What the chunk at token t needs is prefetched while the state is advanced, which calls so many times for some of
    // it.
    void expect(Rows rows, int64_t t, int64_t size) {
        if (t >= 0) soon.add(rows, size, t, smaller<int64_t>(kChunk, in.tokens - t));
    }
    void expect_values(int64_t t) {
        expect(in.v, t, value.size());
        if (key.by_channel()) expect(in.log_decay, t, key.size());
        if (value.by_channel()) expect(in.log_decay_v, t, value.size());
    }
    void expect_keys_and_values(int64_t t) {
        expect(in.k, t, key.size());
        expect_values(t);
    }
    int64_t advancing_steps() const { return (value.blocks() + kPanelsAtOnce - 1) / kPanelsAtOnce * key.blocks(); }

    // The same where panels are not multiplied several at once: panel p's share.
    FULMEN_MEMBER void prefetch_share(Rows rows, int64_t t, int64_t size, int64_t p, int64_t heads = 1) const {
        if (t >= 0) prefetch(rows, t, smaller<int64_t>(kChunk, in.tokens - t), size, p, heads * value.blocks());
    }
    FULMEN_MEMBER void prefetch_keys_and_values(int64_t t, int64_t p) const {
        prefetch_share(in.k, t, key.size(), p);
        prefetch_values(t, p);
    }
    FULMEN_MEMBER void prefetch_values(int64_t t, int64_t p) const {
        prefetch_share(in.v, t, value.size(), p);
        if (key.by_channel()) prefetch_share(in.log_decay, t, key.size(), p);
        if (value.by_channel()) prefetch_share(in.log_decay_v, t, value.size(), p);
    }

    Head in = {};
    Prefetches soon;
    Operand<Element> k, v;
};

// A worker that also reads its state, which in pairs is a factor of products: rounded, all of it before a walk's first
// chunk, and then each panel as it is advanced.
template <class Element> class ReadingWorker : public StateWorker<Element> {
    typedef StateWorker<Element> Base;

public:
    using Base::key, Base::state, Base::value;

    void round_state() {
        if constexpr (!kInFloats)
            for (int64_t p = 0; p < value.blocks(); ++p) this->round_state_panel(p, PairsOfRows<>{factor.panel(p), 0});
    }

protected:
    using Base::kInFloats;

    ReadingWorker(Arena &arena, const fulmen_problem &p, int64_t columns, Operand<Element> keys, Use values)
        : Base(arena, p, columns, keys, values), factor(factor_of_state(arena)) {}

    // S = decayed S + keys^T values, for some panels of S from p on, and as many of the values.
    template <int Count>
    FULMEN_MEMBER void advance_panels(int64_t p, const Operand<Element> &keys, PanelOf<Element, Count> values) {
        if constexpr (kInFloats)
            Base::advance_panels(p, decayed(key, value, p), keys, values);
        else
            Base::advance_panels(p, ScaleAndRound<PairsOfRows<Count>>{key.totals(), {factor.panel(p), factor.stride}},
                                 keys, values);
    }

    const PanelsOf<Element> factor;  // the state, in pairs rounded

private:
    PanelsOf<Element> factor_of_state(Arena &arena) const {
        if constexpr (kInFloats)
            return state;
        else
            return arena.panels<Pair>(elements<Pair>(key.size()), value.size());
    }
};

// Calls f with the element of a call's workers: pairs unless a decay of the values forbids it, or channels are so few
// that the roundings of their factors do not average out. (These are padded to a panel anyway.)
template <class F> FULMEN_INLINE auto with_element(const fulmen_problem &p, F f) {
    const bool floats = decays(p.decay_v_form) || p.key_size < kPanel || p.value_size < kPanel;
    return with_element(floats ? (int64_t)FULMEN_FLOAT32 : p.k.dtype, f);
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
