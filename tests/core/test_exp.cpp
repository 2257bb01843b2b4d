// exp against libm's in double, over all floats up to a stride, and what happens at the ends of its range.
#include <float.h>
#include <math.h>

#include "check.h"
#include "simd.h"

using namespace fulmen::FULMEN_ISA;

namespace {

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Units in the last place of the float nearest to `exact`.
double error_in_ulps(float got, double exact) { return fabs(got - exact) / ldexp(1, ilogb(exact) - 23); }

// What is computed for one number, in every lane.
template <class F> float in_lanes(F f, float x) {
    float lanes[kLanes];
    store(lanes, f(broadcast(x)));
    for (int l = 1; l < kLanes; ++l)
        CHECK(memcmp(lanes, lanes + l, sizeof(float)) == 0, "lane %d: %a, not %a", l, lanes[l], lanes[0]);
    return lanes[0];
}

// Every 251st float from 0 to `last`, which all the binades share equally, and 4096 floats around each end.
template <class F> void for_each_float(float last, F f) {
    uint32_t end;
    memcpy(&end, &last, sizeof end);
    const uint32_t sign = end & 0x80000000u;
    float x[kLanes];
    int count = 0;
    auto add = [&](uint32_t bits) {
        x[count++] = from_bits(bits);
        if (count == kLanes) f(x), count = 0;
    };
    for (uint32_t bits = sign; bits < end; bits += 251) add(bits);
    for (uint32_t bits = sign; bits < sign + 4096; ++bits) add(bits);
    for (uint32_t bits = end - 4095; bits <= end; ++bits) add(bits);
    while (count > 0) add(end);
}

// Checks f over the floats from 0 to `last`: at most `ulps` and `ulps_per_one` for each unit of |x|.
template <class F> void check_error(const char *name, F f, float last, double ulps, double ulps_per_one) {
    double worst = 0, worst_at = 0;
    for_each_float(last, [&](const float *x) {
        float got[kLanes];
        store(got, f(load(x)));
        for (int l = 0; l < kLanes; ++l) {
            const double error = error_in_ulps(got[l], ::exp((double)x[l])) / (ulps + ulps_per_one * fabs(x[l]));
            if (!(error <= worst)) worst = error, worst_at = x[l];
        }
    });
    printf("%s: at most %.3f of the bound, at %.9g\n", name, worst, worst_at);
    CHECK(worst <= 1, "%s is %g times its bound off at %.9g", name, worst, worst_at);
}

}  // namespace

int main() {
    auto full = [](Vec x) { return fulmen::FULMEN_ISA::exp(x); };
    auto negative = [](Vec x) { return exp_of_negative(x); };
    const float lowest = -87.33654f, highest = 88.72283f, lowest_of_negative = -87.0f;

    check_error("exp below 0", full, lowest, 1.0, 0);
    check_error("exp above 0", full, highest, 1.0, 0);
    check_error("exp_of_negative", negative, lowest_of_negative, 1.5, kFused ? 0.25 : 1.25);

    for (const float x : {0.0f, -0.0f, FLT_TRUE_MIN, -FLT_TRUE_MIN, FLT_MIN, -FLT_MIN, 0x1p-30f, -0x1p-30f})
        CHECK(in_lanes(full, x) == 1 && in_lanes(negative, -fabsf(x)) == 1, "exp(%a) is not 1", x);
    for (const float x : {nextafterf(lowest, -INFINITY), -88.0f, -104.0f, -1e4f, -FLT_MAX, -INFINITY})
        CHECK(in_lanes(full, x) == 0 && !signbit(in_lanes(full, x)), "exp(%g) is not 0", x);
    for (const float x : {nextafterf(lowest_of_negative, -INFINITY), -88.0f, -1e4f, -FLT_MAX, -INFINITY})
        CHECK(in_lanes(negative, x) == 0 && !signbit(in_lanes(negative, x)), "exp_of_negative(%g) is not 0", x);
    // Below the smallest normal number there is 0, and above it no gap.
    CHECK(in_lanes(full, lowest) >= FLT_MIN && ::exp((double)nextafterf(lowest, -INFINITY)) < FLT_MIN * (1 + 1e-5),
          "exp(%.9g) = %a is not where normal numbers end", lowest, in_lanes(full, lowest));
    for (const float x : {nextafterf(nextafterf(highest, INFINITY), INFINITY), 89.0f, 1e4f, FLT_MAX, INFINITY})
        CHECK(in_lanes(full, x) == INFINITY, "exp(%g) is not inf", x);
    CHECK(isfinite(in_lanes(full, highest)), "exp(%g) is not finite", highest);
    CHECK(isnan(in_lanes(full, NAN)) && isnan(in_lanes(negative, NAN)), "exp(NaN) is not NaN");
    return outcome();
}
