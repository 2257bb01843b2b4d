// Every bfloat16 and float16 as it is loaded, and float32 numbers as they are rounded, against the formats' definition.
#include <math.h>

#include "check.h"
#include "simd.h"

using namespace fulmen::FULMEN_ISA;

namespace {

// A sign, an exponent and a mantissa in 16 bits.
struct Format {
    int mantissa_bits, smallest_exponent;  // of normal numbers

    double value(uint16_t bits) const {
        const int exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
        const bool special = exponent == 0x7fff >> mantissa_bits, normal = exponent > 0;
        const double magnitude = special ? (mantissa ? NAN : INFINITY)
                                         : ldexp(mantissa + (normal << mantissa_bits),
                                                 smallest_exponent - mantissa_bits + (normal ? exponent - 1 : 0));
        return bits >> 15 ? -magnitude : magnitude;
    }
    double limit() const { return ldexp(1, 2 - smallest_exponent); }  // where numbers would go on after the largest

    // To nearest, ties to even.
    double rounded(double x) const {
        if (x == 0 || !isfinite(x)) return x;
        const int exponent = ilogb(x);
        const double unit = ldexp(1, (exponent < smallest_exponent ? smallest_exponent : exponent) - mantissa_bits);
        const double nearest = nearbyint(x / unit) * unit;
        return fabs(nearest) < limit() ? nearest : copysign(INFINITY, x);
    }
};

bool same(double a, double b) { return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b)); }

float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The AVX512-BF16 instruction, and what stands in for it, takes and gives subnormal numbers as zero; nothing else does.
template <class T> bool flushes(double x) {
    return (kPairs || kTiles) && std::is_same<T, BFloat16>::value && fabs(x) < 0x1p-126;
}

// Rounds numbers as they come, a vector at a time, each in another lane than the last.
template <class T> class Rounding {
public:
    explicit Rounding(Format format) : format(format) {}
    ~Rounding() {
        while (count > 0) add(0);
    }
    void add(float x) {
        given[count++] = x;
        if (count < kLanes) return;
        count = 0;
        uint16_t stored[kLanes];
        store_as(T(), stored, load(given));
        for (int l = 0; l < kLanes; ++l) {
            const double expected = flushes<T>(given[l]) ? copysign(0.0, given[l]) : format.rounded(given[l]);
            CHECK(same(format.value(stored[l]), expected), "lane %d: %a became %04x, not %a", l, given[l], stored[l],
                  expected);
        }
    }

private:
    const Format format;
    float given[kLanes];
    int count = 0;
};

template <class T> void check_type(Format format) {
    for (int first = 0; first < 1 << 16; first += kLanes) {
        uint16_t bits[kLanes], again[kLanes];
        float loaded[kLanes];
        for (int l = 0; l < kLanes; ++l) bits[l] = (uint16_t)(first + l);
        store(loaded, load_as(T(), bits));
        store_as(T(), again, load(loaded));
        for (int l = 0; l < kLanes; ++l) {
            const double value = format.value(bits[l]);
            CHECK(same(loaded[l], value), "%04x loaded as %a, not %a", bits[l], loaded[l], value);
            CHECK(isnan(value) || flushes<T>(value) || again[l] == bits[l], "%04x came back as %04x", bits[l],
                  again[l]);
        }
    }

    // Each number, the middle between it and the next, and the floats beside these.
    Rounding<T> rounding(format);
    for (int bits = 0; bits < 1 << 16; ++bits) {
        const double x = format.value((uint16_t)bits);
        if (!isfinite(x)) continue;
        const double after = format.value((uint16_t)(bits + 1)),
                     next = isinf(after) ? copysign(format.limit(), x) : after;
        for (const double y : {x, (x + next) / 2})
            for (const float z : {(float)y, nextafterf((float)y, -INFINITY), nextafterf((float)y, INFINITY)})
                rounding.add(z);
    }
    // Numbers of every magnitude, infinities, and NaN with every bit of its payload alone.
    for (uint64_t bits = 0; bits < 1ull << 32; bits += 1021) rounding.add(from_bits((uint32_t)bits));
    for (const uint32_t sign : {0u, 0x80000000u}) {
        rounding.add(from_bits(sign | 0x7f800000u));
        for (int b = 0; b < 23; ++b) rounding.add(from_bits(sign | 0x7f800000u | 1u << b));
        rounding.add(from_bits(sign | 0x7fffffffu));
    }
}

}  // namespace

int main() {
    check_type<BFloat16>({7, -126});
    check_type<Float16>({10, -14});
    return outcome();
}
