// The queries and keys of a chunk as tiles (tile_worker.h).
#pragma once

#include "forward_worker.h"
#include "tiles.h"

namespace fulmen {
namespace FULMEN_ISA {

#if FULMEN_TILES

constexpr int64_t kTileTokens = 64;
constexpr int64_t kTokenBlocks = kTileTokens / kPanel, kTokenTiles = kTileTokens / kTileDepth;

// Sixteen rows of 32 channels, of which row(r) is one in pairs: pairs of channels by tokens.
template <class Row> FULMEN_INLINE void transpose_rows(Row row, Pair *to) {
    Vec pairs[kPanel];
#pragma GCC unroll 16
    for (int r = 0; r < kPanel; ++r) pairs[r] = (Vec)row(r);
    transpose_lanes<kLanes / 2>(pairs);
#pragma GCC unroll 16
    for (int r = 0; r < kPanel; ++r) store((float *)to + r * kPanel, pairs[r]);
}

// The same of up to 16 rows of up to 32 channels, the rest is zero.
static inline void transpose_rows(Rows rows, int64_t count, int64_t channels, Pair *to) {
    if (count >= kPanel && channels >= kTileDepth)
        transpose_rows([&](int r) { return load_pairs((const uint16_t *)rows.row(r)); }, to);
    else
        transpose_rows(
            [&](int r) { return r < count ? load_some_pairs((const uint16_t *)rows.row(r), channels) : BitVec{}; }, to);
}

// The queries and keys of a chunk, and what heads have in turns while they attend to it: so many more of their states
// stay in L2.
template <> class QueriesAndKeys<Tile> {
public:
    QueriesAndKeys(Arena &arena, const fulmen_problem &p)
        : decay_by_channel(by_channel(p.decay_form)),
          scale((float)p.scale),
          depth(tiles_of(p.key_size)),
          float_queries(decay_by_channel ? arena.panels(kTileTokens, p.key_size) : Panels{}),
          float_keys(decay_by_channel ? arena.panels(kTileTokens, p.key_size) : Panels{}),
          q(arena, kTileTokens, p.key_size, Use{true, false}),
          transposed_keys((Pair *)arena.floats(kTokenBlocks * depth * kTilePairs)),
          products(arena.floats(kTokenBlocks * kTokenBlocks * kBlock)),
          v(arena, kTileTokens, p.value_size, Use{false, true}),
          weighed_keys((Pair *)arena.floats(2 * depth * kTokenTiles * kTilePairs)),
          weighed_scores((Pair *)arena.floats(kTokenBlocks * kTokenTiles * kTilePairs)),
          sums(arena.floats(8 * kBlock)) {
        if (weighed_scores) memset(weighed_scores, 0, 4 * kTokenBlocks * kTokenTiles * kTilePairs);
    }

    void load(const Head &in, int64_t t, int64_t count) const {
        load_keys(in, t, count);
        if (decay_by_channel) {
            load_floats(in.q, t, count, q.size, float_queries);
            for (int64_t p = 0; p * kPanel < q.size && scale != 1.0f; ++p)
                for (int64_t b = 0; b < 2 * tiles_of(count); ++b)
                    scale_block(float_queries.panel(p) + b * kBlock, scale);
            return;
        }
        q.load(in.q.from(t, 0), count);
        const TileRegisters registers;
        for (int64_t later = 0; later < tiles_of(count); ++later)
            for (int64_t earlier = 0; earlier <= later; ++earlier)
                multiply_tiles<2, 2>(queries(2 * later), {keys(2 * earlier, 0), depth * kTilePairs}, depth,
                                     scores(2 * later, 2 * earlier));
    }
    void load_keys(const Head &in, int64_t t, int64_t count) const {
        if (decay_by_channel) return load_floats(in.k, t, count, q.size, float_keys);
        for (int64_t b = 0; b < 2 * tiles_of(count); ++b)
            for (int64_t c = 0; c < depth; ++c)
                transpose_rows(in.k.from(t + b * kPanel, c * kTileDepth), count - b * kPanel, q.size - c * kTileDepth,
                               keys(b, c));
    }

    // From a block of 16 tokens on.
    LeftTiles queries(int64_t block) const {
        return {q.over_channels().data + block * kTilePairs, kTilePairs, q.over_channels().stride};
    }
    // Pairs of 32 channels, of 16 tokens: a right factor.
    Pair *keys(int64_t block, int64_t c) const { return transposed_keys + (block * depth + c) * kTilePairs; }
    // q_i . k_j of two blocks: [i][j].
    float *scores(int64_t later, int64_t earlier) const {
        return products + ((later / 2 * kTokenTiles + earlier / 2) * 4 + later % 2 * 2 + earlier % 2) * kBlock;
    }

    // Those in floats, rounded as they are now: the queries of a block, and its keys as a right factor.
    void round_queries(int64_t block) const {
        for (int64_t c = 0; c < depth; ++c)
            for (int r = 0; r < kPanel; ++r)
                store(q.over_channels().at(block * kPanel + r, c * kPanel), pairs_of(float_queries, block, c, r));
    }
    void round_keys(int64_t block) const {
        for (int64_t c = 0; c < depth; ++c)
            transpose_rows([&](int r) { return pairs_of(float_keys, block, c, r); }, keys(block, c));
    }

    const bool decay_by_channel;  // then queries and keys are in floats, and the former scaled; there are no scores
    const float scale;
    const int64_t depth;  // tiles of channels
    const Panels float_queries, float_keys;

private:
    static void load_floats(Rows rows, int64_t t, int64_t count, int64_t size, Panels to) {
        for (int64_t r = 0; r < tiles_of(count) * kTileDepth; r += kPanel)
            pack(rows, t + r, larger<int64_t>(0, smaller<int64_t>(kPanel, count - r)), size,
                 {to.data + r * kPanel, to.stride});
    }
    BitVec pairs_of(Panels x, int64_t block, int64_t c, int r) const {
        const float *const row = x.at(block * kPanel + r, c * kTileDepth);
        return in_pairs(FULMEN_ISA::load(row),
                        c * kTileDepth + kPanel < q.size ? FULMEN_ISA::load(row + x.stride) : Vec{});
    }

    const Operand<Tile> q;
    Pair *const transposed_keys;
    float *const products;

public:
    // Of the head that attends.
    const Operand<Tile> v;
    Pair *const weighed_keys, *const weighed_scores;
    float *const sums;
};

#endif

}  // namespace FULMEN_ISA
}  // namespace fulmen
