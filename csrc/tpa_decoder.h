// The worker of tensor-product attention: the query of one sample and some of its heads, and softmax over tokens whose
// keys and values are factors.
//
// Heads stand in the lanes of vectors, tokens in rows: so do ak and av in memory, and the softmax is lane by lane.
//
// In pairs, the weights of the values are rounded once, where they become factors. Scores are not: bk bq^T is
// multiplied by aq in floats, since an exponential makes much of a small error, and the product is the smallest of the
// three.
#pragma once

#include "operand.h"
#include "tpa_partial.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int64_t kTokens = 64;   // at a time
constexpr int64_t kColumns = 64;  // of values packed at a time

FULMEN_INLINE int64_t blocks(int64_t n) { return padded(n) / kPanel; }

// Rows that are one head or rank apart.
FULMEN_INLINE Rows ranks_of(const fulmen_tensor &x, int64_t batch, int64_t head) {
    Rows rows = rows_of(x, batch, head);
    rows.stride = x.stride_head;
    return rows;
}

// Whether rows can be multiplied where they are: they are made of Elements, and need no padding.
template <class Element> bool in_place(Rows rows, int64_t size) {
    return rows.element_bytes() * kNumbers<Element> == 4 && size % kPanel == 0 &&
           rows.stride % kNumbers<Element> == 0 && (uintptr_t)rows.data % 4 == 0;
}

// Tokens of one sample; none where last <= first.
struct Tokens {
    int64_t batch, first, last;
};

// Where the factors of a sample's keys and values are, from one head on.
struct TokenFactors {
    Rows ak, av, bk, bv;
    TokenFactors() = default;
    TokenFactors(const fulmen_tpa_decode_call &call, int64_t batch, int64_t head)
        : ak(rows_of(call.ak, batch, head)),
          av(rows_of(call.av, batch, head)),
          bk(rows_of(call.bk, batch, 0)),
          bv(rows_of(call.bv, batch, 0)) {}
};

// Whether to form q: worth it when there are few heads for many ranks. It would have to be rounded to be multiplied in
// pairs, and its factors not.
FULMEN_INLINE bool forms_query(const fulmen_tpa_decode_call &call) {
    const int64_t d = padded(call.key_size), r = padded(call.query_rank), h = padded(call.heads);
    const int64_t at_once = kPairs && call.bk.dtype == FULMEN_BFLOAT16 ? 2 : 1;
    return d * h < d * r / at_once + r * h;
}

// Elements are what keys and values are multiplied as; pairs where q is not formed.
template <class Element> class Decoder {
public:
    Decoder(Arena &arena, const fulmen_tpa_decode_call &call, int64_t heads)
        : call(call),
          heads(heads),
          direct(forms_query(call)),
          bq(arena.panels<Element>(elements<Element>(call.key_size), call.query_rank)),
          aq(arena.panels(call.query_rank, heads)),
          q(direct ? arena.panels<Element>(elements<Element>(call.key_size), heads) : bq),
          keys(arena, kPanel, call.key_size, Use{true, false}),
          of_query(arena.panels(kPanel, larger(heads, call.query_rank))),
          of_heads(direct ? of_query : arena.panels(kPanel, heads)),
          maximum(arena.floats(padded(heads))),
          scores(arena.panels(kTokens, heads)),
          weights(arena.panels<Element>(elements<Element>(kTokens), heads)),
          values(arena.floats(panels_size(elements<Element>(kTokens), kColumns))) {}

    // Goes to a sample and some of its heads, whose query may be there already.
    void begin(int64_t batch, int64_t first_head, int64_t active_heads, bool has_query = false) {
        first = first_head;
        active = active_heads;
        sample = TokenFactors(call, batch, first_head);
        if (!has_query) load_query(ranks_of(call.bq, batch, 0), ranks_of(call.aq, batch, first));
    }

    // The softmax over some tokens of the sample; this worker goes on to `next`.
    void attend(Tokens now, Tokens next, Partial &result) {
        result.clear();
        const TokenFactors of_next(call, next.batch, first);
        for (int64_t t = now.first; t < now.last; t += kTokens) {
            const int64_t count = smaller(kTokens, now.last - t);
            const int64_t panels = (blocks(call.value_size) + kPanelsAtOnce - 1) / kPanelsAtOnce;
            const int64_t steps = blocks(count) * panels * blocks(heads);
            const bool ends = t + count == now.last;
            upcoming = ends ? of_next : sample;
            fetched = ends ? next.first : t + count;
            fetched_last = smaller(ends ? next.last : now.last, fetched + kTokens);
            fetched_at_once = (kTokens + steps - 1) / steps;
            for (int64_t h = 0; h < heads; h += kLanes) store(maximum + h, load(result.maximum + h));
            for (int64_t r = 0; r < count; r += kPanel) score(t, r, smaller<int64_t>(kPanel, count - r));
            weigh(count, result);
            for (int64_t rank = 0; rank < call.value_rank; ++rank) collect(rank, t, count, result);
        }
    }

private:
    const fulmen_tpa_decode_call &call;
    const int64_t heads;
    const bool direct;
    const PanelsOf<Element> bq;  // transposed: D x R
    const Panels aq;             // transposed: R x H
    const PanelsOf<Element> q;   // transposed: D x H, or bq if q is not formed
    const Operand<Element> keys;
    const Panels of_query, of_heads;
    float *const maximum;
    const Panels scores;
    const PanelsOf<Element> weights;
    float *const values;
    int64_t first = 0, active = 0;  // heads
    TokenFactors sample, upcoming;
    int64_t fetched = 0, fetched_last = 0, fetched_at_once = 0;  // tokens

    // The query's factors, transposed.
    void load_query(Rows bq_rows, Rows aq_rows) {
        for (int64_t r = 0; r < call.query_rank; r += kPanel) {
            keys.load(bq_rows.from(r, 0), smaller<int64_t>(kPanel, call.query_rank - r));
            transpose(keys.over_channels(), elements<Element>(call.key_size), bq.panel(r / kPanel));
        }
        // The scale and the mean over ranks go into the smallest factor.
        const float scale = (float)(call.scale / (double)(call.query_rank * call.key_rank));
        for (int64_t h = 0; h < heads; h += kPanel) {
            pack(aq_rows, h, larger<int64_t>(0, smaller<int64_t>(kPanel, active - h)), call.query_rank, of_query);
            float *panel = aq.panel(h / kPanel);
            transpose(of_query, call.query_rank, panel);
            for (int64_t x = 0; x < padded(call.query_rank) * kPanel; x += kLanes)
                store(panel + x, load(panel + x) * scale);
            if constexpr (kNumbers<Element> == 1)
                if (direct)
                    multiply(q.panel(h / kPanel), blocks(call.key_size), Zero(),
                             Product<AsStored>{bq, panel, blocks(call.query_rank)});
        }
    }

    // Prefetches the factors of a few of the next tokens, whose ranks stand side by side.
    struct PrefetchingTokens {
        Decoder *decoder;
        FULMEN_MEMBER void operator()() const { decoder->prefetch_some(); }
    };
    FULMEN_MEMBER void prefetch_some() {
        for (int64_t last = smaller(fetched_last, fetched + fetched_at_once); fetched < last; ++fetched) {
            prefetch(upcoming.bk, fetched, 1, call.key_rank * call.key_size, 0, 1);
            prefetch(upcoming.bv, fetched, 1, call.value_rank * call.value_size, 0, 1);
            prefetch(upcoming.ak, fetched, 1, call.key_rank * active, 0, 1);
            prefetch(upcoming.av, fetched, 1, call.value_rank * active, 0, 1);
        }
    }

    // Calls f with factor(r, h): kLanes heads of row r of one rank of ak or av.
    template <class F> FULMEN_MEMBER void with_heads(Rows rows, int64_t stride_head, F f) const {
        with_type(rows.dtype, [&](auto type) {
            typedef typename decltype(type)::Stored Stored;
            if (stride_head == 1)
                f([&](int64_t r, int64_t h) { return load_some(type, (const Stored *)rows.row(r) + h, active - h); });
            else
                f([&](int64_t r, int64_t h) {
                    Stored some[kLanes] = {};
                    for (int64_t l = 0; l < kLanes && h + l < active; ++l)
                        some[l] = ((const Stored *)rows.row(r))[(h + l) * stride_head];
                    return load_as(type, some);
                });
        });
    }

    // The scores of up to 16 tokens, and what is now the largest.
    void score(int64_t token, int64_t row, int64_t count) {
        for (int64_t rank = 0; rank < call.key_rank; ++rank) {
            multiply_keys(sample.bk.from(token + row, rank * call.bk.stride_head), count);
            with_heads(sample.ak.from(token + row, rank), call.ak.stride_head, [&](auto factor) {
                for (int64_t h = 0; h < heads; h += kLanes) {
                    const float *products = of_heads.at(0, h);
                    float *column = scores.at(row, h);
                    Vec largest = load(maximum + h);
                    for (int64_t r = 0; r < count; ++r) {
                        Vec score = load(products + r * kPanel) * factor(r, h);
                        if (rank > 0) score += load(column + r * kPanel);
                        store(column + r * kPanel, score);
                        largest = larger(largest, score);
                    }
                    if (rank + 1 == call.key_rank) store(maximum + h, largest);
                }
            });
        }
    }

    // of_heads, of up to 16 rows of bk.
    void multiply_keys(Rows rows, int64_t count) const {
        auto by_query = [&](auto left) {
            for_each_panels(blocks(direct ? heads : call.query_rank), [&](int64_t p, auto some) {
                multiply_apart<some.kCount>(
                    of_query, p, 0, Zero(),
                    Times<some.kCount, decltype(left)>{left, panels_at<some.kCount>(q, p), blocks(call.key_size)});
            });
        };
        if (count == kPanel && in_place<Element>(rows, call.key_size)) {
            by_query(InPlaceOf<Element>{(const Element *)rows.data, rows.stride / kNumbers<Element>});
        } else {
            keys.load(rows, count);
            by_query(AsStoredOf<Element>(keys.over_channels()));
        }
        if (direct) return;
        for_each_panels(blocks(heads), [&](int64_t p, auto some) {
            multiply<some.kCount>(
                of_heads, p, 1, Zero(),
                Times<some.kCount, AsStored>{of_query, panels_at<some.kCount>(aq, p), blocks(call.query_rank)});
        });
    }

    // Scores become weights e^(score - maximum).
    void weigh(int64_t count, Partial &result) const {
        for (int64_t h = 0; h < heads; h += kLanes) {
            float *column = scores.at(0, h);
            const Vec from = origin(load(maximum + h));
            const Vec kept = exp_of_negative(load(result.maximum + h) - from);
            Vec sum = load(result.sum + h) * kept;
            for (int64_t r = 0; r < count; ++r) {
                const Vec weight = exp_of_negative(load(column + r * kPanel) - from);
                store(column + r * kPanel, weight);
                sum += weight;
            }
            store(result.maximum + h, load(maximum + h));
            store(result.sum + h, sum);
            store(result.weight + h, kept);
        }
    }

    // Adds the weighed values of one rank.
    void collect(int64_t rank, int64_t token, int64_t count, Partial &result) {
        const int64_t depth = blocks(count);
        with_heads(sample.av.from(token, rank), call.av.stride_head, [&](auto factor) {
            auto weight = [&](int64_t r, int64_t h) {
                return r < count ? load(scores.at(r, h)) * factor(r, h) : Vec{};
            };
            for (int64_t r = 0; r < depth * kDepth<Element>; ++r)
                for (int64_t h = 0; h < heads; h += kLanes)
                    if constexpr (kNumbers<Element> == 1)
                        store(weights.at(r, h), weight(r, h));
                    else
                        store(weights.at(r, h), lane_pairs(weight(2 * r, h), weight(2 * r + 1, h)));
        });
        const Rows rows = sample.bv.from(token, rank * call.bv.stride_head);
        if constexpr (kNumbers<Element> == 1)
            if (count % kPanel == 0 && in_place<Element>(rows, call.value_size)) {
                for_each_panels(blocks(call.value_size), [&](int64_t p, auto some) {
                    add<some.kCount>(rank, p, Columns{(const float *)rows.data + p * kPanel, rows.stride}, depth,
                                     result);
                });
                return;
            }
        for (int64_t e = 0; e < call.value_size; e += kColumns) {
            Arena arena(values);
            const Operand<Element> packed(arena, kTokens, smaller(kColumns, call.value_size - e), Use{false, true});
            packed.load(rows.from(0, e), count);
            for_each_panels(blocks(packed.size), [&](int64_t p, auto some) {
                add<some.kCount>(rank, e / kPanel + p, panels_at<some.kCount>(packed.over_tokens(), p), depth, result);
            });
        }
    }

    // Adds some panels of them, and meanwhile prefetches the tokens that come next.
    template <int Count, class Right>
    void add(int64_t rank, int64_t panel, Right right, int64_t depth, Partial &result) {
        const Product<TransposedOf<Element>, Right, PrefetchingTokens> product{weights, right, depth, {this}};
        for (int64_t block = 0; block < blocks(heads); ++block)
            rank == 0 ? multiply_apart<Count>(result.output, panel, block, Scale{result.weight, nullptr}, product)
                      : multiply_apart<Count>(result.output, panel, block, Add(), product);
    }
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
