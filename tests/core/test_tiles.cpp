// Products of tiles against sums in double: every shape, depths up to six tiles, sums that are apart, and sums that are
// added to.
#include <math.h>

#include <vector>

#include "check.h"
#include "tile_permission.h"
#include "tiles.h"

using namespace fulmen;
using namespace fulmen::FULMEN_ISA;

namespace {

#if FULMEN_TILES

constexpr int64_t kDepth = 6, kApart = 32;  // tiles; floats between blocks

// Small whole numbers, whose sums floats have. Neighbours differ.
float number(int64_t i) { return (float)(i * 7 % 31 - 15); }
Pair pair(float first, float second) {
    uint32_t bits[2];
    memcpy(bits, &first, 4);
    memcpy(bits + 1, &second, 4);
    return {bits[0] >> 16 | (bits[1] & 0xffff0000u)};
}

template <int Rows, int Columns, bool Adds> void check_product(int64_t depth) {
    const int64_t tiles = kDepth + 1;  // one that is not multiplied
    std::vector<Pair> left((size_t)(Rows * tiles * kTilePairs)), right((size_t)(Columns * tiles * kTilePairs));
    std::vector<float> sums((size_t)(Rows * Columns * (kBlock + kApart)), 0);
    auto a = [](int64_t row, int64_t d) { return number(row * 1000 + d); };
    auto b = [](int64_t d, int64_t column) { return number(d * 100 + column + 5); };
    for (int64_t t = 0; t < tiles; ++t)
        for (int64_t i = 0; i < kPanel; ++i)
            for (int64_t k = 0; k < kPanel; ++k) {
                const int64_t d = t * kTileDepth;
                for (int64_t r = 0; r < Rows; ++r)
                    left[(size_t)((t * Rows + r) * kTilePairs + i * kPanel + k)] =
                        pair(a(r * kPanel + i, d + 2 * k), a(r * kPanel + i, d + 2 * k + 1));
                for (int64_t c = 0; c < Columns; ++c)
                    right[(size_t)((c * tiles + t) * kTilePairs + k * kPanel + i)] =
                        pair(b(d + 2 * k, c * kPanel + i), b(d + 2 * k + 1, c * kPanel + i));
            }
    const int64_t next = kBlock + kApart;
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = number((int64_t)i);
    const std::vector<float> before = sums;
    {
        const TileRegisters registers;
        multiply_tiles<Rows, Columns, Adds>({left.data(), kTilePairs, Rows * kTilePairs},
                                            {right.data(), tiles * kTilePairs}, depth,
                                            {sums.data(), Columns * next, next});
    }
    for (int64_t i = 0; i < (int64_t)sums.size(); ++i) {
        const int64_t block = i / next, at = i % next;
        double want = before[(size_t)i];
        if (at < kBlock) {
            if (!Adds) want = 0;
            for (int64_t d = 0; d < depth * kTileDepth; ++d)
                want +=
                    (double)a(block / Columns * kPanel + at / kPanel, d) * b(d, block % Columns * kPanel + at % kPanel);
        }
        CHECK(sums[(size_t)i] == (float)want, "%d x %d, depth %d, %d: %g in place of %g", Rows, Columns, (int)depth,
              (int)i, (double)sums[(size_t)i], want);
    }
}

template <int Rows, int Columns> void check_shape() {
    for (int64_t depth = 0; depth <= kDepth; ++depth) {
        check_product<Rows, Columns, false>(depth);
        check_product<Rows, Columns, true>(depth);
    }
}

#endif

}  // namespace

int main() {
#if FULMEN_TILES
#if defined(__AMX_BF16__)
    CHECK(request_tiles(), "the system gives no tiles");
#endif
    check_shape<1, 1>();
    check_shape<1, 2>();
    check_shape<2, 1>();
    check_shape<2, 2>();
#endif
    return outcome();
}
