// Rows and states of every size from 1 to 40, between the caller's memory and panels: every number at its place,
// padding zero, and nothing read or written beside them. Memory is as large as it must be, for AddressSanitizer.
#include <math.h>

#include <vector>

#include "check.h"
#include "operand.h"
#include "state.h"

using namespace fulmen;
using namespace fulmen::FULMEN_ISA;

namespace {

constexpr int64_t kSizes = 40;
constexpr float kUntouched = -77;

// Whole numbers that all three types have. Neighbours differ, and so do rows.
float number(int64_t row, int64_t column) { return (float)((row * 7 + column * 3) % 251 - 125); }

template <class T> typename T::Stored stored(float x) {
    typename T::Stored lanes[kLanes];
    store_as(T(), lanes, broadcast(x));
    return lanes[0];
}

template <class T> constexpr int64_t kDtype = FULMEN_FLOAT32;
template <> constexpr int64_t kDtype<BFloat16> = FULMEN_BFLOAT16;
template <> constexpr int64_t kDtype<Float16> = FULMEN_FLOAT16;

// Rows of one head between those of others, which a kernel may neither read nor write.
template <class T> struct Given {
    typedef typename T::Stored Stored;
    int64_t size, stride;
    std::vector<Stored> memory;
    Given(int64_t tokens, int64_t size, int64_t gap)
        : size(size), stride(size + gap), memory((size_t)(tokens * stride - gap), stored<T>(kUntouched)) {}
    void fill() {
        for (int64_t i = 0; i < (int64_t)memory.size(); ++i)
            memory[(size_t)i] = stored<T>(i % stride < size ? number(i / stride, i % stride) : NAN);
    }
    Stored operator()(int64_t token, int64_t channel) const { return memory[(size_t)(token * stride + channel)]; }
    Rows rows() { return {(char *)memory.data(), kDtype<T>, stride}; }
};

// Panels with memory of their own, full of NaN.
struct Own {
    std::vector<float> memory;
    Panels panels;
    Own(int64_t rows, int64_t columns)
        : memory((size_t)panels_size(rows, columns), NAN), panels{memory.data(), panel_stride(rows)} {}
};

template <class T> void check_channels(int64_t size) {
    Given<T> given(1, size, 0), back(1, size, 0);
    given.fill();
    std::vector<float> floats((size_t)((size + kLanes - 1) / kLanes * kLanes), NAN);
    load_channels(T(), given.memory.data(), size, floats.data());
    for (int64_t c = 0; c < (int64_t)floats.size(); ++c)
        CHECK(floats[(size_t)c] == (c < size ? number(0, c) : 0), "channel %d of %d: %g", (int)c, (int)size,
              floats[(size_t)c]);
    store_channels(T(), floats.data(), size, back.memory.data());
    for (int64_t c = 0; c < size; ++c) CHECK(back(0, c) == given(0, c), "channel %d of %d", (int)c, (int)size);
}

template <class T> void check_rows(int64_t count, int64_t size) {
    constexpr int64_t first = 3, tokens = first + kPanel;
    Given<T> given(tokens, size, count % 3), back(tokens, size, count % 3);
    given.fill();
    Own own(kPanel, size);
    pack(given.rows(), first, count, size, own.panels);
    for (int64_t r = 0; r < kPanel; ++r)
        for (int64_t c = 0; c < padded(size); ++c)
            CHECK(*own.panels.at(r, c) == (r < count && c < size ? number(first + r, c) : 0),
                  "%d tokens of %d channels: at %d, %d is %g", (int)count, (int)size, (int)r, (int)c,
                  *own.panels.at(r, c));

    unpack(own.panels, first, count, size, back.rows());
    for (int64_t i = 0; i < (int64_t)back.memory.size(); ++i) {
        const int64_t t = i / back.stride, c = i % back.stride;
        const bool written = t >= first && t < first + count && c < size;
        CHECK(back.memory[(size_t)i] == stored<T>(written ? number(t, c) : kUntouched),
              "%d tokens of %d channels: token %d, channel %d", (int)count, (int)size, (int)t, (int)c);
    }

    float values[kPanel];
    gather(given.rows(), first, count, values);
    for (int64_t r = 0; r < kPanel; ++r)
        CHECK(values[r] == (r < count ? number(first + r, 0) : 0), "token %d of %d: %g", (int)r, (int)count, values[r]);
}

void check_absent_rows(int64_t size) {
    Own own(kPanel, size);
    pack(Rows{}, 5, kPanel, size, own.panels);
    for (int64_t r = 0; r < kPanel; ++r)
        for (int64_t c = 0; c < padded(size); ++c)
            CHECK(*own.panels.at(r, c) == 0, "at %d, %d is %g", (int)r, (int)c, *own.panels.at(r, c));
}

void check_transpose(int64_t size) {
    Own own(kPanel, size);
    for (int64_t r = 0; r < kPanel; ++r)
        for (int64_t c = 0; c < padded(size); ++c) *own.panels.at(r, c) = number(r, c);
    std::vector<float> transposed((size_t)(padded(size) * kPanel), NAN);
    transpose(own.panels, size, transposed.data());
    for (int64_t r = 0; r < kPanel; ++r)
        for (int64_t c = 0; c < padded(size); ++c)
            CHECK(transposed[(size_t)(c * kPanel + r)] == number(r, c), "%d channels: at %d, %d", (int)size, (int)r,
                  (int)c);
}

// A state with dense rows, dense columns, or neither.
void check_state(int64_t rows, int64_t columns, int64_t stride_row, int64_t stride_column) {
    std::vector<float> memory((size_t)((rows - 1) * stride_row + (columns - 1) * stride_column + 1), NAN);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) memory[(size_t)(r * stride_row + c * stride_column)] = number(r, c);
    Own own(rows, columns);
    load_state({memory.data(), stride_row, stride_column}, rows, columns, own.panels);
    for (int64_t r = 0; r < padded(rows); ++r)
        for (int64_t c = 0; c < padded(columns); ++c)
            CHECK(*own.panels.at(r, c) == (r < rows && c < columns ? number(r, c) : 0),
                  "state of %d x %d: at %d, %d is %g", (int)rows, (int)columns, (int)r, (int)c, *own.panels.at(r, c));

    std::vector<float> back(memory.size(), kUntouched);
    store_state(own.panels, rows, columns, {back.data(), stride_row, stride_column});
    for (size_t i = 0; i < memory.size(); ++i)
        CHECK(back[i] == (isnan(memory[i]) ? kUntouched : memory[i]), "state of %d x %d: element %d is %g", (int)rows,
              (int)columns, (int)i, back[i]);

    load_state(Matrix{}, rows, columns, own.panels);
    for (int64_t r = 0; r < padded(rows); ++r)
        for (int64_t c = 0; c < padded(columns); ++c)
            CHECK(*own.panels.at(r, c) == 0, "absent state: at %d, %d", (int)r, (int)c);
}

// Rows as factors of a product over channels and of one over tokens.
template <class Element> void check_operand(int64_t count, int64_t size, Use use) {
    typedef typename std::conditional<kNumbers<Element> == 2, BFloat16, Float32>::type T;
    Given<T> given(count, size, 1);
    given.fill();
    Arena counting(nullptr);
    Operand<Element>(counting, count, size, use);
    std::vector<float> memory((size_t)counting.bytes() / 4, NAN);
    Arena arena(memory.data());
    const Operand<Element> operand(arena, count, size, use);
    operand.load(given.rows(), count);

    // Number n of an element: the one at (r, c) for n = 0, and its neighbour along the summed axis for n = 1.
    auto is = [](const Element &x, int64_t n, float expected) {
        if constexpr (kNumbers<Element> == 1)
            return n == 0 && x == expected;
        else
            return (uint16_t)(x.bits >> (16 * n)) == stored<BFloat16>(expected);
    };
    auto expected = [&](int64_t r, int64_t c) { return r < count && c < size ? number(r, c) : 0; };
    for (int64_t r = 0; r < padded(count) && use.over_channels; ++r)
        for (int64_t c = 0; c < padded(size); ++c)
            CHECK(is(*operand.over_channels().at(r, c / kNumbers<Element>), c % kNumbers<Element>, expected(r, c)),
                  "over channels, %d x %d: at %d, %d", (int)count, (int)size, (int)r, (int)c);
    for (int64_t r = 0; r < padded(count) && use.over_tokens; ++r)
        for (int64_t c = 0; c < padded(size); ++c)
            CHECK(is(*operand.over_tokens().at(r / kNumbers<Element>, c), r % kNumbers<Element>, expected(r, c)),
                  "over tokens, %d x %d: at %d, %d", (int)count, (int)size, (int)r, (int)c);
}

// Of pairs: rows weighed as they are loaded, and rows that were weighed in floats before they are rounded.
[[maybe_unused]] void check_weighed(int64_t count, int64_t size) {
    Given<BFloat16> given(count, size, 1);
    given.fill();
    float weights[kPanel];
    for (int r = 0; r < kPanel; ++r) weights[r] = 1.0f / (float)(r + 3);
    for (const bool in_floats : {false, true}) {
        const Use use{true, !in_floats, true, in_floats};
        Arena counting(nullptr);
        Operand<Pair>(counting, kPanel, size, use);
        std::vector<float> memory((size_t)counting.bytes() / 4, NAN);
        Arena arena(memory.data());
        const Operand<Pair> operand(arena, kPanel, size, use);
        operand.load(given.rows(), count, weights);
        if (in_floats)
            for (int64_t r = 0; r < kPanel; ++r)
                for (int64_t c = 0; c < size; ++c) *operand.in_floats().at(r, c) *= weights[r];
        operand.round();
        auto is = [&](const char *what, Pair x, int64_t half, int64_t r, int64_t c, bool weighed) {
            const float plain = r < count && c < size ? number(r, c) : 0;
            CHECK((uint16_t)(x.bits >> (16 * half)) == stored<BFloat16>(weighed ? plain * weights[r] : plain),
                  "%s, %d x %d: at %d, %d", what, (int)count, (int)size, (int)r, (int)c);
        };
        for (int64_t r = 0; r < kPanel; ++r)
            for (int64_t c = 0; c < padded(size); ++c) {
                is("channels", *operand.over_channels().at(r, c / 2), c % 2, r, c, in_floats);
                is("weighed tokens", *operand.weighed().at(r / 2, c), r % 2, r, c, true);
                if (!in_floats) is("tokens", *operand.over_tokens().at(r / 2, c), r % 2, r, c, false);
            }
    }
}

// A matrix of floats rounded to pairs along its rows, and along its columns.
[[maybe_unused]] void check_rounding(int64_t rows, int64_t columns) {
    Own from(rows, columns), along_columns(padded(rows) / 2, columns), along_rows(rows, (columns + 1) / 2);
    auto value = [](int64_t r, int64_t c) { return number(r, c) / 3; };
    for (int64_t r = 0; r < padded(rows); ++r)
        for (int64_t c = 0; c < padded(columns); ++c) *from.panels.at(r, c) = value(r, c);
    auto pairs = [](Own &x) { return PanelsOf<Pair>{(Pair *)x.panels.data, x.panels.stride}; };
    for (int64_t p = 0; p * kPanel < columns; ++p)
        round_rows(from.panels.panel(p), padded(rows), pairs(along_columns).panel(p));
    round_columns(from.panels, padded(rows), columns, pairs(along_rows));
    auto is = [&](const char *what, Pair x, int64_t half, int64_t r, int64_t c) {
        CHECK((uint16_t)(x.bits >> (16 * half)) == stored<BFloat16>(value(r, c)), "%s, %d x %d: at %d, %d", what,
              (int)rows, (int)columns, (int)r, (int)c);
    };
    for (int64_t r = 0; r < padded(rows); ++r)
        for (int64_t c = 0; c < padded(columns); ++c) {
            is("along columns", *pairs(along_columns).at(r / 2, c), r % 2, r, c);
            is("along rows", *pairs(along_rows).at(r, c / 2), c % 2, r, c);
        }
}

}  // namespace

int main() {
    for (int64_t size = 1; size <= kSizes; ++size) {
        check_channels<Float32>(size);
        check_channels<BFloat16>(size);
        check_channels<Float16>(size);
        for (int64_t count = 0; count <= kPanel; ++count) {
            check_rows<Float32>(count, size);
            check_rows<BFloat16>(count, size);
            check_rows<Float16>(count, size);
            if constexpr (kPairs)
                if (count > 0) check_weighed(count, size);
        }
        check_absent_rows(size);
        check_transpose(size);
        for (int64_t other = 1; other <= kSizes; ++other) {
            if constexpr (kPairs) check_rounding(size, other);
            check_state(size, other, other, 1);
            check_state(size, other, 1, size + 2);
            check_state(size, other, 3 * other, 2);
            for (const Use use : {Use{true, true}, Use{true, false}, Use{false, true}}) {
                check_operand<float>(size, other, use);
                if constexpr (kPairs) check_operand<Pair>(size, other, use);
            }
        }
    }
    return outcome();
}
