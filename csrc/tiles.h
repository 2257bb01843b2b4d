// Products of bfloat16 in AMX's tiles: 16 rows of 64 bytes, which one instruction multiplies.
//
// A tile of a left factor has 16 rows and 32 numbers of depth, in pairs; one of a right factor 16 pairs of depth and 16
// columns. Both stand as PanelsOf<Pair> has them: rows over channels are left factors, rows over tokens right ones.
//
// Results are floats, block by block. What becomes of them is told to nobody here: tiles cannot be weighed, so they go
// through L1 to whoever asked for them.
#pragma once

#include "decay_form.h"
#include "fulmen.h"
#include "panels.h"

namespace fulmen {
namespace FULMEN_ISA {

// Whether linear attention multiplies in tiles: as pairs, not with a decay of the values nor of few channels.
FULMEN_INLINE bool attends_in_tiles(const fulmen_problem &p) {
    return kTiles && p.k.dtype == FULMEN_BFLOAT16 && !decays(p.decay_v_form) && p.key_size >= kPanel &&
           p.value_size >= kPanel;
}

constexpr int64_t kTileDepth = 2 * kPanel;  // numbers
constexpr int64_t kTilePairs = kBlock;      // pairs

FULMEN_INLINE int64_t tiles_of(int64_t n) { return (n + kTileDepth - 1) / kTileDepth; }

// Strides are in pairs: from a block of rows to the next, and from a tile of depth to the next.
struct LeftTiles {
    const Pair *data;
    int64_t next_rows, next_depth;
};
// Tiles of depth follow each other; panels of 16 columns are apart.
struct RightTiles {
    const Pair *data;
    int64_t next_columns;
};
// Blocks of 16 x 16 floats, which are this far apart.
struct TileSums {
    float *data;
    int64_t next_rows, next_columns;
};

#if FULMEN_TILES
// While this lives, vectors take and give subnormal numbers as zero, as tiles always do. Over a chunk of tiles many
// decays pass through them, and each would take a hundred clocks.
class NoSubnormals {
public:
    NoSubnormals() : before(_mm_getcsr()) { _mm_setcsr(before | kFlushToZero | kDenormalsAreZero); }
    ~NoSubnormals() { _mm_setcsr(before); }
    NoSubnormals(const NoSubnormals &) = delete;

private:
    static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
    const unsigned before;
};
#endif

#if defined(__AMX_BF16__)

// A thread's tile registers, while this lives: those of a thread that does not use them cost whoever switches threads.
class TileRegisters {
public:
    TileRegisters() {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } const shapes;
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~TileRegisters() { asm volatile("tilerelease"); }
    TileRegisters(const TileRegisters &) = delete;
};

template <int To> FULMEN_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(To)); }
template <int To> FULMEN_INLINE void load_tile(const void *from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t)64), "i"(To) : "memory");
}
template <int From> FULMEN_INLINE void store_tile(float *to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)64), "i"(From) : "memory");
}
template <int To, int Left, int Right> FULMEN_INLINE void multiply_tile() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(Left), "i"(Right));
}

// sums, Rows x Columns blocks, = left * right, or that added to what they are. Each tile that is loaded is multiplied
// twice where both are 2: loads take half as long as products then.
template <int Rows, int Columns, bool Adds = false>
FULMEN_INLINE void multiply_tiles(const LeftTiles &left, const RightTiles &right, int64_t depth, const TileSums &sums) {
    constexpr int kLeft = 4, kRight = 6;
    constexpr bool kTall = Rows == 2, kWide = Columns == 2;
    float *const below = sums.data + sums.next_rows;
    if constexpr (Adds) {
        load_tile<0>(sums.data);
        if constexpr (kWide) load_tile<1>(sums.data + sums.next_columns);
        if constexpr (kTall) load_tile<2>(below);
        if constexpr (kTall && kWide) load_tile<3>(below + sums.next_columns);
    } else {
        clear_tile<0>();
        if constexpr (kWide) clear_tile<1>();
        if constexpr (kTall) clear_tile<2>();
        if constexpr (kTall && kWide) clear_tile<3>();
    }
    const Pair *a = left.data, *b = right.data;
    for (int64_t d = 0; d < depth; ++d, a += left.next_depth, b += kTilePairs) {
        load_tile<kRight>(b);
        load_tile<kLeft>(a);
        multiply_tile<0, kLeft, kRight>();
        if constexpr (kWide) {
            load_tile<kRight + 1>(b + right.next_columns);
            multiply_tile<1, kLeft, kRight + 1>();
        }
        if constexpr (kTall) {
            load_tile<kLeft + 1>(a + left.next_rows);
            multiply_tile<2, kLeft + 1, kRight>();
            if constexpr (kWide) multiply_tile<3, kLeft + 1, kRight + 1>();
        }
    }
    store_tile<0>(sums.data);
    if constexpr (kWide) store_tile<1>(sums.data + sums.next_columns);
    if constexpr (kTall) store_tile<2>(below);
    if constexpr (kTall && kWide) store_tile<3>(below + sums.next_columns);
}

#else

// For tests, where there are no tiles.
class TileRegisters {
public:
    TileRegisters() {}
};

template <int Rows, int Columns, bool Adds = false>
static void multiply_tiles(const LeftTiles &left, const RightTiles &right, int64_t depth, const TileSums &sums) {
    for (int r = 0; r < Rows * kPanel; ++r)
        for (int c = 0; c < Columns * kPanel; c += kLanes) {
            float *const block = sums.data + r / kPanel * sums.next_rows + c / kPanel * sums.next_columns;
            float *const to = block + r % kPanel * kPanel + c % kPanel;
            Vec sum = Adds ? load(to) : Vec{};
            const Pair *a = left.data + r / kPanel * left.next_rows + r % kPanel * kPanel;
            const Pair *b = right.data + c / kPanel * right.next_columns + c % kPanel;
            for (int64_t d = 0; d < depth; ++d, a += left.next_depth, b += kTilePairs)
                for (int k = 0; k < kPanel; ++k) sum = multiply_add(a[k], load(b + k * kPanel), sum);
            store(to, sum);
        }
}

#endif

// The same to blocks one after the other.
template <int Rows, int Columns>
FULMEN_INLINE void multiply_tiles(const LeftTiles &left, const RightTiles &right, int64_t depth, float *sums) {
    multiply_tiles<Rows, Columns>(left, right, depth, {sums, Columns * kBlock, kBlock});
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
