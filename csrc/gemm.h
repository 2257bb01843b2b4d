// Products of matrices in panels, knowing nothing of attention. The left factor may be read as it stands or transposed;
// the right factor always supplies its rows, from a panel or from the caller's memory.
//
// An element of a factor is a float, or a pair of bfloat16 that are neighbours along the axis that is summed over: 4
// bytes either way, so that only the multiply-add knows the difference, and pairs halve the depth. Results are floats,
// and may be rounded to pairs at once where they are factors of the next product.
//
// Each element of a product is one chain of multiply-adds in the order of depth, whatever the tile: how the work is
// split over rows and columns never changes a bit.
#pragma once

#include <type_traits>

#include "panels.h"

namespace fulmen {
namespace FULMEN_ISA {

// How many numbers along the summed axis one element holds, and how many elements are a block of depth, 16 numbers.
template <class Element> constexpr int64_t kNumbers = std::is_same<Element, float>::value ? 1 : 2;
template <class Element> constexpr int64_t kDepth = kPanel / kNumbers<Element>;

// The left factor, as stored. at(b, d) is where block d of the depth of row block b begins; what it has there is
// multiplied, the rest is zero.
template <class Element_> struct AsStoredOf {
    typedef Element_ Element;
    const Element *data;
    int64_t stride;
    FULMEN_MEMBER const Element *at(int64_t block, int64_t depth) const {
        const int64_t column = depth * kDepth<Element>;
        return data + column / kPanel * stride + block * kBlock + column % kPanel;
    }
    FULMEN_MEMBER int offset(int row, int depth) const { return row * kPanel + depth; }
    static constexpr bool has(int, int) { return true; }
    AsStoredOf(PanelsOf<Element> x) : data(x.data), stride(x.stride) {}
};
typedef AsStoredOf<float> AsStored;

// The left factor is the transpose of what is stored.
template <class Element_> struct TransposedOf {
    typedef Element_ Element;
    const Element *data;
    int64_t stride;
    FULMEN_MEMBER const Element *at(int64_t block, int64_t depth) const {
        return data + block * stride + depth * kDepth<Element> * kPanel;
    }
    FULMEN_MEMBER int offset(int row, int depth) const { return depth * kPanel + row; }
    static constexpr bool has(int, int) { return true; }
    TransposedOf(PanelsOf<Element> x) : data(x.data), stride(x.stride) {}
};
typedef TransposedOf<float> Transposed;

// The left factor is rows in the caller's memory, `stride` elements apart.
template <class Element_> struct InPlaceOf {
    typedef Element_ Element;
    const Element *data;
    int64_t stride;
    FULMEN_MEMBER const Element *at(int64_t block, int64_t depth) const {
        return data + block * kPanel * stride + depth * kDepth<Element>;
    }
    FULMEN_MEMBER int64_t offset(int row, int depth) const { return row * stride + depth; }
    static constexpr bool has(int, int) { return true; }
};

// A left factor of one block of which a triangle is zero and left out: what is above the diagonal, or below it. Pairs
// on the diagonal are whole.
template <class Left> struct Lower : Left {
    static constexpr bool has(int row, int depth) { return depth * kNumbers<typename Left::Element> <= row; }
    Lower(Left left) : Left(left) {}
};
template <class Left> struct Upper : Left {
    static constexpr bool has(int row, int depth) { return row < (depth + 1) * kNumbers<typename Left::Element>; }
    Upper(Left left) : Left(left) {}
};

// Sixteen columns of the right factor: a panel, or rows in the caller's memory.
template <class Element> struct PanelOf {
    const Element *data;
    FULMEN_MEMBER void next_row() { data += kPanel; }
    PanelOf(const Element *panel) : data(panel) {}
};
typedef PanelOf<float> Panel;
struct Columns {
    const float *data;
    int64_t stride;
    FULMEN_MEMBER void next_row() { data += stride; }
};

struct Nothing {
    FULMEN_MEMBER void operator()() const {}
};

// left * right for sixteen columns of right; `meanwhile` is called at each block of depth.
template <class Left, class Right = PanelOf<typename Left::Element>, class Meanwhile = Nothing> struct Product {
    Left left;
    Right right;
    int64_t depth;  // in blocks
    Meanwhile meanwhile = {};
};

// The same of one block of depth, for a tile that starts from nothing: the first terms need no sum to be added to.
template <class Left> struct FirstBlock {
    Left left;
    PanelOf<typename Left::Element> right;
};

// Between two products: weighs each row of the sum so far.
struct RowWeights {
    const float *weights;
};

template <int Rows, int Vecs> FULMEN_INLINE void store_tile(const Vec (&acc)[Rows][Vecs], float *c) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) store(c + r * kPanel + v * kLanes, acc[r][v]);
}

// What a tile starts from, and what becomes of it. c is its place in the result.
struct Zero {
    template <int Rows, int Vecs> FULMEN_MEMBER void begin(Vec (&acc)[Rows][Vecs], const float *) const {
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) acc[r][v] = Vec{};
    }
    template <class Tile> FULMEN_MEMBER void end(Tile &acc, float *c, int64_t, int) const { store_tile(acc, c); }
};
struct Add {
    template <int Rows, int Vecs> FULMEN_MEMBER void begin(Vec (&acc)[Rows][Vecs], const float *c) const {
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) acc[r][v] = load(c + r * kPanel + v * kLanes);
    }
    template <class Tile> FULMEN_MEMBER void end(Tile &acc, float *c, int64_t, int) const { store_tile(acc, c); }
};
// In place of c, rows of bfloat16 in the caller's memory.
struct ToRows {
    uint16_t *rows;
    int64_t stride;
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, const float *c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs>
    FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], float *, int64_t row, int column) const {
        uint16_t *to = rows + row * stride + column;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r, to += stride)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) store_as(BFloat16(), to + v * kLanes, acc[r][v]);
    }
};
// The same, times rows like them; before that the results go to other rows too, if there are any.
struct ToGatedRows {
    ToRows result, gate, kept;
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, const float *c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs>
    FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], float *c, int64_t row, int column) const {
        const ToRows weights = gate;  // a copy, which no store can change
        if (kept.rows) kept.end(acc, c, row, column);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v)
                acc[r][v] *= load_as(BFloat16(), weights.rows + (row + r) * weights.stride + column + v * kLanes);
        result.end(acc, c, row, column);
    }
};
// Adds what c was, weighed. Last: a large c is rounded once, and not with every term of a product.
struct Scale {
    const float *row_weights;     // one per row
    const float *column_weights;  // one per column of this panel, or null
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, const float *c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs>
    FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], float *c, int64_t row, int column) const {
        // Nothing is common to both cases: GCC would compute a product before, and not contract it with the sum, and
        // load all of c before, into more registers than there are. Clang would add after both, and not contract
        // either.
        if (column_weights) {
            asm volatile("" ::: "memory");
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < Vecs; ++v) {
                    const Vec weighed = load(c + r * kPanel + v * kLanes) * load(column_weights + column + v * kLanes);
                    acc[r][v] = hidden(multiply_add(weighed, broadcast(row_weights[row + r]), acc[r][v]));
                }
        } else {
            asm volatile("" ::: "memory");
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < Vecs; ++v) acc[r][v] += load(c + r * kPanel + v * kLanes) * row_weights[row + r];
        }
        store_tile(acc, c);
    }
};

// A panel rounded to pairs: its even rows with its odd ones, a panel of a right factor.
struct PairsOfRows {
    Pair *panel;
    template <int Rows, int Vecs> FULMEN_MEMBER void put(const Vec (&rows)[Rows][Vecs], int64_t row, int column) const {
        static_assert(Rows % 2 == 0, "a pair may not be split between tiles");
        Pair *const to = panel + row / 2 * kPanel + column;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; r += 2)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v)
                store(to + r / 2 * kPanel + v * kLanes, lane_pairs(rows[r][v], rows[r + 1][v]));
    }
};
// The same, and its columns too: half a panel of a left factor.
struct PairsBothWays : PairsOfRows {
    Pair *left;
    PairsBothWays(Pair *panel, Pair *left) : PairsOfRows{panel}, left(left) {}
    template <int Rows, int Vecs> FULMEN_MEMBER void put(const Vec (&rows)[Rows][Vecs], int64_t row, int column) const {
        uint16_t *const to = (uint16_t *)(left + row * kPanel) + column;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) store_as(BFloat16(), to + r * 2 * kPanel + v * kLanes, rows[r][v]);
        PairsOfRows::put(rows, row, column);
    }
};
// As Scale without weights of columns; results are rounded too.
template <class Rounded> struct ScaleAndRound {
    const float *row_weights;
    Rounded rounded;
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, const float *c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs>
    FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], float *c, int64_t row, int column) const {
        const float *const weights = row_weights + row;
        const Rounded to = rounded;  // copies, which no store can change
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) acc[r][v] += load(c + r * kPanel + v * kLanes) * weights[r];
        store_tile(acc, c);
        to.put(acc, row, column);
    }
};

template <int Row, int Column, int Rows, int Vecs>
FULMEN_INLINE void accumulate(Vec (&acc)[Rows][Vecs], int64_t block, const RowWeights &rows) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) acc[r][v] *= rows.weights[block * kPanel + Row + r];
}

// One block of depth, of the rows at a. `First`: in place of what acc holds.
template <int Row, int Column, bool First, int Rows, int Vecs, class Left, class Right>
FULMEN_INLINE void accumulate_block(Vec (&acc)[Rows][Vecs], const Left &left, const typename Left::Element *a,
                                    Right &b) {
#pragma GCC unroll 16
    for (int k = 0; k < kDepth<typename Left::Element>; ++k) {
        decltype(load(a)) right[Vecs];
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) right[v] = load(b.data + Column + v * kLanes);
        b.next_row();
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            if (!Left::has(Row + r, k)) continue;
            const auto &factor = a[left.offset(Row + r, k)];
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v)
                acc[r][v] = First && k == 0 ? term(factor, right[v]) : multiply_add(factor, right[v], acc[r][v]);
        }
    }
}

template <int Row, int Column, int Rows, int Vecs, class Left, class... Parts>
FULMEN_INLINE void accumulate(Vec (&acc)[Rows][Vecs], int64_t block, const Product<Left, Parts...> &product) {
    auto b = product.right;
    for (int64_t p = 0; p < product.depth; ++p) {
        if (Row == 0 && Column == 0) product.meanwhile();
        accumulate_block<Row, Column, false>(acc, product.left, product.left.at(block, p), b);
    }
}
template <int Row, int Column, int Rows, int Vecs, class Left>
FULMEN_INLINE void accumulate(Vec (&acc)[Rows][Vecs], int64_t block, const FirstBlock<Left> &product) {
    auto b = product.right;
    accumulate_block<Row, Column, true>(acc, product.left, product.left.at(block, 0), b);
}

// Registers: AVX-512 and NEON have 32, the others 16.
#if defined(__AVX512F__)
constexpr int kTileRows = 16, kTileVecs = 1;
#elif defined(__aarch64__)
constexpr int kTileRows = 6, kTileVecs = 4;
#else
constexpr int kTileRows = 6, kTileVecs = kLanes < 16 ? 2 : 1;
#endif

template <int Row, int Column, class Start, class... Products>
FULMEN_INLINE void multiply_block(float *c, int64_t block, const Start &start, const Products &...products) {
    if constexpr (Column < kPanel) {
        if constexpr (Row < kPanel) {
            constexpr int rows = Row + kTileRows <= kPanel ? kTileRows : kPanel - Row;
            Vec acc[rows][kTileVecs];
            float *tile = c + block * kBlock + Row * kPanel + Column;
            start.begin(acc, tile);
            (accumulate<Row, Column>(acc, block, products), ...);
            start.end(acc, tile, block * kPanel + Row, Column);
            multiply_block<Row + rows, Column>(c, block, start, products...);
        } else {
            multiply_block<0, Column + kTileVecs * kLanes>(c, block, start, products...);
        }
    }
}

// One block of a panel, in a function of its own: rows in the caller's memory take many registers.
template <class Start, class... Products>
__attribute__((noinline)) static void multiply_apart(float *c, int64_t block, const Start &start,
                                                     const Products &...products) {
    multiply_block<0, 0>(c, block, start, products...);
}

// A class, so that a list of types names one to compile. What it takes are references: by value, structs would be
// copied in pieces other than those that they were stored in, and such a load waits until every store before it is
// done, the misses of an output too.
template <class Start, class... Products> struct Multiplication {
    __attribute__((noinline)) static void run(float *c, int64_t row_blocks, const Start &start,
                                              const Products &...products) {
        for (int64_t block = 0; block < row_blocks; ++block) multiply_block<0, 0>(c, block, start, products...);
    }
};

// One panel c of row_blocks blocks: c = start(c) + the sum of the products.
template <class Start, class... Products>
FULMEN_INLINE void multiply(float *c, int64_t row_blocks, const Start &start, const Products &...products) {
    Multiplication<Start, Products...>::run(c, row_blocks, start, products...);
}

// Each is some ten kilobytes of unrolled code, and most of what a compiler spends its time on: gemm.cpp has them all.
#define FULMEN_PRODUCTS(KIND)                                             \
    KIND(Zero, Product<AsStored>)                                         \
    KIND(Zero, Product<AsStored>, Product<Upper<AsStored>>)               \
    KIND(Zero, Product<AsStored>, RowWeights, Product<Lower<Transposed>>) \
    KIND(Add, Product<AsStored>)                                          \
    KIND(Add, Product<Upper<AsStored>>)                                   \
    KIND(Add, Product<Transposed>)                                        \
    KIND(Add, Product<Lower<Transposed>>)                                 \
    KIND(Scale, FirstBlock<Transposed>)                                   \
    KIND(Scale, Product<Transposed>, Product<Transposed>)
#if FULMEN_PAIRS
typedef AsStoredOf<Pair> PairsAsStored;
typedef TransposedOf<Pair> PairsTransposed;
#define FULMEN_PAIR_PRODUCTS(KIND)                                                    \
    KIND(Zero, Product<PairsAsStored>)                                                \
    KIND(ToRows, Product<PairsAsStored>)                                              \
    KIND(ToGatedRows, Product<PairsAsStored>)                                         \
    KIND(Zero, Product<PairsAsStored>, RowWeights, Product<Upper<PairsAsStored>>)     \
    KIND(Zero, Product<PairsAsStored>, RowWeights, Product<Lower<PairsTransposed>>)   \
    KIND(ToRows, Product<PairsAsStored>, RowWeights, Product<Lower<PairsTransposed>>) \
    KIND(Add, Product<Upper<PairsAsStored>>)                                          \
    KIND(Add, Product<PairsTransposed>)                                               \
    KIND(Add, Product<Lower<PairsTransposed>>)                                        \
    KIND(Scale, FirstBlock<PairsTransposed>)                                          \
    KIND(ScaleAndRound<PairsOfRows>, FirstBlock<PairsTransposed>)                     \
    KIND(ScaleAndRound<PairsBothWays>, FirstBlock<PairsTransposed>)
#else
#define FULMEN_PAIR_PRODUCTS(KIND)
#endif
#define FULMEN_COMPILED_ELSEWHERE(...) extern template struct Multiplication<__VA_ARGS__>;
FULMEN_PRODUCTS(FULMEN_COMPILED_ELSEWHERE)
FULMEN_PAIR_PRODUCTS(FULMEN_COMPILED_ELSEWHERE)
#undef FULMEN_COMPILED_ELSEWHERE

}  // namespace FULMEN_ISA
}  // namespace fulmen
