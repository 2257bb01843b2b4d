// The causal convolution of each channel with K weights of its own:
//
//     z_t = bias + sum over j of w_j u_{t-K+1+j}     y_t = activation(z_t)     u: the initial state and then x
//
// Some tokens of some channels at a time come into a tile of floats, in panels of 16 channels, with the K - 1 tokens
// before them in front, are convolved there and leave it: whatever the layout of a tensor, it is read and written in
// runs of its dense dimension. A tile is long where tokens are dense, and wide where channels are.
//
// The tokens of all sequences, one after the other, are partitioned where there are few channels. How depends on the
// call's sizes alone, and so sums over tokens have the same bits for any number of threads.
#pragma once

#include <type_traits>

#include "arena.h"
#include "kernels.h"
#include "parallel.h"
#include "rows.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

typedef fulmen_causal_conv1d_problem Convolution;

constexpr int64_t kTile = 4096;         // tokens times channels
constexpr int64_t kWidest = 256;        // channels of a tile
constexpr int64_t kTasks = 64;          // tokens are partitioned up to about this many tasks,
constexpr int64_t kShortestPart = 512;  // of at least so many tokens

// The channels [first, first + count) of a task.
struct Channels {
    int64_t first, count;
    int64_t panels() const { return padded(count) / kPanel; }
    int64_t of_panel(int64_t p) const { return smaller<int64_t>(kPanel, count - p * kPanel); }
};

FULMEN_INLINE bool dense_tokens(const fulmen_tensor &x, int64_t channels) {
    return x.stride_token == 1 && (x.stride_head != 1 || channels == 1);
}

// Tokens [first, first + count) of some channels, to or from rows of a tile. Loading fills whole blocks of 16 rows.
static inline void load_tokens(const fulmen_tensor &x, int64_t batch, int64_t first, int64_t count, Channels c,
                               Panels to) {
    if (!x.data || x.stride_head == 1) {
        const Rows rows = rows_of(x, batch, c.first).from(first, 0);
        for (int64_t r = 0; r < count; r += kPanel)
            pack(rows, r, smaller<int64_t>(kPanel, count - r), c.count, {to.data + r * kPanel, to.stride});
    } else if (x.stride_token == 1) {
        alignas(64) float block[kBlock];
        for (int64_t p = 0; p < c.panels(); ++p)
            for (int64_t r = 0; r < count; r += kPanel) {
                const Rows rows = across(x, batch, first + r, c.first + p * kPanel);
                pack(rows, 0, c.of_panel(p), smaller<int64_t>(kPanel, count - r), {block, kBlock});
                transpose_block(block, to.panel(p) + r * kPanel);
            }
    } else {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t p = 0; p < c.panels(); ++p)
                gather(across(x, batch, first + r, c.first + p * kPanel), 0, c.of_panel(p), to.at(r, p * kPanel));
    }
}

static inline void store_tokens(Panels from, const fulmen_tensor &x, int64_t batch, int64_t first, int64_t count,
                                Channels c) {
    if (!x.data) return;
    if (x.stride_head == 1) {
        unpack(from, 0, count, c.count, rows_of(x, batch, c.first).from(first, 0));
    } else if (x.stride_token == 1) {
        alignas(64) float block[kBlock];
        for (int64_t p = 0; p < c.panels(); ++p)
            for (int64_t r = 0; r < count; r += kPanel) {
                transpose_block(from.panel(p) + r * kPanel, block);
                const Rows rows = across(x, batch, first + r, c.first + p * kPanel);
                unpack({block, kBlock}, 0, c.of_panel(p), smaller<int64_t>(kPanel, count - r), rows);
            }
    } else {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t p = 0; p < c.panels(); ++p)
                scatter(from.at(r, p * kPanel), across(x, batch, first + r, c.first + p * kPanel), 0, c.of_panel(p));
    }
}

// Input s of a sequence, counted from its first token: those before are its initial state's.
static inline void load_input(const Convolution &p, const Sequence &q, int64_t s, int64_t channel, int64_t count,
                              float *to) {
    if (s >= 0)
        gather(across(p.x, q.batch, q.first + s, channel), 0, count, to);
    else if (p.initial_state.data)
        gather(across(p.initial_state, q.state, p.state_width + s, channel), 0, count, to);
    else
        memset(to, 0, kPanel * sizeof(float));
}

// How a call is partitioned.
struct Plan {
    const Convolution &p;
    int64_t width, blocks, tile_tokens, total, parts, tasks, threads;

    Plan(const Convolution &p, double flops) : p(p) {
        width = dense_tokens(p.x, p.channels) ? kPanel : smaller(padded(p.channels), kWidest);
        blocks = (p.channels + width - 1) / width;
        tile_tokens = kTile / width / kPanel * kPanel;
        total = p.batch * p.tokens;
        parts = larger<int64_t>(1, smaller((kTasks + blocks - 1) / blocks, total / kShortestPart));
        tasks = parts * blocks;
        threads = worthwhile_threads(p.header.threads, flops * (double)total * (double)p.channels);
    }
    int64_t tile_rows() const { return tile_tokens + p.width - 1; }
    Channels channels(int64_t task) const {
        const int64_t first = task % blocks * width;
        return {first, smaller(width, p.channels - first)};
    }
    // f(sequence, first, last) for each run of tokens of one sequence in the part of a task. An empty sequence is a run
    // of one part.
    template <class F> void runs(int64_t task, F f) const {
        const int64_t part = task / blocks, begin = total * part / parts, end = total * (part + 1) / parts;
        for (int64_t s = 0; s < sequences_of(p); ++s) {
            const Sequence q = sequence(p, s);
            const int64_t start = q.batch * p.tokens + q.first;
            const int64_t first = larger(begin, start), last = smaller(end, start + q.tokens);
            const bool empty_here = q.tokens == 0 && start >= begin && (start < end || part == parts - 1);
            if (first < last || empty_here) f(q, first - start, empty_here ? 0 : last - start);
        }
    }
};

// The weights of each channel, and after them its bias: rows of panels.
FULMEN_INLINE Panels new_taps(Arena &arena, const Plan &plan) {
    const int64_t stride = (plan.p.width + 1) * kPanel;
    return {arena.floats(plan.width / kPanel * stride), stride};
}
static inline void load_taps(const Convolution &p, Channels c, Panels taps) {
    for (int64_t i = 0; i < c.panels(); ++i)
        for (int64_t j = 0; j <= p.width; ++j) {
            const int64_t channel = c.first + i * kPanel;
            float *const to = taps.panel(i) + j * kPanel;
            if (j < p.width)
                gather(across(p.weight, 0, j, channel), 0, c.of_panel(i), to);
            else if (p.bias.data)
                gather(across(p.bias, 0, 0, channel), 0, c.of_panel(i), to);
            else
                memset(to, 0, kPanel * sizeof(float));
        }
}

// The weights and the bias of kLanes channels, in registers where K is known to the compiler.
template <int Fixed> struct Filter {
    const int width;
    Vec taps[(Fixed ? Fixed : FULMEN_MAX_WIDTH) + 1];
    FULMEN_MEMBER Filter(const float *from, int64_t width) : width(Fixed ? Fixed : (int)width) {
#pragma GCC unroll 8
        for (int j = 0; j <= this->width; ++j) taps[j] = load(from + j * kPanel);
    }
    // z of the token whose window of K rows begins here.
    FULMEN_MEMBER Vec operator()(const float *rows) const {
        Vec z = taps[width];
#pragma GCC unroll 8
        for (int j = 0; j < width; ++j) z += taps[j] * load(rows + j * kPanel);
        return z;
    }
    // du of the input whose gradients dz, of K rows, begin here.
    FULMEN_MEMBER Vec adjoint(const float *rows) const {
        Vec du = {};
#pragma GCC unroll 8
        for (int j = 0; j < width; ++j) du += taps[j] * load(rows + (width - 1 - j) * kPanel);
        return du;
    }
    // For sums in place of weights.
    FULMEN_MEMBER void add(Vec dz, const float *rows) {
#pragma GCC unroll 8
        for (int j = 0; j < width; ++j) taps[j] += dz * load(rows + j * kPanel);
        taps[width] += dz;
    }
    FULMEN_MEMBER void store_to(float *to) const {
#pragma GCC unroll 8
        for (int j = 0; j <= width; ++j) store(to + j * kPanel, taps[j]);
    }
};

// Calls f with K as a constant where that is one of the usual widths, else with 0.
template <class F> FULMEN_INLINE void with_width(int64_t width, F f) {
    if (width == 4)
        f(std::integral_constant<int, 4>());
    else if (width == 3)
        f(std::integral_constant<int, 3>());
    else
        f(std::integral_constant<int, 0>());
}

// f(panel, lane) for each vector of channels.
template <class F> FULMEN_INLINE void for_vectors(Channels c, F f) {
    for (int64_t p = 0; p < c.panels(); ++p)
        for (int64_t lane = 0; lane < kPanel; lane += kLanes) f(p, lane);
}

FULMEN_INLINE Panels below(Panels tile, int64_t rows) { return {tile.data + rows * kPanel, tile.stride}; }

// The K - 1 inputs before token `first` of a sequence.
static inline void load_before(const Convolution &p, const Sequence &q, int64_t first, Channels c, Panels tile) {
    for (int64_t i = 0; i < c.panels(); ++i)
        for (int64_t r = 0; r < p.width - 1; ++r)
            load_input(p, q, first - (p.width - 1) + r, c.first + i * kPanel, c.of_panel(i),
                       tile.panel(i) + r * kPanel);
}

// The last of some rows go to the front, for the next tile: those after the first `count`.
FULMEN_INLINE void carry(Panels tile, Channels c, int64_t rows, int64_t count) {
    for (int64_t p = 0; p < c.panels(); ++p)
        memmove(tile.panel(p), tile.panel(p) + count * kPanel, (size_t)(rows * kPanel) * sizeof(float));
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
