// Vectors, pairs of bfloat16 and transposes, against plain loops.
#include <math.h>

#include "check.h"
#include "simd.h"

using namespace fulmen::FULMEN_ISA;

namespace {

// A bfloat16 by hand, for numbers that have one.
uint16_t bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}
uint32_t pair(float first, float second) { return bfloat16(first) | (uint32_t)bfloat16(second) << 16; }

void check_vectors() {
    Random random(1);
    float a[kLanes], b[kLanes], c[kLanes], got[kLanes];
    for (int l = 0; l < kLanes; ++l) a[l] = random.number(), b[l] = random.number(), c[l] = (float)random.below(9);

    // Any float address will do, and nothing beside the vector is written.
    float memory[3 * kLanes];
    for (int offset = 0; offset <= kLanes; ++offset) {
        for (float &x : memory) x = 7;
        store(memory + offset, load(a));
        store(got, load(memory + offset));
        for (int l = 0; l < kLanes; ++l) CHECK(got[l] == a[l], "offset %d, lane %d", offset, l);
        for (int i = 0; i < 3 * kLanes; ++i)
            CHECK((i >= offset && i < offset + kLanes) || memory[i] == 7, "offset %d: wrote at %d", offset, i);
    }

    store(got, broadcast(3.5f));
    for (int l = 0; l < kLanes; ++l) CHECK(got[l] == 3.5f, "lane %d: %g", l, got[l]);
    store(got, multiply_add(load(c), broadcast(3), load(c)));
    for (int l = 0; l < kLanes; ++l) CHECK(got[l] == 4 * c[l], "lane %d: %g", l, got[l]);
    store(got, select(load(a) < load(b), load(a), load(b)));
    for (int l = 0; l < kLanes; ++l) CHECK(got[l] == fminf(a[l], b[l]), "lane %d: %g", l, got[l]);
    store(got, smaller(load(a), load(b)));
    for (int l = 0; l < kLanes; ++l) CHECK(got[l] == fminf(a[l], b[l]), "lane %d: %g", l, got[l]);
    store(got, larger(load(a), load(b)));
    for (int l = 0; l < kLanes; ++l) CHECK(got[l] == fmaxf(a[l], b[l]), "lane %d: %g", l, got[l]);
    for (int l = 0; l < kLanes; ++l) CHECK(lane_numbers()[l] == l, "lane %d: %d", l, lane_numbers()[l]);

    CHECK(!any(load(a) != load(a)), "no lane differs from itself");
    for (int l = 0; l < kLanes; ++l) CHECK(any(lane_numbers() == l), "lane %d is overlooked", l);

    // Halves onto each other, so that the bits are known.
    float halves[kLanes];
    memcpy(halves, a, sizeof a);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) halves[l] = halves[l] + halves[l + width];
    CHECK(sum_lanes(load(a)) == halves[0], "%a, not %a", sum_lanes(load(a)), halves[0]);
    for (int l = 0; l < kLanes; ++l) {
        float one[kLanes] = {};
        one[l] = 1.5f;
        CHECK(sum_lanes(load(one)) == 1.5f, "lane %d is missing", l);
    }
}

// Two rows of whole numbers, as pairs in each of the orders.
void check_pairs() {
    float a[2 * kLanes], b[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) a[i] = (float)(i + 1), b[i] = (float)(-100 - i);
    uint16_t a_stored[2 * kLanes + 1], b_stored[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) a_stored[i + 1] = bfloat16(a[i]), b_stored[i] = bfloat16(b[i]);

    Pair got[kLanes], more[kLanes];
    store(got, load_pairs(a_stored + 1));  // at any address of a bfloat16
    for (int l = 0; l < kLanes; ++l)
        CHECK(got[l].bits == pair(a[2 * l], a[2 * l + 1]), "load, lane %d: %08x", l, got[l].bits);
    store(got, in_pairs(load(a), load(a + kLanes)));
    for (int l = 0; l < kLanes; ++l)
        CHECK(got[l].bits == pair(a[2 * l], a[2 * l + 1]), "in_pairs, lane %d: %08x", l, got[l].bits);
    store(got, lane_pairs(load(a), load(b)));
    for (int l = 0; l < kLanes; ++l)
        CHECK(got[l].bits == pair(a[l], b[l]), "lane_pairs, lane %d: %08x", l, got[l].bits);
    store(got, broadcast(Pair{0x12345678u}));
    for (int l = 0; l < kLanes; ++l) CHECK(got[l].bits == 0x12345678u, "broadcast, lane %d: %08x", l, got[l].bits);

    BitVec first = load_pairs(a_stored + 1), second = load_pairs(b_stored);
    pair_rows(first, second);
    store(got, first);
    store(more, second);
    for (int l = 0; l < kLanes; ++l) {
        CHECK(got[l].bits == pair(a[l], b[l]), "pair_rows, lane %d: %08x", l, got[l].bits);
        CHECK(more[l].bits == pair(a[kLanes + l], b[kLanes + l]), "pair_rows, lane %d: %08x", kLanes + l, more[l].bits);
    }

    float sum[kLanes];
    store(sum, multiply_add(load_pairs(a_stored + 1), load_pairs(b_stored), load(a)));
    for (int l = 0; l < kLanes; ++l) {
        const float expected = a[l] + a[2 * l] * b[2 * l] + a[2 * l + 1] * b[2 * l + 1];
        CHECK(sum[l] == expected, "multiply_add, lane %d: %g, not %g", l, sum[l], expected);
    }
}

void check_transposes() {
    float from[256], to[256 + 16];
    for (int i = 0; i < 256; ++i) from[i] = (float)i;
    for (float &x : to) x = -1;
    transpose_block(from, to);
    for (int r = 0; r < 16; ++r)
        for (int c = 0; c < 16; ++c) CHECK(to[c * 16 + r] == from[r * 16 + c], "row %d, column %d", r, c);
    for (int i = 256; i < 256 + 16; ++i) CHECK(to[i] == -1, "wrote at %d", i);

    // Pairs move as they are: these bits are a signalling NaN and a subnormal number as floats.
    Pair pairs[256], transposed[256];
    for (uint32_t i = 0; i < 256; ++i) pairs[i].bits = (i % 2 ? 0x7f800001u : 1u) + (i << 8);
    transpose_block(pairs, transposed);
    for (int r = 0; r < 16; ++r)
        for (int c = 0; c < 16; ++c)
            CHECK(transposed[c * 16 + r].bits == pairs[r * 16 + c].bits, "pair in row %d, column %d", r, c);

    Vec rows[kLanes];
    for (int r = 0; r < kLanes; ++r) rows[r] = load(from + 16 * r);
    transpose_lanes<kLanes / 2>(rows);
    for (int r = 0; r < kLanes; ++r)
        for (int c = 0; c < kLanes; ++c) CHECK(rows[r][c] == from[16 * c + r], "lane %d of vector %d", c, r);
}

}  // namespace

int main() {
    check_vectors();
    check_pairs();
    check_transposes();
    return outcome();
}
