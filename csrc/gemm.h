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

#include "prefetch.h"

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

// As many panels as one product computes, side by side, `stride` elements apart. A tile of 16 rows reads 17 vectors for
// 16 multiply-adds, as many as a CPU that begins two of either in a clock can; one of 8 rows and two panels reads 10.
#if FULMEN_VECTOR_BYTES == 64
#define FULMEN_PANELS_AT_ONCE 2
#else
#define FULMEN_PANELS_AT_ONCE 1
#endif
constexpr int kPanelsAtOnce = FULMEN_PANELS_AT_ONCE;
template <int Count> struct PanelsAtOnce {
    static constexpr int kCount = Count;
    // From a vector of a row to the next.
    static constexpr int64_t next(int64_t stride) { return Count == 1 ? kLanes : stride; }
};

// f(panel, how many from there on), the latter known where it is compiled.
template <class F> FULMEN_INLINE void for_each_panels(int64_t panels, F f) {
    int64_t p = 0;
    for (; p + kPanelsAtOnce <= panels; p += kPanelsAtOnce) f(p, PanelsAtOnce<kPanelsAtOnce>());
    for (; p < panels; ++p) f(p, PanelsAtOnce<1>());
}

// The columns of the right factor: panels, or rows in the caller's memory.
template <class Element, int Count = 1> struct PanelOf {
    const Element *data;
    int64_t stride;
    FULMEN_MEMBER const Element *vector(int v) const { return data + v * PanelsAtOnce<Count>::next(stride); }
    FULMEN_MEMBER void next_row() { data += kPanel; }
    PanelOf(const Element *panel, int64_t stride = 0) : data(panel), stride(stride) {
        static_assert(Count == 1 || kLanes == kPanel, "a vector of each panel");
    }
};
typedef PanelOf<float> Panel;
struct Columns {
    const float *data;
    int64_t stride;
    FULMEN_MEMBER const float *vector(int v) const { return data + v * kLanes; }
    FULMEN_MEMBER void next_row() { data += stride; }
};
template <int Count, class Element> FULMEN_INLINE PanelOf<Element, Count> panels_at(PanelsOf<Element> x, int64_t p) {
    return {x.panel(p), x.stride};
}

struct Nothing {
    FULMEN_MEMBER void operator()() const {}
};

// left * right for some columns of right; `meanwhile` is called at each block of depth.
template <class Left, class Right = PanelOf<typename Left::Element>, class Meanwhile = Nothing> struct Product {
    Left left;
    Right right;
    int64_t depth;  // in blocks
    Meanwhile meanwhile = {};
};

template <int Count, class Left, class Meanwhile = Nothing>
using Times = Product<Left, PanelOf<typename Left::Element, Count>, Meanwhile>;

// The same of one block of depth, for a tile that starts from nothing: the first terms need no sum to be added to.
template <class Left, int Count = 1> struct FirstBlock {
    Left left;
    PanelOf<typename Left::Element, Count> right;
    Prefetching meanwhile;
};

// Between two products: weighs each row of the sum so far.
struct RowWeights {
    const float *weights;
};

// A tile's place in the result: its rows are those of a panel, and from a vector of a row to the next it is so far.
struct Place {
    float *data;
    int64_t next;
    FULMEN_MEMBER float *at(int row, int v) const { return data + row * kPanel + v * next; }
};

template <int Rows, int Vecs> FULMEN_INLINE void store_tile(const Vec (&acc)[Rows][Vecs], Place c) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) store(c.at(r, v), acc[r][v]);
}

// What a tile starts from, and what becomes of it.
struct Zero {
    template <int Rows, int Vecs> FULMEN_MEMBER void begin(Vec (&acc)[Rows][Vecs], Place) const {
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) acc[r][v] = Vec{};
    }
    template <class Tile> FULMEN_MEMBER void end(Tile &acc, Place c, int64_t, int) const { store_tile(acc, c); }
};
struct Add {
    template <int Rows, int Vecs> FULMEN_MEMBER void begin(Vec (&acc)[Rows][Vecs], Place c) const {
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) acc[r][v] = load(c.at(r, v));
    }
    template <class Tile> FULMEN_MEMBER void end(Tile &acc, Place c, int64_t, int) const { store_tile(acc, c); }
};
// The same, last: a large c is rounded once, and not with every term of a product.
struct AddLast {
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, Place c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs> FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], Place c, int64_t, int) const {
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) acc[r][v] += load(c.at(r, v));
        store_tile(acc, c);
    }
};
// In place of c, rows of bfloat16 in the caller's memory.
struct ToRows {
    uint16_t *rows;
    int64_t stride;
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, Place c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs> FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], Place, int64_t row, int column) const {
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
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, Place c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs>
    FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], Place c, int64_t row, int column) const {
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
// Adds what c was, weighed, last too.
struct Scale {
    const float *row_weights;     // one per row
    const float *column_weights;  // one per column of this panel, or null
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, Place c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs>
    FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], Place c, int64_t row, int column) const {
        // Nothing is common to both cases: GCC would compute a product before, and not contract it with the sum, and
        // load all of c before, into more registers than there are. Clang would add after both, and not contract
        // either.
        if (column_weights) {
            asm volatile("" ::: "memory");
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < Vecs; ++v) {
                    const Vec weighed = load(c.at(r, v)) * load(column_weights + column + v * kLanes);
                    acc[r][v] = hidden(multiply_add(weighed, broadcast(row_weights[row + r]), acc[r][v]));
                }
        } else {
            asm volatile("" ::: "memory");
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < Vecs; ++v) acc[r][v] += load(c.at(r, v)) * row_weights[row + r];
        }
        store_tile(acc, c);
    }
};

// Panels rounded to pairs: their even rows with their odd ones, panels of a right factor.
template <int Count = 1> struct PairsOfRows {
    Pair *panel;
    int64_t stride;
    PairsOfRows<1> one(int p) const { return {panel + p * stride, stride}; }
    template <int Rows, int Vecs> FULMEN_MEMBER void put(const Vec (&rows)[Rows][Vecs], int64_t row, int column) const {
        static_assert(Rows % 2 == 0, "a pair may not be split between tiles");
        Pair *const to = panel + row / 2 * kPanel + column;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; r += 2)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v)
                store(to + r / 2 * kPanel + v * PanelsAtOnce<Count>::next(stride),
                      lane_pairs(rows[r][v], rows[r + 1][v]));
    }
};
// The same, and their columns too: half a panel of a left factor for each.
template <int Count = 1> struct PairsBothWays : PairsOfRows<Count> {
    Pair *left;
    PairsBothWays(PairsOfRows<Count> of_rows, Pair *left) : PairsOfRows<Count>(of_rows), left(left) {}
    PairsBothWays<1> one(int p) const { return {PairsOfRows<Count>::one(p), left + p * kPanel / 2}; }
    template <int Rows, int Vecs> FULMEN_MEMBER void put(const Vec (&rows)[Rows][Vecs], int64_t row, int column) const {
        uint16_t *const to = (uint16_t *)(left + row * kPanel) + column;
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) store_as(BFloat16(), to + r * 2 * kPanel + v * kLanes, rows[r][v]);
        PairsOfRows<Count>::put(rows, row, column);
    }
};
// As Scale without weights of columns; results are rounded too.
template <class Rounded> struct ScaleAndRound {
    const float *row_weights;
    Rounded rounded;
    template <class Tile> FULMEN_MEMBER void begin(Tile &acc, Place c) const { Zero{}.begin(acc, c); }
    template <int Rows, int Vecs>
    FULMEN_MEMBER void end(Vec (&acc)[Rows][Vecs], Place c, int64_t row, int column) const {
        const float *const weights = row_weights + row;
        const Rounded to = rounded;  // copies, which no store can change
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < Vecs; ++v) acc[r][v] += load(c.at(r, v)) * weights[r];
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

// An element of a left factor that is multiplied with so many vectors: a pair stays in memory for one of them.
template <int Vecs> FULMEN_INLINE const float &factor_of(const float &x) { return x; }
template <int Vecs> FULMEN_INLINE decltype(auto) factor_of(const Pair &x) {
    if constexpr (Vecs == 1)
        return (x);
    else
        return broadcast(x);
}

// One block of depth, of the rows at a. `First`: in place of what acc holds.
template <int Row, int Column, bool First, int Rows, int Vecs, class Left, class Right>
FULMEN_INLINE void accumulate_block(Vec (&acc)[Rows][Vecs], const Left &left, const typename Left::Element *a,
                                    Right &b) {
#pragma GCC unroll 16
    for (int k = 0; k < kDepth<typename Left::Element>; ++k) {
        decltype(load(a)) right[Vecs];
#pragma GCC unroll 4
        for (int v = 0; v < Vecs; ++v) right[v] = load(b.vector(v) + Column);
        b.next_row();
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            if (!Left::has(Row + r, k)) continue;
            const auto &factor = factor_of<Vecs>(a[left.offset(Row + r, k)]);
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
template <int Row, int Column, int Rows, int Vecs, class Left, int Count>
FULMEN_INLINE void accumulate(Vec (&acc)[Rows][Vecs], int64_t block, const FirstBlock<Left, Count> &product) {
    if (Row == 0 && Column == 0) product.meanwhile();
    auto b = product.right;
    accumulate_block<Row, Column, true>(acc, product.left, product.left.at(block, 0), b);
}

// Registers: AVX-512 and NEON have 32, the others 16.
#if defined(__AVX512F__)
constexpr int kTileRows = 16, kTileVecs = 1, kTileRowsOfTwo = 8;
#elif defined(__aarch64__)
constexpr int kTileRows = 6, kTileVecs = 4, kTileRowsOfTwo = 6;
#else
constexpr int kTileRows = 6, kTileVecs = kLanes < 16 ? 2 : 1, kTileRowsOfTwo = 2;
#endif

template <int Count, int Row, int Column, class Start, class... Products>
FULMEN_INLINE void multiply_block(float *c, int64_t stride, int64_t block, const Start &start,
                                  const Products &...products) {
    constexpr int kVecs = Count == 1 ? kTileVecs : Count, kMostRows = Count == 1 ? kTileRows : kTileRowsOfTwo;
    if constexpr (Column < kPanel) {
        if constexpr (Row < kPanel) {
            constexpr int rows = Row + kMostRows <= kPanel ? kMostRows : kPanel - Row;
            Vec acc[rows][kVecs];
            const Place tile{c + block * kBlock + Row * kPanel + Column, PanelsAtOnce<Count>::next(stride)};
            start.begin(acc, tile);
            (accumulate<Row, Column>(acc, block, products), ...);
            start.end(acc, tile, block * kPanel + Row, Column);
            multiply_block<Count, Row + rows, Column>(c, stride, block, start, products...);
        } else {
            multiply_block<Count, 0, Column + kVecs / Count * kLanes>(c, stride, block, start, products...);
        }
    }
}

// One block of some panels from p on, in a function of its own: rows in the caller's memory take many registers.
template <int Count, class Start, class... Products>
__attribute__((noinline)) static void multiply_apart(Panels c, int64_t p, int64_t block, const Start &start,
                                                     const Products &...products) {
    multiply_block<Count, 0, 0>(c.panel(p), c.stride, block, start, products...);
}

// A class, so that a list of types names one to compile. What it takes are references: by value, structs would be
// copied in pieces other than those that they were stored in, and such a load waits until every store before it is
// done, the misses of an output too.
template <int Count, class Start, class... Products> struct Multiplication {
    __attribute__((noinline)) static void run(float *c, int64_t stride, int64_t row_blocks, const Start &start,
                                              const Products &...products) {
        for (int64_t block = 0; block < row_blocks; ++block)
            multiply_block<Count, 0, 0>(c, stride, block, start, products...);
    }
};

// One panel c of row_blocks blocks: c = start(c) + the sum of the products.
template <class Start, class... Products>
FULMEN_INLINE void multiply(float *c, int64_t row_blocks, const Start &start, const Products &...products) {
    Multiplication<1, Start, Products...>::run(c, 0, row_blocks, start, products...);
}
// Several of them, from panel p on, of products of as many.
template <int Count, class Start, class... Products>
FULMEN_INLINE void multiply(Panels c, int64_t p, int64_t row_blocks, const Start &start, const Products &...products) {
    Multiplication<Count, Start, Products...>::run(c.panel(p), c.stride, row_blocks, start, products...);
}

// Each is some ten kilobytes of unrolled code, and most of what a compiler spends its time on: gemm.cpp has them all.
#define FULMEN_PRODUCTS(KIND, N)                                                            \
    KIND(N, Zero, Times<N, AsStored>)                                                       \
    KIND(N, Zero, Times<N, AsStored, Prefetching>)                                          \
    KIND(N, Zero, Times<N, AsStored>, Times<N, Upper<AsStored>>)                            \
    KIND(N, Zero, Times<N, AsStored, Prefetching>, RowWeights, Times<N, Lower<Transposed>>) \
    KIND(N, Add, Times<N, Upper<AsStored>>)                                                 \
    KIND(N, AddLast, Times<N, AsStored>)                                                    \
    KIND(N, AddLast, Times<N, Transposed>)                                                  \
    KIND(N, Add, Times<N, Transposed, Prefetching>)                                         \
    KIND(N, Add, Times<N, Lower<Transposed>>)                                               \
    KIND(N, Scale, FirstBlock<Transposed, N>)
#define FULMEN_LONE_PRODUCTS(KIND)                                           \
    KIND(1, Add, Product<AsStored>)                                          \
    KIND(1, Zero, Product<AsStored>, RowWeights, Product<Lower<Transposed>>) \
    KIND(1, Scale, Product<Transposed>, Product<Transposed>)
#if FULMEN_PAIRS
typedef AsStoredOf<Pair> PairsAsStored;
typedef TransposedOf<Pair> PairsTransposed;
#define FULMEN_PAIR_PRODUCTS(KIND, N)                                                                   \
    KIND(N, Zero, Times<N, PairsAsStored, Prefetching>)                                                 \
    KIND(N, ToRows, Times<N, PairsAsStored, Prefetching>)                                               \
    KIND(N, ToGatedRows, Times<N, PairsAsStored, Prefetching>)                                          \
    KIND(N, Zero, Times<N, PairsAsStored>, RowWeights, Times<N, Upper<PairsAsStored>>)                  \
    KIND(N, Zero, Times<N, PairsAsStored, Prefetching>, RowWeights, Times<N, Lower<PairsTransposed>>)   \
    KIND(N, ToRows, Times<N, PairsAsStored, Prefetching>, RowWeights, Times<N, Lower<PairsTransposed>>) \
    KIND(N, Add, Times<N, Upper<PairsAsStored>>)                                                        \
    KIND(N, Add, Times<N, PairsTransposed, Prefetching>)                                                \
    KIND(N, Add, Times<N, Lower<PairsTransposed>>)                                                      \
    KIND(N, Scale, FirstBlock<PairsTransposed, N>)                                                      \
    KIND(N, ScaleAndRound<PairsOfRows<N>>, FirstBlock<PairsTransposed, N>)                              \
    KIND(N, ScaleAndRound<PairsBothWays<N>>, FirstBlock<PairsTransposed, N>)
#define FULMEN_LONE_PAIR_PRODUCTS(KIND)   \
    KIND(1, Zero, Product<PairsAsStored>) \
    KIND(1, Zero, Product<PairsAsStored>, RowWeights, Product<Lower<PairsTransposed>>)
#else
#define FULMEN_PAIR_PRODUCTS(KIND, N)
#define FULMEN_LONE_PAIR_PRODUCTS(KIND)
#endif
#define FULMEN_ONE_AT_ONCE(KIND) \
    FULMEN_LONE_PRODUCTS(KIND) FULMEN_LONE_PAIR_PRODUCTS(KIND) FULMEN_PRODUCTS(KIND, 1) FULMEN_PAIR_PRODUCTS(KIND, 1)
#if FULMEN_PANELS_AT_ONCE == 1
#define FULMEN_ALL_PRODUCTS(KIND) FULMEN_ONE_AT_ONCE(KIND)
#else
#define FULMEN_ALL_PRODUCTS(KIND) FULMEN_ONE_AT_ONCE(KIND) FULMEN_PRODUCTS(KIND, 2) FULMEN_PAIR_PRODUCTS(KIND, 2)
#endif
#define FULMEN_COMPILED_ELSEWHERE(...) extern template struct Multiplication<__VA_ARGS__>;
FULMEN_ALL_PRODUCTS(FULMEN_COMPILED_ELSEWHERE)
#undef FULMEN_COMPILED_ELSEWHERE

}  // namespace FULMEN_ISA
}  // namespace fulmen
