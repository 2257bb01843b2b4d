// Products of every size from 1 to 40, of floats and of pairs, in panels and in the caller's memory, against plain
// loops.
//
// Results in floats must have the bits of one chain of multiply-adds in the order of depth. What pads rows and columns
// is NaN, so that nothing of it may reach a result; what pads depth is zero, as the core's packing leaves it.
#include <math.h>

#include <vector>

#include "check.h"
#include "gemm.h"

using namespace fulmen::FULMEN_ISA;

namespace {

constexpr int64_t kSizes = 40;
#ifndef SIZE_STEP
#define SIZE_STEP 1
#endif

// One link of the chain, as this build's multiply-add rounds it.
float link(float a, float b, float sum) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, sum);
#else
    const float product = a * b;
    return product + sum;
#endif
}

// Rows of columns, in plain order.
struct Plain {
    int64_t rows, columns;
    std::vector<float> x;
    Plain(int64_t rows, int64_t columns) : rows(rows), columns(columns), x((size_t)(rows * columns)) {}
    float &operator()(int64_t r, int64_t c) { return x[(size_t)(r * columns + c)]; }
    float operator()(int64_t r, int64_t c) const { return x[(size_t)(r * columns + c)]; }
};

template <class Number> Plain filled(int64_t rows, int64_t columns, Number number) {
    Plain m(rows, columns);
    for (float &x : m.x) x = number();
    return m;
}

// sum += left * right
void multiply_plainly(const Plain &left, const Plain &right, int64_t rows, int64_t columns, int64_t depth, Plain &sum) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < depth; ++k)
            for (int64_t c = 0; c < columns; ++c) sum(r, c) = link(left(r, k), right(k, c), sum(r, c));
}

// Panels with memory of their own. element(row, column) is called for padding too.
template <class Element> struct Packed {
    std::vector<Element> memory;
    PanelsOf<Element> panels;
    template <class F>
    Packed(int64_t rows, int64_t columns, F element)
        : memory((size_t)panels_size(rows, columns)), panels{memory.data(), panel_stride(rows)} {
        for (int64_t r = 0; r < padded(rows); ++r)
            for (int64_t c = 0; c < padded(columns); ++c) *panels.at(r, c) = element(r, c);
    }
};

float element_of(const Plain &m, int64_t rows, int64_t columns, int64_t r, int64_t c) {
    return r < rows && c < columns ? m(r, c) : NAN;
}

// The three matrices of a product of one size, cut out of larger ones, in each form.
struct Factors {
    const Plain &left, &right;
    int64_t rows, columns, depth;

    // NaN outside the product's rows and columns, 0 after its depth.
    float of_left(int64_t r, int64_t k) const { return r >= rows ? NAN : k < depth ? left(r, k) : 0; }
    float of_right(int64_t k, int64_t c) const { return c >= columns ? NAN : k < depth ? right(k, c) : 0; }

    Packed<float> left_panels() const {
        return {rows, depth, [&](int64_t r, int64_t k) { return of_left(r, k); }};
    }
    Packed<float> transposed_left_panels() const {
        return {depth, rows, [&](int64_t k, int64_t r) { return of_left(r, k); }};
    }
    Packed<float> right_panels() const {
        return {depth, columns, [&](int64_t k, int64_t c) { return of_right(k, c); }};
    }
    // As rows in the caller's memory, `stride` apart, padded to blocks.
    std::vector<float> left_rows(int64_t stride) const {
        std::vector<float> x((size_t)(padded(rows) * stride), NAN);
        for (int64_t r = 0; r < padded(rows); ++r)
            for (int64_t k = 0; k < padded(depth); ++k) x[(size_t)(r * stride + k)] = of_left(r, k);
        return x;
    }
    std::vector<float> right_rows(int64_t stride) const {
        std::vector<float> x((size_t)(padded(depth) * stride), NAN);
        for (int64_t k = 0; k < padded(depth); ++k)
            for (int64_t c = 0; c < padded(columns); ++c) x[(size_t)(k * stride + c)] = of_right(k, c);
        return x;
    }
    int64_t row_blocks() const { return padded(rows) / kPanel; }
    int64_t depth_blocks() const { return padded(depth) / kPanel; }
    int64_t panels() const { return padded(columns) / kPanel; }
};

void check_equal(const char *what, const Factors &f, const Plain &expected, PanelsOf<float> got) {
    for (int64_t r = 0; r < f.rows; ++r)
        for (int64_t c = 0; c < f.columns; ++c)
            CHECK(*got.at(r, c) == expected(r, c), "%s %d x %d x %d: at %d, %d is %a, not %a", what, (int)f.rows,
                  (int)f.depth, (int)f.columns, (int)r, (int)c, *got.at(r, c), expected(r, c));
}

// f(for_each): panels several at once, where the build has that, and one by one.
template <class F> void in_both_ways(int64_t panels, F f) {
    f([&](auto g) { for_each_panels(panels, g); });
    f([&](auto g) {
        for (int64_t p = 0; p < panels; ++p) g(p, PanelsAtOnce<1>());
    });
}

// Every product that gemm.cpp has, and rows in the caller's memory, for one size.
void check_floats(const Factors &f, const Plain &before, const Plain &row_weights, const Plain &column_weights) {
    const Packed<float> left = f.left_panels(), transposed = f.transposed_left_panels(), right = f.right_panels();
    // `times` products, added to what a tile starts from.
    auto expected = [&](int times, auto start) {
        Plain sum(f.rows, f.columns);
        for (int64_t r = 0; r < f.rows; ++r)
            for (int64_t c = 0; c < f.columns; ++c) sum(r, c) = start(r, c);
        for (int i = 0; i < times; ++i) multiply_plainly(f.left, f.right, f.rows, f.columns, f.depth, sum);
        return sum;
    };
    // multiply(result, panel, how many from there on) for all panels, several at once and one by one.
    auto check = [&](const char *what, const Plain &expected, auto multiply) {
        in_both_ways(f.panels(), [&](auto for_each) {
            Packed<float> got(f.rows, f.columns,
                              [&](int64_t r, int64_t c) { return element_of(before, f.rows, f.columns, r, c); });
            for_each([&](int64_t p, auto some) { multiply(got.panels, p, some); });
            check_equal(what, f, expected, got.panels);
        });
    };
    auto as_stored = [&](int64_t p, auto some) {
        return Times<some.kCount, AsStored>{left.panels, panels_at<some.kCount>(right.panels, p), f.depth_blocks()};
    };
    auto turned = [&](int64_t p, auto some) {
        return Times<some.kCount, Transposed>{transposed.panels, panels_at<some.kCount>(right.panels, p),
                                              f.depth_blocks()};
    };

    const int64_t blocks = f.row_blocks();
    Prefetches nothing;
    const Prefetching prefetching{&nothing};

    const Plain once = expected(1, [](int64_t, int64_t) { return 0.0f; });
    check("as stored", once,
          [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, Zero(), as_stored(p, some)); });
    const int64_t stride = padded(f.depth) + 3, right_stride = padded(f.columns) + 5;
    const std::vector<float> left_rows = f.left_rows(stride), right_rows = f.right_rows(right_stride);
    check("in the caller's memory", once, [&](Panels c, int64_t p, auto some) {
        for (int64_t block = 0; block < blocks; ++block)
            multiply_apart<some.kCount>(
                c, p, block, Zero(),
                Product<InPlaceOf<float>, Columns>{
                    {left_rows.data(), stride}, {right_rows.data() + p * kPanel, right_stride}, f.depth_blocks()});
    });

    const Plain twice = expected(2, [](int64_t, int64_t) { return 0.0f; });
    check("twice as stored", twice, [&](Panels c, int64_t p, auto some) {
        multiply<some.kCount>(c, p, blocks, Zero(), as_stored(p, some), as_stored(p, some));
    });
    check("as stored and transposed", twice, [&](Panels c, int64_t p, auto some) {
        multiply<some.kCount>(c, p, blocks, Zero(), as_stored(p, some), turned(p, some));
    });

    const Plain added = expected(1, [&](int64_t r, int64_t c) { return before(r, c); });
    check("added as stored", added,
          [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, Add(), as_stored(p, some)); });
    check("added transposed", added,
          [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, Add(), turned(p, some)); });

    const Plain weighed = [&] {
        Plain sum = once;
        for (int64_t r = 0; r < f.rows; ++r)
            for (int64_t c = 0; c < f.columns; ++c) sum(r, c) *= row_weights(0, r);
        multiply_plainly(f.left, f.right, f.rows, f.columns, f.depth, sum);
        return sum;
    }();
    check("as stored, weighed, and transposed", weighed, [&](Panels c, int64_t p, auto some) {
        multiply<some.kCount>(c, p, blocks, Zero(), as_stored(p, some), RowWeights{row_weights.x.data()},
                              turned(p, some));
    });

    // Added last, in one rounding.
    const bool weigh_columns = f.depth % 2;
    Plain scaled = once;
    for (int64_t r = 0; r < f.rows; ++r)
        for (int64_t c = 0; c < f.columns; ++c) {
            const float of_column = before(r, c) * column_weights(0, c);
            scaled(r, c) = link(weigh_columns ? of_column : before(r, c), row_weights(0, r), once(r, c));
        }
    auto scale = [&](int64_t p) {
        return Scale{row_weights.x.data(), weigh_columns ? column_weights.x.data() + p * kPanel : nullptr};
    };
    check("added to what is weighed", scaled,
          [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, scale(p), turned(p, some)); });
    if (f.depth_blocks() == 1)
        check("a block added to what is weighed", scaled, [&](Panels c, int64_t p, auto some) {
            multiply<some.kCount>(c, p, blocks, scale(p),
                                  FirstBlock<Transposed, some.kCount>{
                                      transposed.panels, panels_at<some.kCount>(right.panels, p), prefetching});
        });
}

// Neighbours along the depth, as bfloat16.
Pair pair(float first, float second) {
    uint32_t low, high;
    memcpy(&low, &first, sizeof low);
    memcpy(&high, &second, sizeof high);
    return {low >> 16 | (high & 0xffff0000u)};
}

// Whole numbers, of which any order of sums is exact. Every product of pairs that gemm.cpp has, and rows in the
// caller's memory.
[[maybe_unused]] void check_pairs(const Factors &f, const Plain &before, const Plain &row_weights) {
    const int64_t depth = (f.depth + 1) / 2;
    auto of_left = [&](int64_t r, int64_t k) { return pair(f.of_left(r, 2 * k), f.of_left(r, 2 * k + 1)); };
    auto of_right = [&](int64_t k, int64_t c) { return pair(f.of_right(2 * k, c), f.of_right(2 * k + 1, c)); };
    const Packed<Pair> left(f.rows, depth, of_left), right(depth, f.columns, of_right);
    const Packed<Pair> transposed(depth, f.rows, [&](int64_t k, int64_t r) { return of_left(r, k); });
    const int64_t stride = padded(depth) + 1;
    std::vector<Pair> rows((size_t)(padded(f.rows) * stride));
    for (int64_t r = 0; r < padded(f.rows); ++r)
        for (int64_t k = 0; k < padded(depth); ++k) rows[(size_t)(r * stride + k)] = of_left(r, k);

    Plain product(f.rows, f.columns);
    multiply_plainly(f.left, f.right, f.rows, f.columns, f.depth, product);
    Prefetches nothing;
    const Prefetching prefetching{&nothing};
    // sum(what was there, the product, row) for each element. `also` checks what else a result went to.
    auto check = [&](const char *what, auto sum, auto multiply, auto also) {
        Plain expected(f.rows, f.columns);
        for (int64_t r = 0; r < f.rows; ++r)
            for (int64_t c = 0; c < f.columns; ++c)
                expected(r, c) = sum(before(r, c), product(r, c), row_weights(0, r));
        in_both_ways(f.panels(), [&](auto for_each) {
            Packed<float> got(f.rows, f.columns,
                              [&](int64_t r, int64_t c) { return element_of(before, f.rows, f.columns, r, c); });
            for_each([&](int64_t p, auto some) { multiply(got.panels, p, some); });
            check_equal(what, f, expected, got.panels);
            also();
        });
    };
    auto nothing_else = [] {};
    auto of = [&](auto factor, int64_t p, auto some) {
        return Times<some.kCount, decltype(factor)>{factor, panels_at<some.kCount>(right.panels, p), f.depth_blocks()};
    };
    auto block_of = [&](auto factor, int64_t p, auto some) {
        return FirstBlock<decltype(factor), some.kCount>{factor, panels_at<some.kCount>(right.panels, p), prefetching};
    };
    const AsStoredOf<Pair> as_stored(left.panels);
    const TransposedOf<Pair> turned(transposed.panels);
    const InPlaceOf<Pair> in_place{rows.data(), stride};
    const int64_t blocks = f.row_blocks();
    const RowWeights weights{row_weights.x.data()};
    const Scale scale{row_weights.x.data(), nullptr};
    auto once = [](float, float x, float) { return x; };
    auto added = [](float b, float x, float) { return b + x; };
    auto weighed = [](float, float x, float w) { return w * x + x; };
    auto scaled = [](float b, float x, float w) { return w * b + x; };
    check(
        "pairs as stored", once,
        [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, Zero(), of(as_stored, p, some)); },
        nothing_else);
    check(
        "pairs in the caller's memory", once,
        [&](Panels c, int64_t p, auto some) {
            for (int64_t block = 0; block < blocks; ++block)
                multiply_apart<some.kCount>(c, p, block, Zero(), of(in_place, p, some));
        },
        nothing_else);
    check(
        "pairs, weighed, and as stored", weighed,
        [&](Panels c, int64_t p, auto some) {
            multiply<some.kCount>(c, p, blocks, Zero(), of(as_stored, p, some), weights, of(as_stored, p, some));
        },
        nothing_else);
    check(
        "pairs, weighed, and transposed", weighed,
        [&](Panels c, int64_t p, auto some) {
            multiply<some.kCount>(c, p, blocks, Zero(), of(as_stored, p, some), weights, of(turned, p, some));
        },
        nothing_else);
    check(
        "pairs added as stored", added,
        [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, Add(), of(as_stored, p, some)); },
        nothing_else);
    check(
        "pairs added transposed", added,
        [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, Add(), of(turned, p, some)); },
        nothing_else);
    check(
        "pairs added to what is weighed", scaled,
        [&](Panels c, int64_t p, auto some) { multiply<some.kCount>(c, p, blocks, scale, of(turned, p, some)); },
        nothing_else);
    if (f.depth_blocks() == 1)
        check(
            "a block of pairs added to what is weighed", scaled,
            [&](Panels c, int64_t p, auto some) {
                multiply<some.kCount>(c, p, blocks, scale, block_of(turned, p, some));
            },
            nothing_else);

    Packed<Pair> of_rows(blocks * kPanel / 2, f.columns, [](int64_t, int64_t) { return Pair{0}; });
    Packed<Pair> of_columns(blocks * kPanel, (f.columns + 1) / 2, [](int64_t, int64_t) { return Pair{0}; });
    const float *const scales = row_weights.x.data();
    auto check_rounded = [&](const char *what, Pair got, int64_t half, int64_t r, int64_t c) {
        const float sum = scaled(before(r, c), product(r, c), row_weights(0, r));
        CHECK((got.bits >> 16 * half & 0xffff) == round_to_bfloat16(broadcast(sum))[0], "%s, %d x %d x %d: at %d, %d",
              what, (int)f.rows, (int)f.depth, (int)f.columns, (int)r, (int)c);
    };
    auto check_rows = [&](const char *what) {
        for (int64_t r = 0; r < f.rows; ++r)
            for (int64_t c = 0; c < f.columns; ++c) check_rounded(what, *of_rows.panels.at(r / 2, c), r % 2, r, c);
        for (Pair &x : of_rows.memory) x = {0};
    };
    auto rounded_rows = [&](int64_t p, auto some) {
        return PairsOfRows<some.kCount>{of_rows.panels.panel(p), of_rows.panels.stride};
    };
    check(
        "pairs added and rounded", scaled,
        [&](Panels c, int64_t p, auto some) {
            multiply<some.kCount>(c, p, blocks, ScaleAndRound<PairsOfRows<some.kCount>>{scales, rounded_rows(p, some)},
                                  of(turned, p, some));
        },
        [&] { check_rows("rounded"); });
    check(
        "pairs added and rounded both ways", scaled,
        [&](Panels c, int64_t p, auto some) {
            const PairsBothWays<some.kCount> rounded(rounded_rows(p, some), of_columns.panels.at(0, p * kPanel / 2));
            multiply<some.kCount>(c, p, blocks, ScaleAndRound<PairsBothWays<some.kCount>>{scales, rounded},
                                  of(turned, p, some));
        },
        [&] {
            check_rows("rounded both ways");
            for (int64_t r = 0; r < f.rows; ++r)
                for (int64_t c = 0; c < f.columns; ++c)
                    check_rounded("its columns", *of_columns.panels.at(r, c / 2), c % 2, r, c);
            for (Pair &x : of_columns.memory) x = {0};
        });

    // Rows in the caller's memory get the results, and what stands between them stays.
    const int64_t apart = f.panels() * kPanel + 3;
    auto check_to_rows = [&](const char *what, auto result, auto multiply, auto also) {
        in_both_ways(f.panels(), [&](auto for_each) {
            std::vector<uint16_t> got((size_t)(blocks * kPanel * apart), 7);
            for_each([&](int64_t p, auto some) { multiply(ToRows{got.data() + p * kPanel, apart}, p, some); });
            for (int64_t r = 0; r < f.rows; ++r)
                for (int64_t c = 0; c < apart; ++c) {
                    if (c >= f.columns && c < f.panels() * kPanel) continue;  // padding
                    const bool given = c < f.columns;
                    const uint16_t expected = given ? round_to_bfloat16(broadcast(result(r, c)))[0] : (uint16_t)7;
                    CHECK(got[(size_t)(r * apart + c)] == expected, "%s, %d x %d x %d: at %d, %d", what, (int)f.rows,
                          (int)f.depth, (int)f.columns, (int)r, (int)c);
                }
            also();
        });
    };
    const Panels no_panels = {};
    check_to_rows(
        "pairs to rows", [&](int64_t r, int64_t c) { return product(r, c); },
        [&](ToRows to, int64_t p, auto some) {
            multiply<some.kCount>(no_panels, p, blocks, to, of(as_stored, p, some));
        },
        nothing_else);
    check_to_rows(
        "pairs, weighed, to rows", [&](int64_t r, int64_t c) { return weighed(0, product(r, c), row_weights(0, r)); },
        [&](ToRows to, int64_t p, auto some) {
            multiply<some.kCount>(no_panels, p, blocks, to, of(as_stored, p, some), weights, of(turned, p, some));
        },
        nothing_else);

    auto gate_of = [](int64_t r, int64_t c) { return (float)((3 * r + c) % 5 - 2); };
    std::vector<uint16_t> gate((size_t)(blocks * kPanel * apart)), kept(gate.size());
    for (int64_t r = 0; r < blocks * kPanel; ++r)
        for (int64_t c = 0; c < apart; ++c)
            gate[(size_t)(r * apart + c)] = round_to_bfloat16(broadcast(gate_of(r, c)))[0];
    for (const bool keeps : {false, true})
        check_to_rows(
            "pairs to gated rows", [&](int64_t r, int64_t c) { return gate_of(r, c) * product(r, c); },
            [&](ToRows to, int64_t p, auto some) {
                const ToRows beside{gate.data() + p * kPanel, apart};
                const ToRows also{keeps ? kept.data() + p * kPanel : nullptr, apart};
                multiply<some.kCount>(no_panels, p, blocks, ToGatedRows{to, beside, also}, of(as_stored, p, some));
            },
            [&] {
                for (int64_t r = 0; r < f.rows; ++r)
                    for (int64_t c = 0; c < f.columns; ++c) {
                        const uint16_t expected = keeps ? round_to_bfloat16(broadcast(product(r, c)))[0] : (uint16_t)0;
                        CHECK(kept[(size_t)(r * apart + c)] == expected, "kept, %d x %d x %d: at %d, %d", (int)f.rows,
                              (int)f.depth, (int)f.columns, (int)r, (int)c);
                    }
                kept.assign(kept.size(), 0);
            });
}

// A product writes its blocks of its panel and nothing else, and calls `meanwhile` once for each block of rows and
// depth.
void check_bounds() {
    constexpr int64_t row_blocks = 2, depth_blocks = 3;
    Packed<float> left(row_blocks * kPanel, depth_blocks * kPanel, [](int64_t, int64_t) { return 1.0f; });
    Packed<float> right(depth_blocks * kPanel, kPanel, [](int64_t, int64_t) { return 1.0f; });
    std::vector<float> got(kBlock * (row_blocks + 2), -1.0f);
    struct Counting {
        int *calls;
        void operator()() const { ++*calls; }
    };
    int calls = 0;
    multiply(got.data() + kBlock, row_blocks, Zero(),
             Product<AsStored, Panel, Counting>{left.panels, right.panels.panel(0), depth_blocks, {&calls}});
    for (int64_t i = 0; i < (int64_t)got.size(); ++i) {
        const bool inside = i >= kBlock && i < kBlock * (row_blocks + 1);
        CHECK(got[(size_t)i] == (inside ? depth_blocks * kPanel : -1), "element %d is %g", (int)i, got[(size_t)i]);
    }
    CHECK(calls == row_blocks * depth_blocks, "meanwhile was called %d times", calls);

    multiply(got.data(), row_blocks, Zero(),
             Product<AsStored, Panel, Counting>{left.panels, right.panels.panel(0), 0, {&calls}});
    for (int64_t i = 0; i < row_blocks * kBlock; ++i)
        CHECK(got[(size_t)i] == 0, "no depth: element %d is %g", (int)i, got[(size_t)i]);

    const Packed<float> columns(depth_blocks * kPanel, 3 * kPanel, [](int64_t, int64_t) { return 1.0f; });
    const Packed<float> result(row_blocks * kPanel, 3 * kPanel, [](int64_t, int64_t) { return -1.0f; });
    calls = 0;
    for_each_panels(3, [&](int64_t p, auto some) {
        multiply<some.kCount>(result.panels, p, row_blocks, Zero(),
                              Times<some.kCount, AsStored, Counting>{
                                  left.panels, panels_at<some.kCount>(columns.panels, p), depth_blocks, {&calls}});
    });
    constexpr int at_once = (3 + kPanelsAtOnce - 1) / kPanelsAtOnce;
    CHECK(calls == at_once * row_blocks * depth_blocks, "of three panels, meanwhile was called %d times", calls);
}

// A tile of any height up to the build's, in the last rows and columns of its block.
template <int Rows> void check_tile(const Factors &f, const Packed<float> &left, const Packed<float> &right) {
    constexpr int row = kPanel - Rows, columns = kTileVecs * kLanes, column = kPanel - columns;
    Plain expected(kPanel, kPanel);
    multiply_plainly(f.left, f.right, kPanel, kPanel, f.depth, expected);
    Vec tile[Rows][kTileVecs];
    Zero().begin(tile, Place{nullptr, kLanes});
    accumulate<row, column>(tile, 0, Product<AsStored>{left.panels, right.panels.panel(0), f.depth_blocks()});
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < columns; ++c)
            CHECK(tile[r][c / kLanes][c % kLanes] == expected(row + r, column + c), "tile of %d x %d: at %d, %d", Rows,
                  columns, r, c);
}
template <int... Rows> void check_tiles(const Factors &f, std::integer_sequence<int, Rows...>) {
    const Packed<float> left = f.left_panels(), right = f.right_panels();
    (check_tile<Rows + 1>(f, left, right), ...);
}

}  // namespace

int main() {
    Random random(1);
    auto number = [&] { return random.number(); };
    auto whole = [&] { return (float)(random.below(17) - 8); };
    const Plain left = filled(kSizes, kSizes, number), right = filled(kSizes, kSizes, number);
    const Plain whole_left = filled(kSizes, kSizes, whole), whole_right = filled(kSizes, kSizes, whole);
    const Plain whole_before = filled(kSizes, kSizes, whole), whole_weights = filled(1, padded(kSizes), whole);
    const Plain before = filled(kSizes, kSizes, number);
    const Plain row_weights = filled(1, padded(kSizes), number), column_weights = filled(1, padded(kSizes), number);
    for (int64_t rows = 1; rows <= kSizes; rows += SIZE_STEP)
        for (int64_t columns = 1; columns <= kSizes; columns += SIZE_STEP)
            for (int64_t depth = 1; depth <= kSizes; depth += SIZE_STEP) {
                check_floats({left, right, rows, columns, depth}, before, row_weights, column_weights);
                if constexpr (kPairs)
                    check_pairs({whole_left, whole_right, rows, columns, depth}, whole_before, whole_weights);
            }
    check_bounds();
    check_tiles({left, right, kPanel, kPanel, kSizes}, std::make_integer_sequence<int, kTileRows>());
    return outcome();
}
