// A matrix in panels of 16 columns: element (r, c) stands at data[(c / 16) * stride + 16 * r + c % 16], and all sizes
// are padded to multiples of 16. A panel is dense, so a column slice never maps to a few cache sets only, and within a
// 16 x 16 block every offset is a compile-time constant.
#pragma once

#include "simd.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int kPanel = 16;
constexpr int kBlock = kPanel * kPanel;

FULMEN_INLINE int64_t padded(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

template <class Element> struct PanelsOf {
    Element *data;
    int64_t stride;
    Element *panel(int64_t p) const { return data + p * stride; }
    Element *at(int64_t row, int64_t column) const { return panel(column / kPanel) + row * kPanel + column % kPanel; }
};
typedef PanelsOf<float> Panels;

// One cache line between panels, or panels of 128 rows would all start in the same cache set.
FULMEN_INLINE int64_t panel_stride(int64_t rows) { return padded(rows) * kPanel + kPanel; }
FULMEN_INLINE int64_t panels_size(int64_t rows, int64_t columns) {
    return padded(columns) / kPanel * panel_stride(rows);
}

template <class Element>
static inline void transpose(PanelsOf<Element> rows_by_channels, int64_t size, Element *channels_by_rows) {
    for (int64_t p = 0; p * kPanel < size; ++p)
        transpose_block(rows_by_channels.panel(p), channels_by_rows + p * kBlock);
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
