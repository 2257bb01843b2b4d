// Rows of a head as factors of products: in floats, or in pairs of bfloat16 (kPairs).
//
// A product over channels takes rows as they stand, and a pair is two channels of a token. A product over tokens takes
// them transposed, and a pair is two tokens of a channel. Floats serve both ways.
#pragma once

#include <type_traits>

#include "arena.h"
#include "gemm.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {

// How many numbers along the summed axis one element holds.
template <class Element> constexpr int64_t kNumbers = std::is_same<Element, Pair>::value ? 2 : 1;
template <class Element> FULMEN_INLINE int64_t elements(int64_t n) {
    return (n + kNumbers<Element> - 1) / kNumbers<Element>;
}
// The depth of a product over n numbers.
template <class Element> FULMEN_INLINE int64_t depth_blocks(int64_t n) { return padded(elements<Element>(n)) / kPanel; }

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

struct Use {
    bool over_channels, over_tokens;
};

// Some tokens, refilled for each chunk. Padding is zero.
template <class Element> class Operand;

template <> class Operand<float> {
public:
    const int64_t size;
    Operand(Arena &arena, int64_t tokens, int64_t size, Use) : size(size), panels(arena.panels(tokens, size)) {}
    Panels over_channels() const { return panels; }
    Panels over_tokens() const { return panels; }

    void load(Rows rows, int64_t count) const {
        for (int64_t r = 0; r < count; r += kPanel)
            pack(rows, r, smaller<int64_t>(kPanel, count - r), size, {panels.data + r * kPanel, panels.stride});
    }

private:
    const Panels panels;
};

template <> class Operand<Pair> {
public:
    const int64_t size;
    Operand(Arena &arena, int64_t tokens, int64_t size, Use use)
        : size(size),
          by_channel(use.over_channels ? arena.panels<Pair>(filled(tokens, use), elements<Pair>(size))
                                       : PanelsOf<Pair>{}),
          by_token(use.over_tokens ? arena.panels<Pair>(elements<Pair>(tokens), size) : PanelsOf<Pair>{}),
          use(use) {}
    PanelsOf<Pair> over_channels() const { return by_channel; }
    PanelsOf<Pair> over_tokens() const { return by_token; }

    // Rows of bfloat16.
    void load(Rows rows, int64_t count) const {
        fill_pairs(count, [rows, size = size](int64_t r, int64_t f) {
            return load_some_pairs((const uint16_t *)rows.row(r) + f, size - f);
        });
    }

private:
    const PanelsOf<Pair> by_channel, by_token;
    const Use use;

    // Tokens with their padding: whole blocks of tokens, or of pairs of them.
    static int64_t filled(int64_t tokens, Use use) {
        return use.over_tokens ? 2 * padded(elements<Pair>(tokens)) : padded(tokens);
    }

    // pairs(token, channel) is a vector of pairs of channels.
    template <class F> FULMEN_MEMBER void fill_pairs(int64_t count, F pairs) const {
        const Operand x = *this;  // a copy, which no store can change
        for (int64_t r = 0; r < filled(count, x.use); r += 2)
            for (int64_t f = 0; f < x.size; f += 2 * kLanes) {
                BitVec first = r < count ? pairs(r, f) : BitVec{}, second = r + 1 < count ? pairs(r + 1, f) : BitVec{};
                if (x.use.over_channels) {
                    store(x.by_channel.at(r, f / 2), first);
                    store(x.by_channel.at(r + 1, f / 2), second);
                }
                if (x.use.over_tokens) {
                    pair_rows(first, second);
                    store(x.by_token.at(r / 2, f), first);
                    if (f + kLanes < padded(x.size)) store(x.by_token.at(r / 2, f + kLanes), second);
                }
            }
    }
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
