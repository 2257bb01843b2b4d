// State matrices in the caller's memory, to and from panels.
#pragma once

#include "fulmen.h"
#include "panels.h"

namespace fulmen {
namespace FULMEN_ISA {

// Of floats.
struct Matrix {
    float *data;
    int64_t stride_row, stride_column;
    bool present() const { return data != nullptr; }
    float *at(int64_t row, int64_t column) const { return data + row * stride_row + column * stride_column; }
    Matrix from_column(int64_t e) const { return {data ? at(0, e) : nullptr, stride_row, stride_column}; }
};

FULMEN_INLINE Matrix matrix_of(const fulmen_state &x, int64_t batch, int64_t head) {
    float *const data = (float *)x.data;
    return {data ? data + batch * x.stride_batch + head * x.stride_head : nullptr, x.stride_row, x.stride_column};
}

// Padding is zero; so is an absent state.
static inline void load_state(Matrix from, int64_t rows, int64_t columns, Panels to) {
    for (int64_t p = 0; p * kPanel < columns; ++p) {
        float *const panel = to.panel(p);
        const int64_t n = smaller<int64_t>(kPanel, columns - p * kPanel), present = from.present() ? rows : 0;
        for (int64_t r = 0; r < present; ++r) {
            const float *const source = from.at(r, p * kPanel);
            float *const row = panel + r * kPanel;
            if (from.stride_column == 1 && n == kPanel)
                for (int v = 0; v < kPanel; v += kLanes) store(row + v, load(source + v));
            else
                for (int64_t c = 0; c < kPanel; ++c) row[c] = c < n ? source[c * from.stride_column] : 0;
        }
        memset(panel + present * kPanel, 0, 4 * (size_t)((padded(rows) - present) * kPanel));
    }
}

// Makes the padding of panel p zero again. A product that has advanced a matrix leaves NaN there where an infinite
// number met the padding of the other factor, and the padding is a factor of products to come.
static inline void clear_padding(Panels x, int64_t rows, int64_t columns, int64_t p) {
    float *const panel = x.panel(p);
    for (int64_t i = rows * kPanel; i < padded(rows) * kPanel; i += kLanes) store(panel + i, Vec{});
    for (int v = 0; v < kPanel; v += kLanes) {
        const int64_t n = columns - p * kPanel - v;
        if (n >= kLanes) continue;
        const IntVec there = lane_numbers() < (int32_t)n;
        for (int64_t r = 0; r < rows; ++r) {
            float *const row = panel + r * kPanel + v;
            store(row, select(there, load(row), Vec{}));
        }
    }
}

static inline void store_state(Panels from, int64_t rows, int64_t columns, Matrix to) {
    for (int64_t p = 0; p * kPanel < columns; ++p)
        for (int64_t r = 0; r < rows; ++r) {
            const float *row = from.panel(p) + r * kPanel;
            const int64_t n = smaller<int64_t>(kPanel, columns - p * kPanel);
            float *target = to.data + r * to.stride_row + p * kPanel * to.stride_column;
            if (to.stride_column == 1 && n == kPanel)
                for (int v = 0; v < kPanel; v += kLanes) store(target + v, load(row + v));
            else
                for (int64_t c = 0; c < n; ++c) target[c * to.stride_column] = row[c];
        }
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
