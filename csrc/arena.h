// The workspace, piece by piece.
#pragma once

#include "panels.h"

namespace fulmen {
namespace FULMEN_ISA {

// Hands out pieces of the workspace; without memory it only counts.
class Arena {
public:
    Arena(void *memory) : base((char *)memory) {}
    float *floats(int64_t n) {
        float *piece = base ? (float *)(base + used) : nullptr;
        used += (n * 4 + 63) / 64 * 64;
        return piece;
    }
    // Of floats, or of pairs, which are as large.
    template <class Element = float> PanelsOf<Element> panels(int64_t rows, int64_t columns) {
        return {(Element *)floats(panels_size(rows, columns)), panel_stride(rows)};
    }
    int64_t bytes() const { return used; }

private:
    char *base;
    int64_t used = 0;
};

}  // namespace FULMEN_ISA
}  // namespace fulmen
