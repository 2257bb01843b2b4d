// The forward of heads in bfloat16, in tiles: what forward_worker.h does, with chunks of 64 tokens.
//
//     o_i   = prefix_i (q_i S) + sum over j <= i of (w_ij q_i.k_j) v_j        prefix_i on the sum, in floats
//     S_out = total S + sum over j of (suffix_j k_j) v_j^T
//
// Every element of the state is read, decayed, added to and rounded once in a chunk, which takes as long as 64 tokens
// take to multiply; chunks of 16 would do little else. Decay weights are those of blocks of 16 tokens. Between blocks
// they are products: from token j to the end of its block, through the blocks between, to token i.
//
// A decay per channel weighs queries and keys themselves, in floats. Inside of a block pairs of tokens are floats too.
// Pairs of two blocks meet at the end of the earlier one: keys are weighed up to there, and queries from there on, so
// that a block's queries are rounded anew for each block before.
//
// The weighed scores, queries and keys and the state are rounded once, where they become factors.
#pragma once

#include <array>

#include "tile_rows.h"

namespace fulmen {
namespace FULMEN_ISA {

#if FULMEN_TILES

template <> class ForwardHead<Tile> {
public:
    static constexpr int64_t kTokens = kTileTokens;
    static constexpr bool kExpects = true;

    ForwardHead(Arena &arena, const fulmen_problem &p, int64_t columns, const QueriesAndKeys<Tile> &rows, int64_t,
                int64_t)
        : key(arena, p.decay_form, p.key_size, kTokens),
          value(arena, FULMEN_DECAY_NONE, columns),
          state(arena.panels(p.key_size, columns)),
          factor(arena.panels<Pair>(rows.depth * kPanel, columns)),
          rows(rows) {
        for (int64_t p = 0; p < value.blocks() && factor.data; ++p) clear_tail(p);
    }

    // Values may have weights, one of each token, and be added to the output.
    void start(const Head &head, Rows weights_of_values = {}, float skip_of_values = 0) {
        in = head;
        key.start(head.log_decay, head.reversed);
        value.start({});
        for (float &weight : prefix) weight = 1;  // with a decay per channel it is in the queries
        value_weights = weights_of_values;
        skip = skip_of_values;
    }
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
    void round_state() {
        for (int64_t p = 0; p < value.blocks(); ++p) round_rows(state.panel(p), key.blocks() * kPanel, factor.panel(p));
    }

    // Who attends next, from token t on, with these queries and keys or others. Its rows are prefetched between
    // products: earlier they would be gone from L2 again, and all at once they would have to wait for each other.
    void expect(const HeadSlice &next, int64_t t, bool shares) {
        expected = {next.head.v.from(t, 0), next.output.from(t, 0)};
        if (!shares) expected[2] = next.head.q.from(t, 0), expected[3] = next.head.k.from(t, 0);
        expected_tokens = smaller(kTokens, next.head.tokens - t);
        part = 0;
    }

    // A chunk whose queries and keys are loaded. The state that enters may be `empty`, and need not be there then.
    void attend(Rows output, int64_t t, int64_t count, bool empty, bool advances) {
        const NoSubnormals none;
        load_values(t, count);
        const TileRegisters registers;
        if (key.by_channel()) {
            weigh_channels(tiles_of(count), true, advances);
        } else {
            weigh_scores(tiles_of(count));
            if (advances) weigh_keys(tiles_of(count));
        }
        parts = (value.blocks() + 1) / 2 * (tiles_of(count) + (advances ? (key.blocks() + 1) / 2 : 0));
        for_each_columns([&](int64_t p, auto columns) { read_panels<columns>(output, p, t, count, empty); });
        if (advances) for_each_columns([&](int64_t p, auto columns) { advance_panels<columns>(p, count); });
    }

    // The state alone, without reading it, over the chunk that begins at token t.
    void advance(int64_t t, int64_t last) {
        const NoSubnormals none;
        const int64_t count = smaller<int64_t>(kTokens, last - t);
        rows.load_keys(in, t, count);
        load_values(t, count);
        const TileRegisters registers;
        expected = {in.v.from(t + kTokens, 0), {}, {}, in.k.from(t + kTokens, 0)};
        expected_tokens = smaller(kTokens, in.tokens - t - kTokens);
        part = 0;
        parts = (value.blocks() + 1) / 2 * ((key.blocks() + 1) / 2);
        key.by_channel() ? weigh_channels(tiles_of(count), false, true) : weigh_keys(tiles_of(count));
        for_each_columns([&](int64_t p, auto columns) { advance_panels<columns>(p, count); });
    }

    bool grows() const { return key.grows(); }

    Axis key, value;
    const Panels state;

private:
    void load_values(int64_t t, int64_t count) {
        key.begin(t, count);
        value.begin(t, count);
        rows.v.load(in.v.from(t, 0), count);
        if (!key.by_channel()) weigh_tokens(t, count);
    }
    void weigh_tokens(int64_t t, int64_t count) {
        for (int64_t b = 0; b < kTokenBlocks; ++b)
            if (value_weights.present())
                gather(value_weights, t + b * kPanel, larger<int64_t>(0, smaller<int64_t>(kPanel, count - b * kPanel)),
                       own + b * kPanel);
            else
                memcpy(own + b * kPanel, kOnes, sizeof kOnes);
        double before = 1, after = 1;
        for (int64_t b = 0; b < kTokenBlocks; ++b) {
            const ScalarWeights &w = key.weights(b);
            for (int i = 0; i < kPanel; ++i)
                prefix[b * kPanel + i] = rows.scale * (float)(before * (double)w.prefix[i]);
            before *= w.total;
        }
        for (int64_t b = kTokenBlocks - 1; b >= 0; --b) {
            const ScalarWeights &w = key.weights(b);
            for (int j = 0; j < kPanel; ++j)
                suffix[b * kPanel + j] = (float)(after * (double)w.suffix[j]) * own[b * kPanel + j];
            after *= w.total;
        }
    }

    // An exact 0 for i < j: not even NaN comes from a later key.
    void weigh_scores(int64_t tiles) {
        for (int64_t later = 0; later < 2 * tiles; ++later) {
            const ScalarWeights &w = key.weights(later);
            Vec row = {};
            const float *own_scores = rows.scores(later, later);
            for (int i = 0; i < kPanel; ++i) {
                row = select(lane_numbers() == i, broadcast(1.0f), row * w.factor[i]);
                const Vec x = load(own_scores + i * kPanel) * (row * load(own + later * kPanel) * rows.scale);
                put_scores(later, later, i, select(lane_numbers() <= i, x, Vec{}));
            }
            double between = rows.scale;
            for (int64_t earlier = later - 1; earlier >= 0; --earlier) {
                const Vec to_end = load(key.weights(earlier).suffix) * load(own + earlier * kPanel);
                const float *scores = rows.scores(later, earlier);
                const float through = (float)between;
                for (int i = 0; i < kPanel; ++i)
                    put_scores(later, earlier, i, load(scores + i * kPanel) * (to_end * (through * w.prefix[i])));
                between *= key.weights(earlier).total;
            }
        }
    }
    FULMEN_MEMBER void put_scores(int64_t later, int64_t earlier, int i, Vec x) const {
        Pair *const tile = rows.weighed_scores + (later * kTokenTiles + earlier / 2) * kTilePairs;
        store_as(BFloat16(), (uint16_t *)(tile + i * kPanel) + earlier % 2 * kPanel, x);
    }

    // Channels over tokens, a left factor: a row has the tokens of two blocks, one after the other.
    void weigh_keys(int64_t tiles) {
        const float *const weights = suffix;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const Vec first = load(weights + tile * kTileDepth), second = load(weights + tile * kTileDepth + kPanel);
            for (int64_t c = 0; c < rows.depth; ++c) {
                const Pair *const a = rows.keys(2 * tile, c), *const b = rows.keys(2 * tile + 1, c);
                Pair *const to = rows.weighed_keys + (2 * c * kTokenTiles + tile) * kTilePairs;
                for (int m = 0; m < kPanel; ++m) {
                    const BitVec x = load(a + m * kPanel), y = load(b + m * kPanel);
                    Pair *const row = to + m / 8 * kTokenTiles * kTilePairs + m % 8 * 2 * kPanel;
                    store(row, in_pairs(firsts(x) * first, firsts(y) * second));
                    store(row + kPanel, in_pairs(seconds(x) * first, seconds(y) * second));
                }
            }
        }
    }

    // With a decay per channel. In floats a block's keys are weighed to its end, and its queries from its start.
    void weigh_channels(int64_t tiles, bool reads, bool advances) const {
        const int64_t blocks = 2 * tiles;
        for (int64_t b = 0; b < blocks; ++b) {
            const Panels q = block_of(rows.float_queries, b), k = block_of(rows.float_keys, b);
            if (reads) {
                key.channel_pair_products(q, k, rows.sums, b);
                for (int i = 0; i < kPanel; ++i) put_scores(b, b, i, load(rows.sums + i * kPanel));
                key.weigh_later(q, b);
            }
            key.weigh_earlier(k, b);
            if (reads && b + 1 < blocks) rows.round_keys(b);
        }
        for (int64_t later = 0; later < blocks && reads; ++later) {
            for (int64_t earlier = later - 1; earlier >= 0; --earlier) {
                rows.round_queries(later);
                multiply_tiles<1, 1>(rows.queries(later), {rows.keys(earlier, 0), 0}, rows.depth, rows.sums);
                for (int i = 0; i < kPanel; ++i) put_scores(later, earlier, i, load(rows.sums + i * kPanel));
                weigh_queries(later, earlier);
            }
            rows.round_queries(later);
        }
        for (int64_t p = 0; p < key.blocks() && advances; ++p) weigh_keys_of_panel(p, tiles);
    }
    static Panels block_of(Panels x, int64_t block) { return {x.data + block * kBlock, x.stride}; }

    // The queries of a block pass another one before.
    void weigh_queries(int64_t block, int64_t passed) const {
        for (int64_t p = 0; p < key.blocks(); ++p) {
            const Vec total = load(key.block_totals(passed, p));
            float *const x = rows.float_queries.panel(p) + block * kBlock;
            for (int i = 0; i < kBlock; i += kPanel) store(x + i, load(x + i) * total);
        }
    }

    // Keys that are weighed to the ends of their blocks: to the end of the chunk, 16 channels over tokens.
    void weigh_keys_of_panel(int64_t p, int64_t tiles) const {
        Vec after = broadcast(1.0f);
        for (int64_t tile = tiles - 1; tile >= 0; --tile) {
            Vec first[kPanel], second[kPanel];
            const float *const x = rows.float_keys.panel(p) + 2 * tile * kBlock;
            for (int i = 0; i < kPanel; ++i) second[i] = load(x + kBlock + i * kPanel) * after;
            after *= load(key.block_totals(2 * tile + 1, p));
            for (int i = 0; i < kPanel; ++i) first[i] = load(x + i * kPanel) * after;
            after *= load(key.block_totals(2 * tile, p));
            transpose_lanes<kLanes / 2>(first);
            transpose_lanes<kLanes / 2>(second);
            Pair *const to = rows.weighed_keys + (p * kTokenTiles + tile) * kTilePairs;
            for (int d = 0; d < kPanel; ++d) store(to + d * kPanel, in_pairs(first[d], second[d]));
        }
    }

    // Calls f with panels of the values, two at a time, and how many these are.
    template <class F> FULMEN_MEMBER void for_each_columns(F f) const {
        int64_t p = 0;
        for (; p + 1 < value.blocks(); p += 2) f(p, std::integral_constant<int, 2>());
        if (p < value.blocks()) f(p, std::integral_constant<int, 1>());
    }
    template <int Columns>
    FULMEN_MEMBER void read_panels(Rows output, int64_t p, int64_t t, int64_t count, bool empty) {
        for (int64_t tile = 0; tile < tiles_of(count); ++tile) {
            const int64_t first = tile * kTileDepth;
            prefetch_part();
            read<Columns>(p, tile, empty ? 0 : rows.depth);
            write<Columns>(output, p, t + first, smaller(kTileDepth, count - first), prefix + first);
        }
    }
    template <int Columns> FULMEN_MEMBER void advance_panels(int64_t p, int64_t count) {
        for (int64_t block = 0; block < key.blocks(); block += 2) {
            prefetch_part();
            add<Columns>(p, block, tiles_of(count));
            block + 1 < key.blocks() ? decay<2, Columns>(p, block) : decay<1, Columns>(p, block);
        }
        if (key.size() % kPanel == 0 && (p + Columns) * kPanel <= value.size()) return;
        for (int c = 0; c < Columns; ++c) {
            clear_padding(state, key.size(), value.size(), p + c);
            round_rows(state.panel(p + c), key.blocks() * kPanel, factor.panel(p + c));
        }
    }

    FULMEN_MEMBER void prefetch_part() {
        for (int x = 0; x < 4; ++x)
            prefetch(expected[x], 0, expected_tokens, x < 2 ? value.size() : key.size(), part, parts);
        ++part;
    }

    // Of two blocks of 16 tokens: what is inside the chunk, and from the state.
    template <int Columns> FULMEN_MEMBER void read(int64_t p, int64_t tile, int64_t depth) const {
        multiply_tiles<2, Columns>(
            {rows.weighed_scores + 2 * tile * kTokenTiles * kTilePairs, kTokenTiles * kTilePairs, kTilePairs},
            {rows.v.over_tokens().panel(p), rows.v.over_tokens().stride}, tile + 1, rows.sums);
        multiply_tiles<2, Columns>(rows.queries(2 * tile), {factor.panel(p), factor.stride}, depth,
                                   rows.sums + 4 * kBlock);
    }
    template <int Columns>
    FULMEN_MEMBER void write(Rows output, int64_t p, int64_t t, int64_t n, const float *weights) const {
        const Results<Columns> x{rows.sums, weights};
        if (skip != 0 || output.dtype != FULMEN_BFLOAT16 || (p + Columns) * kPanel > value.size())
            return write_some(x, output, p, t, n);
        const Rows to = output.from(t, p * kPanel);
        for (int64_t i = 0; i < n; ++i)
            if constexpr (Columns == 2)
                store((Pair *)to.row(i), in_pairs(x(i, 0), x(i, 1)));
            else
                store_as(BFloat16(), (uint16_t *)to.row(i), x(i, 0));
    }
    template <int Columns> struct Results {
        const float *sums, *weights;
        FULMEN_MEMBER Vec operator()(int64_t i, int c) const {
            const float *const inside = sums + (i / kPanel * Columns + c) * kBlock + i % kPanel * kPanel;
            return load(inside) + load(inside + 4 * kBlock) * weights[i];
        }
    };
    template <int Columns>
    void write_some(const Results<Columns> &x, Rows output, int64_t p, int64_t t, int64_t n) const {
        float o[kBlock];
        for (int c = 0; c < Columns; ++c)
            for (int64_t first = 0; first < n; first += kPanel) {
                const int64_t some = smaller<int64_t>(kPanel, n - first), column = (p + c) * kPanel;
                for (int64_t i = 0; i < some; ++i) {
                    const uint16_t *const own = (const uint16_t *)in.v.row(t + first + i) + column;
                    Vec row = x(first + i, c);
                    if (skip != 0) row += load_some(BFloat16(), own, value.size() - column) * skip;
                    store(o + i * kPanel, row);
                }
                unpack_panel(o, p + c, t + first, some, value.size(), output);
            }
    }

    // Of the state, up to two blocks of rows: what the chunk adds, and the sum of both, which is rounded at once.
    template <int Columns> FULMEN_MEMBER void add(int64_t p, int64_t block, int64_t tiles) const {
        multiply_tiles<2, Columns>(
            {rows.weighed_keys + block * kTokenTiles * kTilePairs, kTokenTiles * kTilePairs, kTilePairs},
            {rows.v.over_tokens().panel(p), rows.v.over_tokens().stride}, tiles, rows.sums);
    }
    template <int Blocks, int Columns> FULMEN_MEMBER void decay(int64_t p, int64_t block) const {
        for (int c = 0; c < Columns; ++c)
            for (int b = 0; b < Blocks; ++b) {
                const float *const totals = key.totals() + (block + b) * kPanel;
                float *const s = state.panel(p + c) + (block + b) * kBlock;
                const float *const added = rows.sums + (b * Columns + c) * kBlock;
                Pair *const rounded = factor.panel(p + c) + (block + b) * kBlock / 2;
#pragma GCC unroll 8
                for (int x = 0; x < kBlock; x += 2 * kPanel) {
                    const Vec even = load(added + x) + load(s + x) * totals[x / kPanel];
                    const Vec odd = load(added + x + kPanel) + load(s + x + kPanel) * totals[x / kPanel + 1];
                    store(s + x, even);
                    store(s + x + kPanel, odd);
                    store(rounded + x / 2, lane_pairs(even, odd));
                }
            }
    }
    // A tile's depth beyond that of the state, which is zero.
    void clear_tail(int64_t p) const {
        Pair *const to = factor.panel(p);
        for (int64_t x = key.blocks() * kBlock / 2; x < rows.depth * kTilePairs; x += kLanes) store(to + x, BitVec{});
    }

    const PanelsOf<Pair> factor;  // the state, rounded
    const QueriesAndKeys<Tile> rows;
    Head in = {};
    std::array<Rows, 4> expected = {};  // of values, output, queries and keys
    int64_t expected_tokens = 0, part = 0, parts = 1;
    Rows value_weights = {};
    float skip = 0;
    float own[kTileTokens], prefix[kTileTokens], suffix[kTileTokens];  // of the chunk; prefix with the scale
};

// One head, of which nothing but the state is computed.
class TileStateWorker : public ForwardHead<Tile> {
public:
    TileStateWorker(Arena &arena, const fulmen_problem &p, int64_t columns)
        : ForwardHead<Tile>(arena, p, columns, QueriesAndKeys<Tile>(arena, p), 0, 1) {}
};

#endif

}  // namespace FULMEN_ISA
}  // namespace fulmen
