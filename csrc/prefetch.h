// Rows that are needed soon, in the caller's memory: no hardware prefetcher follows those of one head, which are
// kilobytes apart where heads interleave. Not into L1, where such rows would collide in a few sets.
#pragma once

#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int64_t kAhead = 2 * kPanel;  // tokens; the nearest chunk would come too late

// Share `part` of `parts` of the rows. Always inline: GCC drops calls that only prefetch.
FULMEN_INLINE void prefetch(Rows rows, int64_t first, int64_t count, int64_t size, int64_t part, int64_t parts) {
    const int64_t bytes = rows.present() ? size * rows.element_bytes() : 0;
    for (int64_t r = part; r < count; r += parts)
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(rows.row(first + r) + b, 0, 2);
}

// The same a few rows at a time, while products are computed: many at once would wait for each other, as a core has
// some twenty misses under way.
class Prefetches {
public:
    // Rows of `size` channels, every step-th from the first on.
    void add(Rows rows, int64_t size, int64_t first, int64_t count, int64_t step = 1) {
        if (!rows.present() || count <= 0 || used == kMost) return;
        const int64_t stride = rows.stride * rows.element_bytes();
        parts[used++] = {rows.row(first), step * stride, size * rows.element_bytes(), (count + step - 1) / step};
        rows_left += parts[used - 1].rows;
    }
    // All of them, over so many calls of some().
    void spread(int64_t calls) { at_once = calls > 0 ? (rows_left + calls - 1) / calls : 0; }

    FULMEN_MEMBER void some() {
        for (int64_t left = at_once; left > 0 && part < used;) {
            Part &x = parts[part];
            const int64_t now = smaller(left, x.rows);
            const char *row = x.row;
            for (int64_t r = 0; r < now; ++r, row += x.stride)
                for (int64_t b = 0; b < x.bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
            x.row = row;
            x.rows -= now;
            part += x.rows == 0;
            left -= now;
        }
    }

private:
    static constexpr int kMost = 8;
    struct Part {
        const char *row;
        int64_t stride, bytes, rows;
    };
    Part parts[kMost];
    int64_t part = 0, used = 0, rows_left = 0, at_once = 0;
};

// As what a product does at each block of its depth.
struct Prefetching {
    Prefetches *rows;
    FULMEN_MEMBER void operator()() const { rows->some(); }
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
