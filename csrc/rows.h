// The rows of one head in the caller's memory, to and from panels.
#pragma once

#include "fulmen.h"
#include "panels.h"

namespace fulmen {
namespace FULMEN_ISA {

// The rows of one head: token t's channels begin at element t * stride.
struct Rows {
    char *data;
    int64_t dtype;
    int64_t stride;

    bool present() const { return data != nullptr; }
    int64_t element_bytes() const { return dtype == FULMEN_FLOAT32 ? 4 : 2; }
    char *row(int64_t token) const { return data + token * stride * element_bytes(); }
    Rows from(int64_t token, int64_t channel) const {
        return present() ? Rows{row(token) + channel * element_bytes(), dtype, stride} : *this;
    }
    Rows backwards(int64_t token) const { return present() ? Rows{row(token), dtype, -stride} : *this; }
};

FULMEN_INLINE Rows rows_of(const fulmen_tensor &x, int64_t batch, int64_t head) {
    Rows rows{(char *)x.data, x.dtype, x.stride_token};
    if (x.data) rows.data += (batch * x.stride_batch + head * x.stride_head) * rows.element_bytes();
    return rows;
}

// One token of channels that may be apart, from a channel on: its rows are the channels.
FULMEN_INLINE Rows across(const fulmen_tensor &x, int64_t batch, int64_t token, int64_t channel) {
    return {rows_of(x, batch, channel).from(token, 0).data, x.dtype, x.stride_head};
}

// Calls f with the storage type of a dtype code.
template <class F> FULMEN_INLINE void with_type(int64_t dtype, F f) {
    if (dtype == FULMEN_FLOAT32)
        f(Float32());
    else if (dtype == FULMEN_BFLOAT16)
        f(BFloat16());
    else
        f(Float16());
}

// As many of kLanes as there are; the rest is 0, or is not written.
template <class T> FULMEN_INLINE Vec load_some(T type, const typename T::Stored *from, int64_t n) {
    if (n >= kLanes) return load_as(type, from);
    typename T::Stored some[kLanes] = {};
    for (int64_t l = 0; l < n; ++l) some[l] = from[l];
    return load_as(type, some);
}
template <class T> FULMEN_INLINE void store_some(T type, typename T::Stored *to, Vec x, int64_t n) {
    if (n >= kLanes) return store_as(type, to, x);
    typename T::Stored some[kLanes];
    store_as(type, some, x);
    for (int64_t l = 0; l < n; ++l) to[l] = some[l];
}

template <class T> FULMEN_INLINE void load_channels(T type, const typename T::Stored *from, int64_t n, float *to) {
    for (int64_t f = 0; f < n; f += kLanes) store(to + f, load_some(type, from + f, n - f));
}
template <class T> FULMEN_INLINE void store_channels(T type, const float *from, int64_t n, typename T::Stored *to) {
    for (int64_t f = 0; f < n; f += kLanes) store_some(type, to + f, load(from + f), n - f);
}

// Tokens [first, first + count) as one block of rows per panel, padded with zeros to 16 rows and whole panels. Absent
// rows are all zero.
static inline void pack(Rows rows, int64_t first, int64_t count, int64_t size, Panels to) {
    if (!rows.present()) count = 0;
    with_type(rows.dtype, [&](auto type) {
        typedef typename decltype(type)::Stored Stored;
        for (int64_t r = 0; r < count; ++r) {
            const Stored *row = (const Stored *)rows.row(first + r);
            int64_t p = 0;
            for (; (p + 1) * kPanel <= size; ++p)
                for (int v = 0; v < kPanel; v += kLanes)
                    store(to.panel(p) + r * kPanel + v, load_as(type, row + p * kPanel + v));
            for (int64_t f = p * kPanel; f < padded(size); f += kLanes)
                store(to.at(r, f), load_some(type, row + f, size - f));
        }
    });
    for (int64_t p = 0; p * kPanel < size; ++p)
        for (int64_t x = count * kPanel; x < kBlock; x += kLanes) store(to.panel(p) + x, Vec{});
}

static inline void unpack(Panels from, int64_t first, int64_t count, int64_t size, Rows rows) {
    with_type(rows.dtype, [&](auto type) {
        typedef typename decltype(type)::Stored Stored;
        for (int64_t r = 0; r < count; ++r) {
            Stored *row = (Stored *)rows.row(first + r);
            for (int64_t f = 0; f < size; f += kLanes) store_some(type, row + f, load(from.at(r, f)), size - f);
        }
    });
}

// One value of each of 16 tokens, 0 after the last.
static inline void gather(Rows rows, int64_t first, int64_t count, float *to) {
    with_type(rows.dtype, [&](auto type) {
        typedef typename decltype(type)::Stored Stored;
        Stored values[kPanel] = {};
        for (int64_t r = 0; r < count; ++r) values[r] = *(const Stored *)rows.row(first + r);
        for (int v = 0; v < kPanel; v += kLanes) store(to + v, load_as(type, values + v));
    });
}

// The inverse: of 16 values, one to each of `count` tokens.
static inline void scatter(const float *from, Rows rows, int64_t first, int64_t count) {
    with_type(rows.dtype, [&](auto type) {
        typedef typename decltype(type)::Stored Stored;
        Stored values[kPanel];
        for (int v = 0; v < kPanel; v += kLanes) store_as(type, values + v, load(from + v));
        for (int64_t r = 0; r < count; ++r) *(Stored *)rows.row(first + r) = values[r];
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
