// Vectors of floats by GCC/Clang vector extensions, conversions between the storage types and float, exp and
// transposes.
//
// Every ISA build compiles these headers again in a namespace of its own (FULMEN_ISA), and nothing here has linkage
// outside it: the linker must never merge a function compiled for one instruction set into another build.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef FULMEN_ISA
#error "FULMEN_ISA must name the namespace of this ISA build"
#endif
#ifndef FULMEN_VECTOR_BYTES
#error "FULMEN_VECTOR_BYTES must give the width of a vector"
#endif

#define FULMEN_MEMBER inline __attribute__((always_inline))
#define FULMEN_INLINE static FULMEN_MEMBER

namespace fulmen {
namespace FULMEN_ISA {

constexpr int kLanes = FULMEN_VECTOR_BYTES / 4;

typedef float Vec __attribute__((vector_size(FULMEN_VECTOR_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(FULMEN_VECTOR_BYTES)));
typedef uint32_t BitVec __attribute__((vector_size(FULMEN_VECTOR_BYTES)));
typedef uint16_t HalfVec __attribute__((vector_size(FULMEN_VECTOR_BYTES / 2)));
typedef float VecInMemory __attribute__((vector_size(FULMEN_VECTOR_BYTES), aligned(4), may_alias));
typedef uint16_t HalfVecInMemory __attribute__((vector_size(FULMEN_VECTOR_BYTES / 2), aligned(2), may_alias));

FULMEN_INLINE Vec load(const float *p) { return *(const VecInMemory *)p; }
FULMEN_INLINE void store(float *p, Vec x) { *(VecInMemory *)p = x; }
FULMEN_INLINE Vec broadcast(float x) { return x - Vec{}; }
FULMEN_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return a * b + sum; }
FULMEN_INLINE Vec multiply_add(float a, Vec b, Vec sum) { return a * b + sum; }
#if (defined(__AVX512F__) && FULMEN_VECTOR_BYTES == 64) || (defined(__AVX2__) && FULMEN_VECTOR_BYTES == 32)
constexpr bool kHides = true;
// x, of which the compiler does not know how it was computed. (Of __builtin_assoc_barrier on a vector GCC makes a
// multiplication, and a detour over every single lane.)
FULMEN_INLINE Vec hidden(Vec x) {
    asm("" : "+v"(x));
    return x;
}
#else
constexpr bool kHides = false;
FULMEN_INLINE Vec hidden(Vec x) { return x; }
#endif
// The first term of a chain of multiply-adds: rounded by itself, and not contracted with the next one in its place.
FULMEN_INLINE Vec term(float a, Vec b) { return kHides ? hidden(a * b) : multiply_add(a, b, Vec{}); }
FULMEN_INLINE Vec select(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }

template <class T> FULMEN_INLINE T smaller(T a, T b) { return b < a ? b : a; }
template <class T> FULMEN_INLINE T larger(T a, T b) { return a < b ? b : a; }

template <int... L> FULMEN_INLINE IntVec lane_numbers(std::integer_sequence<int, L...>) { return IntVec{L...}; }
FULMEN_INLINE IntVec lane_numbers() { return lane_numbers(std::make_integer_sequence<int, kLanes>()); }

// The sum of the lanes, always in the same order.
FULMEN_INLINE float sum_lanes(Vec x) {
    float lanes[kLanes];
    memcpy(lanes, &x, sizeof x);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    return lanes[0];
}

FULMEN_INLINE bool any(IntVec x) {
    int32_t lanes[kLanes], all = 0;
    memcpy(lanes, &x, sizeof x);
    for (int l = 0; l < kLanes; ++l) all |= lanes[l];
    return all != 0;
}

// exp to one unit in the last place. Below the smallest normal number the result is 0, so exp(-inf) is exactly 0.
// `rest` is what the last rounding left out, where the result is close to 1.
FULMEN_INLINE Vec exp(Vec x, Vec &rest) {
    const Vec lowest = broadcast(-87.33654f), highest = broadcast(88.72283f);
    Vec bounded = select(x < lowest, lowest, x);
    bounded = select(bounded > highest, highest, bounded);
    const Vec rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    const Vec shifted = bounded * 1.44269504f + rounder;
    const Vec n = shifted - rounder;
    Vec r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Vec beyond_one = p * (r * r) + r;
    p = beyond_one + 1.0f;
    rest = beyond_one - (p - 1.0f);
    // 2^n in two factors, since n reaches 128. The lowest bits of `shifted` are n, where converting a NaN to an integer
    // would be undefined.
    const BitVec exponents = (BitVec)shifted - (BitVec)rounder + 2 * 127, half = exponents >> 1;
    Vec result = p * (Vec)(half << 23) * (Vec)((exponents - half) << 23);
    result = select(x < lowest, Vec{}, result);
    return select(x > highest, broadcast(__builtin_inff()), result);
}
FULMEN_INLINE Vec exp(Vec x) {
    Vec rest;
    return exp(x, rest);
}

// exp for x <= 0, in half the instructions: a softmax spends much of its time here. Below -87 it is 0. Off by at most
// 1.5 + |x| / 4 units in the last place, and without FMA 1.5 + 5 |x| / 4.
FULMEN_INLINE Vec exp_of_negative(Vec x) {
    const Vec lowest = broadcast(-87.0f), rounder = broadcast(12582912.0f);  // as above
    const Vec bounded = select(x < lowest, lowest, x);
    // Its lowest bits are n, the exponent of 2. By the float below log2(e): Clang makes no FMA of a product used twice.
    const Vec shifted = bounded * 1.44269490f + rounder;
    const Vec r = bounded * 1.44269504f - (shifted - rounder);
    Vec p = r * 1.535336188e-4f + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    const Vec power = (Vec)(((IntVec)shifted << 23) + 0x3f800000);
    return select(x < lowest, Vec{}, p * power);
}

// 1 / (1 + e^-x).
FULMEN_INLINE Vec sigmoid(Vec x) {
    const Vec e = exp_of_negative(select(x < Vec{}, x, -x));
    return select(x < Vec{}, e, broadcast(1.0f)) / (1.0f + e);
}

// ---- storage types ----

struct Float32 {
    typedef float Stored;
};
struct BFloat16 {
    typedef uint16_t Stored;
};
struct Float16 {
    typedef uint16_t Stored;
};

// How this build multiplies bfloat16 inputs: in AMX's tiles (tiles.h), in pairs, or converted to floats. The builds for
// tests, of vectors as wide as AVX-512's without it, stand in for the others: the one that says so for tiles.
#if defined(__AMX_BF16__) || defined(FULMEN_TILES_IN_VECTORS)
#define FULMEN_TILES 1
#define FULMEN_PAIRS 0
#elif defined(__AVX512BF16__) || (FULMEN_VECTOR_BYTES == 64 && !defined(__AVX512F__))
#define FULMEN_TILES 0
#define FULMEN_PAIRS 1
#else
#define FULMEN_TILES 0
#define FULMEN_PAIRS 0
#endif
constexpr bool kTiles = FULMEN_TILES, kPairs = FULMEN_PAIRS;

#if defined(__AVX2__) && FULMEN_VECTOR_BYTES == 32  // one instruction, of which GCC 12 makes four
FULMEN_INLINE BitVec widen(HalfVec x) { return (BitVec)_mm256_cvtepu16_epi32((__m128i)x); }
#elif defined(__AVX512F__) && FULMEN_VECTOR_BYTES == 64
FULMEN_INLINE BitVec widen(HalfVec x) { return (BitVec)_mm512_cvtepu16_epi32((__m256i)x); }
#else
FULMEN_INLINE BitVec widen(HalfVec x) { return __builtin_convertvector(x, BitVec); }
#endif
FULMEN_INLINE HalfVec narrow(BitVec x) { return __builtin_convertvector(x, HalfVec); }

FULMEN_INLINE Vec load_as(Float32, const float *p) { return load(p); }
FULMEN_INLINE void store_as(Float32, float *p, Vec x) { store(p, x); }

FULMEN_INLINE Vec load_as(BFloat16, const uint16_t *p) { return (Vec)(widen(*(const HalfVecInMemory *)p) << 16); }
#if defined(__AVX512BF16__)
FULMEN_INLINE HalfVec round_to_bfloat16(Vec x) { return (HalfVec)_mm512_cvtneps_pbh((__m512)x); }
#else
FULMEN_INLINE HalfVec round_to_bfloat16(Vec x) {
    BitVec bits = (BitVec)x;
    // The build for tests takes subnormal numbers as zero, as the instruction does that it stands in for.
    if constexpr (kPairs || kTiles) bits = (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits;
    BitVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    BitVec quiet_nan = (bits >> 16) | 0x40u;
    return narrow((BitVec)select(x == x, (Vec)rounded, (Vec)quiet_nan));
}
#endif
FULMEN_INLINE void store_as(BFloat16, uint16_t *p, Vec x) { *(HalfVecInMemory *)p = round_to_bfloat16(x); }

#if defined(__F16C__) && FULMEN_VECTOR_BYTES == 32
FULMEN_INLINE Vec load_as(Float16, const uint16_t *p) {
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
FULMEN_INLINE void store_as(Float16, uint16_t *p, Vec x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX512F__) && FULMEN_VECTOR_BYTES == 64
FULMEN_INLINE Vec load_as(Float16, const uint16_t *p) {
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
FULMEN_INLINE void store_as(Float16, uint16_t *p, Vec x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#else
FULMEN_INLINE Vec load_as(Float16, const uint16_t *p) {
    BitVec h = widen(*(const HalfVecInMemory *)p);
    BitVec magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
    Vec scaled = (Vec)magnitude * 0x1p112f;    // moves the exponent's bias, and normalises subnormal numbers
    BitVec special = magnitude | 0x7f800000u;  // inf and NaN keep an exponent of all ones
    IntVec is_special = (IntVec)(magnitude >= 0x0f800000u);
    return (Vec)((BitVec)select(is_special, (Vec)special, scaled) | sign);
}
FULMEN_INLINE void store_as(Float16, uint16_t *p, Vec x) {
    BitVec bits = (BitVec)x, sign = bits & 0x80000000u, magnitude = bits ^ sign;
    // Subnormal results: adding 0.5 aligns the last bit of half precision with that of the float sum.
    BitVec subnormal = (BitVec)((Vec)magnitude + 0.5f) - 0x3f000000u;
    BitVec normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;  // rebias and round to even
    BitVec infinite = BitVec{} + 0x7c00u, quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    Vec result = select((IntVec)(magnitude < 0x38800000u), (Vec)subnormal, (Vec)normal);
    result = select((IntVec)(magnitude >= 0x477ff000u), (Vec)infinite, result);
    result = select((IntVec)(magnitude > 0x7f800000u), (Vec)quiet_nan, result);
    *(HalfVecInMemory *)p = narrow((BitVec)result | (sign >> 16));
}
#endif

// The element of workers that multiply bfloat16 in tiles, which stand in pairs.
struct Tile {};

// ---- pairs of bfloat16, which some CPUs multiply at twice the rate of floats ----

// Neighbours along the axis that a product sums over, the first in the lower half.
struct Pair {
    uint32_t bits;
};

typedef uint32_t BitVecInMemory __attribute__((vector_size(FULMEN_VECTOR_BYTES), aligned(2), may_alias));
typedef uint16_t WordVec __attribute__((vector_size(FULMEN_VECTOR_BYTES)));

FULMEN_INLINE BitVec load(const Pair *p) { return *(const BitVecInMemory *)p; }
FULMEN_INLINE void store(Pair *p, BitVec x) { *(BitVecInMemory *)p = x; }
FULMEN_INLINE BitVec broadcast(Pair x) { return x.bits + BitVec{}; }
FULMEN_INLINE BitVec load_pairs(const uint16_t *neighbours) { return *(const BitVecInMemory *)neighbours; }

// The first and the second of each pair.
FULMEN_INLINE Vec firsts(BitVec pairs) { return (Vec)(pairs << 16); }
FULMEN_INLINE Vec seconds(BitVec pairs) { return (Vec)(pairs & 0xffff0000u); }

// Adds both products of each pair.
FULMEN_INLINE Vec multiply_add(BitVec a, BitVec b, Vec sum) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += seconds(a) * seconds(b);
    return sum + firsts(a) * firsts(b);
#endif
}

// With one pair for all lanes. GCC would make two instructions of it, one that loads the pair: more than the CPU looks
// ahead over, from the end of a tile into the next.
FULMEN_INLINE Vec multiply_add(const Pair &a, BitVec b, Vec sum) {
#if defined(__AVX512BF16__)
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(a));
    return sum;
#else
    return multiply_add(broadcast(a), b, sum);
#endif
}
template <class Factor> FULMEN_INLINE Vec term(const Factor &a, BitVec b) { return multiply_add(a, b, Vec{}); }

// The lanes of both in order, rounded: pairs of neighbours.
template <int... L> FULMEN_INLINE BitVec in_pairs(Vec first, Vec second, std::integer_sequence<int, L...>) {
    return (BitVec)__builtin_shufflevector(round_to_bfloat16(first), round_to_bfloat16(second), L...);
}
FULMEN_INLINE BitVec in_pairs(Vec first, Vec second) {
#if defined(__AVX512BF16__)
    return (BitVec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    return in_pairs(first, second, std::make_integer_sequence<int, 2 * kLanes>());
#endif
}

// Lane by lane, rounded: a pair of one from each.
template <int... L> FULMEN_INLINE BitVec lane_pairs(Vec first, Vec second, std::integer_sequence<int, L...>) {
    const WordVec both = (WordVec)in_pairs(first, second);
    return (BitVec)__builtin_shufflevector(both, both, (L / 2 + (L % 2) * kLanes)...);
}
FULMEN_INLINE BitVec lane_pairs(Vec first, Vec second) {
    return lane_pairs(first, second, std::make_integer_sequence<int, 2 * kLanes>());
}

// Pairs of neighbours in two rows become pairs of one from each: of the first kLanes columns, and of the next.
template <int... L> FULMEN_INLINE void pair_rows(BitVec &first, BitVec &second, std::integer_sequence<int, L...>) {
    const WordVec a = (WordVec)first, b = (WordVec)second;
    first = (BitVec)__builtin_shufflevector(a, b, (L / 2 + (L % 2) * 2 * kLanes)...);
    second = (BitVec)__builtin_shufflevector(a, b, (kLanes + L / 2 + (L % 2) * 2 * kLanes)...);
}
FULMEN_INLINE void pair_rows(BitVec &first, BitVec &second) {
    pair_rows(first, second, std::make_integer_sequence<int, 2 * kLanes>());
}

// ---- transposes ----

template <int Step, int... L> FULMEN_INLINE Vec even_blocks(Vec a, Vec b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, ((L & Step) ? kLanes + L - Step : L)...);
}
template <int Step, int... L> FULMEN_INLINE Vec odd_blocks(Vec a, Vec b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, ((L & Step) ? kLanes + L : L + Step)...);
}

// Exchanges the off-diagonal Step x Step blocks of every 2 Step x 2 Step block, down to single lanes.
template <int Step> FULMEN_INLINE void transpose_lanes(Vec (&rows)[kLanes]) {
    if constexpr (Step > 0) {
        constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r)
            if ((r & Step) == 0) {
                Vec a = rows[r], b = rows[r + Step];
                rows[r] = even_blocks<Step>(a, b, lanes);
                rows[r + Step] = odd_blocks<Step>(a, b, lanes);
            }
        transpose_lanes<Step / 2>(rows);
    }
}

// A 16 x 16 block with rows 16 floats apart; from and to must differ.
static inline void transpose_block(const float *from, float *to) {
    for (int r = 0; r < 16; r += kLanes)
        for (int c = 0; c < 16; c += kLanes) {
            Vec rows[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) rows[i] = load(from + (r + i) * 16 + c);
            transpose_lanes<kLanes / 2>(rows);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) store(to + (c + i) * 16 + r, rows[i]);
        }
}
static inline void transpose_block(const Pair *from, Pair *to) { transpose_block((const float *)from, (float *)to); }

}  // namespace FULMEN_ISA
}  // namespace fulmen
