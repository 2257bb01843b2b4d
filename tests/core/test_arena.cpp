// Pieces of the workspace: aligned, apart from each other, and as many bytes as were counted.
#include "arena.h"

#include <vector>

#include "check.h"

using namespace fulmen::FULMEN_ISA;

namespace {

struct Piece {
    char *begin;
    int64_t bytes;
};

// Some pieces, the same for the same seed.
std::vector<Piece> pieces_of(Arena &arena, uint32_t seed) {
    Random random(seed);
    std::vector<Piece> pieces;
    for (int i = 0; i < 40; ++i) {
        const int64_t rows = 1 + random.below(40), columns = 1 + random.below(40), kind = random.below(3);
        if (kind == 0) pieces.push_back({(char *)arena.floats(rows), 4 * rows});
        if (kind == 1) pieces.push_back({(char *)arena.panels(rows, columns).data, 4 * panels_size(rows, columns)});
        if (kind == 2)
            pieces.push_back({(char *)arena.panels<Pair>(rows, columns).data, 4 * panels_size(rows, columns)});
    }
    return pieces;
}

void check_pieces(uint32_t seed) {
    Arena counting(nullptr);
    for (const Piece &piece : pieces_of(counting, seed)) CHECK(!piece.begin, "a piece without memory");

    std::vector<char> memory((size_t)(counting.bytes() + 64));
    char *base = (char *)(((uintptr_t)memory.data() + 63) / 64 * 64);
    Arena arena(base);
    char *end = base;
    for (const Piece &piece : pieces_of(arena, seed)) {
        CHECK((uintptr_t)piece.begin % 64 == 0, "a piece at %p", (void *)piece.begin);
        CHECK(piece.begin >= end, "a piece overlaps the one before");
        end = piece.begin + piece.bytes;
    }
    CHECK(arena.bytes() == counting.bytes(), "%d bytes, and %d counted", (int)arena.bytes(), (int)counting.bytes());
    CHECK(end <= base + arena.bytes(), "the last piece ends after byte %d", (int)arena.bytes());
}

// Every element of panels has a place of its own inside panels_size.
void check_panels(int64_t rows, int64_t columns) {
    std::vector<float> memory((size_t)panels_size(rows, columns));
    const Panels panels{memory.data(), panel_stride(rows)};
    for (int64_t r = 0; r < padded(rows); ++r)
        for (int64_t c = 0; c < padded(columns); ++c) {
            const int64_t place = panels.at(r, c) - panels.data;
            CHECK(place >= 0 && place < (int64_t)memory.size(), "%d x %d: element %d, %d is outside", (int)rows,
                  (int)columns, (int)r, (int)c);
            CHECK(memory[(size_t)place]++ == 0, "%d x %d: element %d, %d is shared", (int)rows, (int)columns, (int)r,
                  (int)c);
        }
}

}  // namespace

int main() {
    for (uint32_t seed = 0; seed < 200; ++seed) check_pieces(seed);
    for (int64_t rows = 1; rows <= 40; ++rows)
        for (int64_t columns = 1; columns <= 40; ++columns) check_panels(rows, columns);
    return outcome();
}
