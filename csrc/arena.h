// The workspace, piece by piece.
#pragma once

#include <new>

#include "fulmen.h"
#include "panels.h"

namespace fulmen {
namespace FULMEN_ISA {

// Memory for a call: what the caller gave, or what it allocates. Null if there is none.
FULMEN_INLINE char *workspace_of(const fulmen_header &header, int64_t bytes) {
    if (header.workspace && bytes <= header.workspace_bytes) return (char *)header.workspace;
    return header.allocate ? (char *)header.allocate(larger<int64_t>(bytes, 1)) : nullptr;
}

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
    // An object with pieces of its own.
    template <class T, class... Arguments> T *place(const Arguments &...arguments) {
        void *const at = floats((sizeof(T) + 3) / 4);
        const T object(*this, arguments...);
        return at ? new (at) T(object) : nullptr;
    }
    int64_t bytes() const { return used; }

private:
    char *base;
    int64_t used = 0;
};

// How much of an arena the constructor of T takes.
template <class T, class... Arguments> int64_t bytes_of(const Arguments &...arguments) {
    Arena counting(nullptr);
    T(counting, arguments...);
    return counting.bytes();
}

// Takes pieces from the workspace of a call: reserve(arena) counts them first. Whether there was memory for them.
template <class F> bool reserve_workspace(const fulmen_header &header, F reserve) {
    Arena counting(nullptr);
    reserve(counting);
    char *const memory = workspace_of(header, counting.bytes());
    if (!memory) return false;
    Arena arena(memory);
    reserve(arena);
    return true;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
