// Rows of a head as factors of products: in floats, or in pairs of bfloat16 (kPairs).
//
// A product over channels takes rows as they stand, and a pair is two channels of a token. A product over tokens takes
// them transposed, and a pair is two tokens of a channel. Floats serve both ways.
#pragma once

#include "arena.h"
#include "gemm.h"
#include "rows.h"
#include "tiles.h"

namespace fulmen {
namespace FULMEN_ISA {

template <class Element> FULMEN_INLINE int64_t elements(int64_t n) {
    return (n + kNumbers<Element> - 1) / kNumbers<Element>;
}

// Calls f with the element in which inputs of a dtype are multiplied.
template <class F> FULMEN_INLINE auto with_element(int64_t dtype, F f) {
    if constexpr (kPairs)
        if (dtype == FULMEN_BFLOAT16) return f(Pair());
    return f(float());
}

// As many of 2 kLanes bfloat16 as there are; the rest is 0.
FULMEN_INLINE BitVec load_some_pairs(const uint16_t *from, int64_t n) {
    if (n >= 2 * kLanes) return load_pairs(from);
#if defined(__AVX512BF16__)
    return (BitVec)_mm512_maskz_loadu_epi16(_cvtu32_mask32((1u << n) - 1), from);
#else
    uint16_t some[2 * kLanes] = {};
    for (int64_t l = 0; l < n; ++l) some[l] = from[l];
    return load_pairs(some);
#endif
}

// A panel of floats rounded to pairs, as a product rounds one that it computes.
template <class Rounded> static inline void round_panel(const float *from, int64_t rows, const Rounded &to) {
    for (int64_t r = 0; r < rows; r += 2) {
        Vec both[2][kPanel / kLanes];
        for (int x = 0; x < 2 * kPanel; x += kLanes)
            both[x / kPanel][x % kPanel / kLanes] = load(from + r * kPanel + x);
        to.put(both, r, 0);
    }
}
static inline void round_rows(const float *from, int64_t rows, Pair *to) {
    round_panel(from, rows, PairsOfRows<>{to, 0});
}

// The same of columns, in panels.
static inline void round_columns(Panels from, int64_t rows, int64_t columns, PanelsOf<Pair> to) {
    for (int64_t c = 0; c < columns; c += 2 * kPanel)
        for (int64_t r = 0; r < rows; ++r)
            for (int v = 0; v < kPanel; v += kLanes) {
                const float *row = from.at(r, c + 2 * v);
                const bool more = c + 2 * v + kLanes < padded(columns);
                store(to.at(r, c / 2 + v), in_pairs(load(row), more ? load(from.at(r, c + 2 * v + kLanes)) : Vec{}));
            }
}

// A block as a left factor, as it stands or transposed: floats where they are, or rounded to pairs in `memory`.
FULMEN_INLINE AsStored as_stored(const float *block, float *) { return Panels{(float *)block, 0}; }
FULMEN_INLINE Transposed transposed(const float *block, float *) { return Panels{(float *)block, 0}; }
FULMEN_INLINE AsStoredOf<Pair> as_stored(const float *block, Pair *memory) {
    round_columns(Panels{(float *)block, 0}, kPanel, kPanel, {memory, 0});
    return PanelsOf<Pair>{memory, 0};
}
FULMEN_INLINE TransposedOf<Pair> transposed(const float *block, Pair *memory) {
    round_rows(block, kPanel, memory);
    return PanelsOf<Pair>{memory, 0};
}

// The same of a matrix of whole blocks as a left factor, and of a panel of rows as a right one.
FULMEN_INLINE Panels left_factor(Panels x, int64_t, int64_t, Panels) { return x; }
FULMEN_INLINE const float *right_factor(const float *panel, int64_t, float *) { return panel; }
FULMEN_INLINE PanelsOf<Pair> left_factor(Panels x, int64_t rows, int64_t columns, PanelsOf<Pair> memory) {
    round_columns(x, rows, columns, memory);
    return memory;
}
FULMEN_INLINE const Pair *right_factor(const float *panel, int64_t rows, Pair *memory) {
    round_rows(panel, rows, memory);
    return memory;
}

// How rows are multiplied: over channels, over tokens, and over tokens once a weight for each token has been applied.
// `in_floats`: what weighs them is not a number for each token, and they are rounded afterwards.
struct Use {
    bool over_channels, over_tokens, weighed = false, in_floats = false;
};

FULMEN_INLINE void pack_all(Rows rows, int64_t count, int64_t size, Panels to) {
    for (int64_t r = 0; r < count; r += kPanel)
        pack(rows, r, smaller<int64_t>(kPanel, count - r), size, {to.data + r * kPanel, to.stride});
}

// Some tokens, refilled for each chunk. Padding is zero.
template <class Element> class Operand;

template <> class Operand<float> {
public:
    const int64_t size;
    Operand(Arena &arena, int64_t tokens, int64_t size, Use) : size(size), panels(arena.panels(tokens, size)) {}
    Panels over_channels() const { return panels; }
    Panels over_tokens() const { return panels; }
    Panels weighed() const { return panels; }    // by their owner,
    Panels in_floats() const { return panels; }  // who finds them here
    void round(int64_t = kPanel) const {}

    void load(const Rows &rows, int64_t count, const float * = nullptr) const { pack_all(rows, count, size, panels); }

private:
    const Panels panels;
};

template <> class Operand<Pair> {
public:
    const int64_t size;
    Operand(Arena &arena, int64_t tokens, int64_t size, Use use)
        : size(size),
          floats(use.in_floats ? arena.panels(tokens, size) : Panels{}),
          by_channel(use.over_channels ? arena.panels<Pair>(tokens, elements<Pair>(size)) : PanelsOf<Pair>{}),
          by_token(use.over_tokens ? arena.panels<Pair>(elements<Pair>(tokens), size) : PanelsOf<Pair>{}),
          by_token_weighed(use.weighed ? arena.panels<Pair>(elements<Pair>(tokens), size) : by_token),
          use(use) {}
    PanelsOf<Pair> over_channels() const { return by_channel; }
    PanelsOf<Pair> over_tokens() const { return by_token; }
    PanelsOf<Pair> weighed() const { return by_token_weighed; }  // or over_tokens() where nothing weighs them
    Panels in_floats() const { return floats; }

    // Rows of bfloat16, with a weight for each token of a chunk; absent ones are all zero, and so are those up to a
    // multiple of so many. Those in floats wait for round().
    void load(const Rows &rows, int64_t count, const float *weights = nullptr, int64_t multiple = kPanel) const {
        if (use.in_floats)
            pack_all(rows, count, size, floats);
        else
            fill_pairs(rows.present() ? count : 0, to_multiple(count, multiple), weights, [rows](int64_t r) {
                return
                    [row = (const uint16_t *)rows.row(r)](int64_t f, int64_t n) { return load_some_pairs(row + f, n); };
            });
    }

    // Rows of bfloat16 times others, element by element, rounded. Sizes are whole panels.
    void load_products(const Rows &a, const Rows &b, int64_t count, int64_t multiple = kPanel) const {
        fill_pairs(count, to_multiple(count, multiple), nullptr, [a, b](int64_t r) {
            return [of_a = (const uint16_t *)a.row(r), of_b = (const uint16_t *)b.row(r)](int64_t f, int64_t n) {
                auto product = [&](int64_t x) {
                    return x < n ? load_as(BFloat16(), of_a + f + x) * load_as(BFloat16(), of_b + f + x) : Vec{};
                };
                return in_pairs(product(0), product(kLanes));
            };
        });
    }

    // Rows in floats, a chunk of them unless said, to pairs.
    void round(int64_t count = kPanel, int64_t multiple = kPanel) const {
        if (use.in_floats)
            fill_pairs(count, to_multiple(count, multiple), nullptr, [x = floats](int64_t r) {
                return [x, r](int64_t f, int64_t n) {
                    return in_pairs(FULMEN_ISA::load(x.at(r, f)),
                                    kLanes < n ? FULMEN_ISA::load(x.at(r, f + kLanes)) : Vec{});
                };
            });
    }

private:
    static int64_t to_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

    const Panels floats;
    const PanelsOf<Pair> by_channel, by_token, by_token_weighed;
    const Use use;

    // What a token's channels are stored for is known where this is compiled: with tests between the stores, packing
    // would take half as long again.
    template <class F> void fill_pairs(int64_t count, int64_t rows, const float *weights, F row) const {
        auto fill = [&](auto over_channels, auto over_tokens, auto weighed) {
            fill_pairs<over_channels, over_tokens, weighed>(count, rows, weights, row);
        };
        const std::true_type yes;
        const std::false_type no;
        if (use.weighed)
            use.over_channels ? use.over_tokens ? fill(yes, yes, yes) : fill(yes, no, yes)
            : use.over_tokens ? fill(no, yes, yes)
                              : fill(no, no, yes);
        else
            use.over_channels ? use.over_tokens ? fill(yes, yes, no) : fill(yes, no, no) : fill(no, yes, no);
    }

    // row(token)(channel, n) is a vector of pairs of channels, of which there are n. Tokens from `count` on are zero.
    template <bool Channels, bool Tokens, bool Weighed, class F>
    void fill_pairs(int64_t count, int64_t rows, const float *weights, F row) const {
        const Operand x = *this;  // a copy, which no store can change
        for (int64_t r = 0; r < rows; r += 2) {
            const auto even = row(r), odd = row(r + 1);
            const bool both = r + 1 < count, one = r < count;
            Pair *const of_channels = x.by_channel.data + r * kPanel;
            Pair *const of_tokens = x.by_token.data + r / 2 * kPanel;
            Pair *const of_weighed = x.by_token_weighed.data + r / 2 * kPanel;
            auto put = [&](int64_t f, int64_t n, BitVec first, BitVec second) {
                if (Channels) {
                    Pair *const to = of_channels + f / (2 * kPanel) * x.by_channel.stride + f / 2 % kPanel;
                    store(to, first);
                    store(to + kPanel, second);
                }
                if (!Tokens && !Weighed) return;
                pair_rows(first, second);
                for (int v = 0; v < 2; ++v, first = second)
                    if (const int64_t c = f + v * kLanes; v == 0 || v * kLanes < n) {
                        const int64_t panel = c / kPanel, column = c % kPanel;
                        if (Tokens) store(of_tokens + panel * x.by_token.stride + column, first);
                        if (Weighed)
                            store(of_weighed + panel * x.by_token_weighed.stride + column,
                                  weights ? Operand::weighed(first, weights, r) : first);
                    }
            };
            int64_t f = 0;
            for (; both && f + 2 * kLanes <= x.size; f += 2 * kLanes)
                put(f, 2 * kLanes, even(f, 2 * kLanes), odd(f, 2 * kLanes));
            for (; f < x.size; f += 2 * kLanes) {
                const int64_t n = x.size - f;
                put(f, padded(n), one ? even(f, n) : BitVec{}, both ? odd(f, n) : BitVec{});
            }
        }
    }

    FULMEN_INLINE BitVec weighed(BitVec tokens, const float *weights, int64_t r) {
        return lane_pairs(firsts(tokens) * weights[r], seconds(tokens) * weights[r + 1]);
    }
};

// The same in whole tiles.
template <> class Operand<Tile> : public Operand<Pair> {
public:
    using Operand<Pair>::Operand;
    void load(const Rows &rows, int64_t count) const { Operand<Pair>::load(rows, count, nullptr, kTileDepth); }
    void load_products(const Rows &a, const Rows &b, int64_t count) const {
        Operand<Pair>::load_products(a, b, count, kTileDepth);
    }
    void round(int64_t count) const { Operand<Pair>::round(count, kTileDepth); }
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
