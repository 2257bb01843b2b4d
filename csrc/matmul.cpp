// c = a b^T + bias, of matrices that lie in the caller's memory either way: the products of a layer and of its gradient
// where torch's own are slow (nn/linear.py says where).
//
// A task is a tile of c, which stays in the L2 cache while the depth is summed over, in slices: there a slice of b for
// all columns of the tile, in panels, meets one of some rows of a after the other. What is copied into panels is
// converted to float32, and every number of it is a factor of at least sixteen products.
//
// Each element of c is the sum of its slices, each a chain of multiply-adds in the order of depth, so that bits do not
// depend on the tiles, which are as small as it takes for every thread to have some.
#include "kernels.h"
#include "operand.h"
#include "parallel.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

typedef fulmen_matmul_call Call;

constexpr int64_t kMostRows = 256, kMostColumns = 256;  // of a tile: 256 KiB
constexpr int64_t kSlice = 256;                         // of the depth: 16 KiB of each panel of b, in L1
constexpr int64_t kRowsAtOnce = 64;                     // of a: 64 KiB

// A factor: its rows are those of c, or its columns.
struct Factor {
    Rows rows;  // along the axis that is dense
    bool depth_is_dense;
    Factor(const fulmen_tensor &x) : rows(rows_of(x, 0, 0)), depth_is_dense(x.stride_head == 1) {
        if (!depth_is_dense) rows.stride = x.stride_head;
    }
    // From a row and a depth on.
    Rows from(int64_t row, int64_t depth) const {
        return depth_is_dense ? rows.from(row, depth) : rows.from(depth, row);
    }
};

struct Range {
    int64_t first, count;
};

// How c is partitioned.
struct Tiles {
    const Call &c;
    int64_t threads, rows = kMostRows, columns = kMostColumns;
    Tiles(const Call &c)
        : c(c),
          threads(worthwhile_threads(c.header.threads, 2.0 * (double)c.rows * (double)c.columns * (double)c.depth)) {
        while (count() < 2 * threads && columns > 2 * kPanel) columns /= 2;
        while (count() < 2 * threads && rows > 2 * kPanel) rows /= 2;
    }
    int64_t down() const { return (c.rows + rows - 1) / rows; }
    int64_t count() const { return down() * ((c.columns + columns - 1) / columns); }
    // Neighbours have the same columns: what they read of b is in a cache.
    Range rows_of_tile(int64_t tile) const { return range(tile % down(), rows, c.rows); }
    Range columns_of_tile(int64_t tile) const { return range(tile / down(), columns, c.columns); }

private:
    static Range range(int64_t index, int64_t size, int64_t all) {
        return {index * size, smaller(size, all - index * size)};
    }
};

class Worker {
public:
    Worker(Arena &arena, const Tiles &tiles)
        : c(tiles.c),
          a(c.a),
          b(c.b),
          sums(arena.panels(tiles.rows, tiles.columns)),
          left(a.depth_is_dense ? arena.panels(kRowsAtOnce, kSlice) : arena.panels(kSlice, kRowsAtOnce)),
          right(arena.panels(kSlice, tiles.columns)),
          turned(b.depth_is_dense ? arena.floats(kPanel * kSlice) : nullptr) {}

    void compute(Range rows, Range columns) const {
        begin(rows, columns);
        for (int64_t depth = 0; depth < c.depth; depth += kSlice) {
            const Range slice{depth, smaller(kSlice, c.depth - depth)};
            load_right(columns, slice);
            for (int64_t r = 0; r < rows.count; r += kRowsAtOnce)
                add_product({rows.first + r, smaller(kRowsAtOnce, rows.count - r)}, r, columns, slice);
        }
        for (int64_t r = 0; r < rows.count; r += kPanel)
            unpack({sums.data + r * kPanel, sums.stride}, r, smaller<int64_t>(kPanel, rows.count - r), columns.count,
                   rows_of(c.output, 0, 0).from(rows.first, columns.first));
    }

private:
    const Call &c;
    const Factor a, b;
    const Panels sums, left, right;
    float *const turned;

    void begin(Range rows, Range columns) const {
        for (int64_t n = 0; n < columns.count; n += kPanel) {
            alignas(64) float bias[kPanel] = {};
            if (c.bias.data)
                gather(rows_of(c.bias, 0, 0), columns.first + n, smaller<int64_t>(kPanel, columns.count - n), bias);
            for (int64_t r = 0; r < padded(rows.count); ++r)
                for (int v = 0; v < kPanel; v += kLanes) store(sums.at(r, n + v), load(bias + v));
        }
    }

    // b of a slice, as the depth by columns.
    void load_right(Range columns, Range slice) const {
        const Rows rows = b.from(columns.first, slice.first);
        if (!b.depth_is_dense) return pack_all(rows, slice.count, columns.count, right);
        for (int64_t n = 0; n < columns.count; n += kPanel) {
            const Panels block{turned, kBlock};
            pack(rows, n, smaller<int64_t>(kPanel, columns.count - n), slice.count, block);
            transpose(block, slice.count, right.panel(n / kPanel));
        }
    }

    void add_product(Range rows, int64_t to, Range columns, Range slice) const {
        const Rows from = a.from(rows.first, slice.first);
        if (a.depth_is_dense)
            pack_all(from, rows.count, slice.count, left);
        else
            pack_all(from, slice.count, rows.count, left);
        const Panels sum{sums.data + to * kPanel, sums.stride};
        const int64_t blocks = padded(rows.count) / kPanel, depth = padded(slice.count) / kPanel;
        for_each_panels(padded(columns.count) / kPanel, [&](int64_t p, auto some) {
            const auto factor = panels_at<some.kCount>(right, p);
            if (a.depth_is_dense)
                multiply<some.kCount>(sum, p, blocks, AddLast{}, Times<some.kCount, AsStored>{left, factor, depth});
            else
                multiply<some.kCount>(sum, p, blocks, AddLast{}, Times<some.kCount, Transposed>{left, factor, depth});
        });
    }
};

}  // namespace

int64_t matmul(const Call &c) {
    const Tiles tiles(c);
    const int64_t bytes = bytes_of<Worker>(tiles);
    char *const workspace = workspace_of(c.header, tiles.threads * bytes);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    parallel_for(tiles.threads, tiles.count(), [&](int64_t tile, int64_t worker) {
        Arena arena(workspace + worker * bytes);
        Worker(arena, tiles).compute(tiles.rows_of_tile(tile), tiles.columns_of_tile(tile));
    });
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
