// The output gate, o = g (q kv) with kv = sum over the keys of k v^T, and its gradient:
//
//     dg = do (q kv)     dqkv = do g     dq = dqkv kv^T     dkv = sum over the queries of q dqkv^T
//     dk = v dkv^T       dv = k dkv
//
// Two walks over the tokens of a head, each way: one that sums a D x E matrix, and one that multiplies rows by such a
// matrix, which stays in the L2 cache. Rows are converted and packed once in each walk, and every result is written
// once. Where heads interleave in memory, a few neighbours walk together and take turns, chunk by chunk: their rows
// share pages, and looking up an address costs more than reading what is there.
//
// Inputs of bfloat16 are multiplied in pairs where the CPU can (kPairs): then kv, dkv and do g are rounded once, where
// they become factors, and sums are float32 as ever.
//
// The tokens of few heads are partitioned into segments, whose sums are added up in order; how many depends on the
// call's sizes alone, so that bits do not depend on the number of threads.
#include <initializer_list>

#include "kernels.h"
#include "operand.h"
#include "parallel.h"
#include "state.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

constexpr int64_t kRowsInVectors = 32;     // tokens of a chunk;
constexpr int64_t kRowsInTiles = 128;      // a sum takes as long to load and store as 32 take to be added to it
constexpr int64_t kTogether = 4;           // heads that walk together, at most
constexpr int64_t kTasks = 64;             // heads are partitioned into segments up to about this many tasks,
constexpr int64_t kShortestSegment = 512;  // of at least so many tokens
template <class Element> constexpr int64_t kRows = std::is_same<Element, Tile>::value ? kRowsInTiles : kRowsInVectors;

struct Segment {
    int64_t first, last;
};

// The segments of one axis, queries or keys.
struct Partition {
    int64_t tokens, count;
    Partition(const fulmen_output_gate_problem &p, int64_t tokens) : tokens(tokens), count(1) {
        const int64_t heads = larger<int64_t>(1, p.batch * p.heads);
        if (!p.deterministic)
            count = larger<int64_t>(1, smaller((kTasks + heads - 1) / heads, tokens / kShortestSegment));
    }
    Segment operator[](int64_t index) const {
        const int64_t blocks = (tokens + kPanel - 1) / kPanel;
        return {smaller(tokens, blocks * index / count * kPanel),
                smaller(tokens, blocks * (index + 1) / count * kPanel)};
    }
};

// How a call is partitioned. Heads are taken in rounds, so that the workspace does not grow with their number.
struct Plan {
    const fulmen_output_gate_problem &p;
    Partition queries, keys;
    int64_t heads, threads, round;

    Plan(const fulmen_output_gate_problem &p, double products) : p(p), queries(p, p.queries), keys(p, p.keys) {
        heads = p.batch * p.heads;
        const double pairs = (double)heads * (double)(p.queries + p.keys) * (double)(p.key_size * p.value_size);
        threads = worthwhile_threads(p.header.threads, 2 * products * pairs);
        round = smaller(heads, larger(kTasks, 4 * p.header.threads));
    }
    int64_t matrix() const {
        return larger(panels_size(p.key_size, p.value_size), panels_size(p.value_size, p.key_size));
    }
};

// A matrix for each segment of each head of a round; a head's own is its first segment's, once they are added up.
struct Sums {
    float *data;
    int64_t segments, rows, columns, matrix, stride;
    Sums(Arena &arena, const Plan &plan, int64_t segments)
        : data(arena.floats(plan.round * segments * plan.matrix())),
          segments(segments),
          rows(plan.p.key_size),
          columns(plan.p.value_size),
          matrix(plan.matrix()),
          stride(panel_stride(rows)) {}
    Panels operator()(int64_t head, int64_t segment) const {
        return {data + (head * segments + segment) * matrix, stride};
    }
    Panels whole(int64_t head) const { return (*this)(head, 0); }
    void add_up(int64_t head) const {
        float *total = whole(head).data;
        for (int64_t s = 1; s < segments; ++s)
            for (int64_t i = 0; i < matrix; i += kLanes)
                store(total + i, load(total + i) + load((*this)(head, s).data + i));
        for (int64_t p = 0; p * kPanel < columns; ++p) clear_padding(whole(head), rows, columns, p);
    }
};

// What a factor is made of, and how many rows of that a right one of some depth has.
template <class Element> using Stored = std::conditional_t<std::is_same<Element, Tile>::value, Pair, Element>;
template <class Element> int64_t rows_of_depth(int64_t n) {
    return std::is_same<Element, Tile>::value ? tiles_of(n) * kPanel : elements<Element>(n);
}
// Those of whole blocks are filled; tiles have more, which are zero.
template <class Element> void clear_rest(Stored<Element> *panel, int64_t blocks) {
    if constexpr (std::is_same<Element, Tile>::value)
        if (blocks % 2 != 0) memset(panel + blocks * kBlock / 2, 0, 4 * kBlock / 2);
}

// kv or dkv of each head of a round as a right factor: the sum itself, or in pairs a rounded copy.
template <class Element> struct Factors {
    static constexpr bool kCopies = kNumbers<Element> > 1;
    Stored<Element> *data;
    int64_t matrix, stride, key_blocks, value_blocks;
    Factors(Arena &arena, const Plan &plan)
        : data((Stored<Element> *)arena.floats(kCopies ? plan.round * copy_size(plan) : 0)),
          matrix(copy_size(plan)),
          stride(panel_stride(rows_of_depth<Element>(plan.p.key_size))),
          key_blocks(padded(plan.p.key_size) / kPanel),
          value_blocks(padded(plan.p.value_size) / kPanel) {}
    PanelsOf<Stored<Element>> operator()(int64_t head, const Sums &sums) const {
        if constexpr (kCopies)
            return {data + head * matrix, stride};
        else
            return sums.whole(head);
    }
    void fill(int64_t head, const Sums &sums) const {
        if constexpr (kCopies)
            for (int64_t e = 0; e < value_blocks; ++e) {
                round_rows(sums.whole(head).panel(e), key_blocks * kPanel, (*this)(head, sums).panel(e));
                clear_rest<Element>((*this)(head, sums).panel(e), key_blocks);
            }
    }

private:
    static int64_t copy_size(const Plan &plan) {
        return panels_size(rows_of_depth<Element>(plan.p.key_size), plan.p.value_size);
    }
};

// kv^T or dkv^T, for each head of a round.
template <class Element> struct Transposes {
    Stored<Element> *data;
    int64_t matrix, stride, key_blocks, value_blocks;
    Transposes(Arena &arena, const Plan &plan, bool needed)
        : data((Stored<Element> *)arena.floats(needed ? plan.round * plan.matrix() : 0)),
          matrix(plan.matrix()),
          stride(panel_stride(plan.p.value_size)),
          key_blocks(padded(plan.p.key_size) / kPanel),
          value_blocks(padded(plan.p.value_size) / kPanel) {}
    PanelsOf<Stored<Element>> operator()(int64_t head) const { return {data + head * matrix, stride}; }
    void fill(int64_t head, Panels from) const {
        for (int64_t d = 0; d < key_blocks; clear_rest<Element>((*this)(head).panel(d++), value_blocks))
            for (int64_t e = 0; e < value_blocks; ++e) {
                const float *block = from.panel(e) + d * kBlock;
                Stored<Element> *const to = (*this)(head).panel(d) + e * kBlock / kNumbers<Element>;
                if constexpr (kNumbers<Element> == 1) {
                    transpose_block(block, to);
                } else {
                    float turned[kBlock];
                    transpose_block(block, turned);
                    round_rows(turned, kPanel, to);
                }
            }
    }
};

// Rows of floats of a chunk: results, and what is multiplied element by element.
struct Packed {
    Panels panels;
    int64_t size;
    Packed(Arena &arena, int64_t tokens, int64_t size) : panels(arena.panels(tokens, size)), size(size) {}
    int64_t blocks() const { return padded(size) / kPanel; }
    float *panel(int64_t p) const { return panels.panel(p); }
    void load(Rows rows, int64_t count) const { pack_all(rows, count, size, panels); }
    void store(Rows rows, int64_t count) const {
        for (int64_t r = 0; r < count; r += kPanel)
            unpack(block(r), r, smaller<int64_t>(kPanel, count - r), size, rows);
    }
    Panels block(int64_t row) const { return {panels.data + row * kPanel, panels.stride}; }
};

// Rows that are needed soon: they are prefetched while a product is computed.
struct Soon {
    Rows rows;
    int64_t size, count;
};
typedef std::initializer_list<Soon> Expected;

FULMEN_INLINE Prefetches over(int64_t steps, Expected list) {
    Prefetches soon;
    for (const Soon &x : list) soon.add(x.rows, x.size, 0, x.count);
    soon.spread(steps);
    return soon;
}
int64_t columns_at_once(int64_t panels) { return (panels + kPanelsAtOnce - 1) / kPanelsAtOnce; }

int64_t row_blocks(int64_t count) { return (count + kPanel - 1) / kPanel; }

// result = left * right, for the rows of a chunk; start(p) says what becomes of the panels from p on.
template <class Element, class Start>
void multiply_rows(const Packed &result, const Operand<Element> &left, PanelsOf<Element> right, int64_t count,
                   Expected next, Start start) {
    const int64_t depth = padded(left.size) / kPanel;
    Prefetches soon = over(columns_at_once(result.blocks()) * row_blocks(count) * depth, next);
    for_each_panels(result.blocks(), [&](int64_t p, auto some) {
        multiply<some.kCount>(result.panels, p, row_blocks(count), start(p),
                              Times<some.kCount, AsStoredOf<Element>, Prefetching>{
                                  left.over_channels(), panels_at<some.kCount>(right, p), depth, {&soon}});
    });
}
template <class Element>
void multiply_rows(const Packed &result, const Operand<Element> &left, PanelsOf<Stored<Element>> right, int64_t count,
                   Expected next) {
    multiply_rows(result, left, right, count, next, [](int64_t) { return Zero{}; });
}

#if FULMEN_TILES
// In tiles: two blocks of rows and two panels at once, which start(p) takes as it takes those of vectors.
template <class Start>
void multiply_rows(const Packed &result, const Operand<Tile> &left, PanelsOf<Pair> right, int64_t count, Expected next,
                   Start start) {
    const TileRegisters registers;
    const PanelsOf<Pair> rows = left.over_channels();
    float sums[4 * kBlock];
    Prefetches soon = over((row_blocks(count) + 1) / 2 * columns_at_once(result.blocks()), next);
    for (int64_t p = 0; p < result.blocks(); p += 2) {
        for (int64_t block = 0; block < row_blocks(count); block += 2) {
            soon.some();
            const LeftTiles these{rows.data + block * kTilePairs, kTilePairs, rows.stride};
            const bool wide = p + 1 < result.blocks();
            wide ? multiply_tiles<2, 2>(these, {right.panel(p), right.stride}, tiles_of(left.size), sums)
                 : multiply_tiles<2, 1>(these, {right.panel(p), 0}, tiles_of(left.size), sums);
            for (int64_t b = block; b < smaller(block + 2, row_blocks(count)); ++b)
                for (int64_t c = p; c < p + 1 + wide; ++c) {
                    Vec acc[kPanel][1];
                    const float *const from = sums + ((b - block) * (1 + wide) + c - p) * kBlock;
#pragma GCC unroll 16
                    for (int r = 0; r < kPanel; ++r) acc[r][0] = load(from + r * kPanel);
                    start(c).end(acc, Place{result.panel(c) + b * kBlock, kLanes}, b * kPanel, 0);
                }
        }
    }
}

#endif

// Whether a product in pairs can write and read rows by itself: it does so in whole panels. Rows may be absent.
bool in_whole_panels(int64_t size, int64_t count, std::initializer_list<Rows> all) {
    bool whole = count % kPanel == 0 && size % kPanel == 0;
    for (const Rows &rows : all) whole = whole && (!rows.present() || rows.dtype == FULMEN_BFLOAT16);
    return whole;
}
FULMEN_INLINE ToRows to_rows(Rows rows, int64_t p) { return {(uint16_t *)rows.data + p * kPanel, rows.stride}; }

// The same, to rows in the caller's memory; what is in `result` afterwards does not matter.
template <class Element>
void multiply_rows_to(Rows to, const Packed &result, const Operand<Element> &left, PanelsOf<Stored<Element>> right,
                      int64_t count, Expected next) {
    if constexpr (kNumbers<Element> > 1)
        if (in_whole_panels(result.size, count, {to}))
            return multiply_rows(result, left, right, count, next, [&](int64_t p) { return to_rows(to, p); });
    multiply_rows(result, left, right, count, next);
    result.store(to, count);
}

// to = gate * (left * right), in whole panels; kept = left * right, unless it is absent.
template <class Element>
void multiply_gated(Rows to, Rows gate, Rows kept, const Packed &result, const Operand<Element> &left,
                    PanelsOf<Stored<Element>> right, int64_t count, Expected next) {
    multiply_rows(result, left, right, count, next, [&](int64_t p) {
        return ToGatedRows{to_rows(to, p), to_rows(gate, p), kept.present() ? to_rows(kept, p) : ToRows{}};
    });
}

// sum += left^T right, over the rows of two chunks.
template <class Element>
void add_outer(Panels sum, const Operand<Element> &left, const Operand<Element> &right, int64_t count, Expected next) {
    const int64_t blocks = padded(left.size) / kPanel, panels = padded(right.size) / kPanel, depth = row_blocks(count);
    Prefetches soon = over(columns_at_once(panels) * blocks * depth, next);
    for_each_panels(panels, [&](int64_t p, auto some) {
        multiply<some.kCount>(sum, p, blocks, Add{},
                              Times<some.kCount, TransposedOf<Element>, Prefetching>{
                                  left.over_tokens(), panels_at<some.kCount>(right.over_tokens(), p), depth, {&soon}});
    });
}

#if FULMEN_TILES
// In tiles, the left one is transposed: a tile of a left factor has its depth in its rows.
void add_outer(Panels sum, const Operand<Tile> &left, const Operand<Tile> &right, int64_t count, Expected next) {
    const TileRegisters registers;
    const PanelsOf<Pair> tokens = left.over_tokens(), values = right.over_tokens();
    const int64_t blocks = padded(left.size) / kPanel, panels = padded(right.size) / kPanel, depth = tiles_of(count);
    constexpr int64_t kMost = kRows<Tile> / kTileDepth;
    Prefetches soon = over((blocks + 1) / 2 * columns_at_once(panels), next);
    for (int64_t d = 0; d < blocks; d += 2) {
        const bool tall = d + 1 < blocks;
        alignas(64) Pair channels[2 * kMost * kTilePairs];
        for (int64_t b = 0; b < 1 + tall; ++b)
            for (int64_t t = 0; t < depth; ++t)
                transpose_block(tokens.panel(d + b) + t * kTilePairs, channels + (b * kMost + t) * kTilePairs);
        const LeftTiles these{channels, kMost * kTilePairs, kTilePairs};
        for (int64_t p = 0; p < panels; p += 2) {
            const TileSums to{sum.panel(p) + d * kBlock, kBlock, sum.stride};
            const RightTiles those{values.panel(p), values.stride};
            soon.some();
            if (p + 1 < panels)
                tall ? multiply_tiles<2, 2, true>(these, those, depth, to)
                     : multiply_tiles<1, 2, true>(these, those, depth, to);
            else
                tall ? multiply_tiles<2, 1, true>(these, those, depth, to)
                     : multiply_tiles<1, 1, true>(these, those, depth, to);
        }
    }
}

#endif

// result = a * b, element by element; result may be either.
void multiply_elements(Panels result, Panels a, Panels b, int64_t size, int64_t count) {
    for (int64_t p = 0; p * kPanel < size; ++p)
        for (int64_t x = 0; x < row_blocks(count) * kBlock; x += kLanes)
            store(result.panel(p) + x, load(a.panel(p) + x) * load(b.panel(p) + x));
}

// to = a * b, element by element, of bfloat16 in whole panels.
inline void multiply_elements(Rows to, Rows a, Rows b, int64_t size, int64_t count) {
    for (int64_t r = 0; r < count; ++r)
        for (int64_t f = 0; f < size; f += kLanes)
            store_as(BFloat16(), (uint16_t *)to.row(r) + f,
                     load_as(BFloat16(), (const uint16_t *)a.row(r) + f) *
                         load_as(BFloat16(), (const uint16_t *)b.row(r) + f));
}

// Some tokens of one head of a round.
struct Chunk {
    int64_t head, first, count;
};

// One segment of `heads` neighbours from `head` on.
struct Walk {
    int64_t head, heads, index;
    Segment segment;
    int64_t rows;  // tokens of a chunk

    // f(this chunk, the next one)
    template <class F> void for_each_chunk(F f) const {
        for (int64_t t = segment.first; t < segment.last; t += rows)
            for (int64_t h = head; h < head + heads; ++h) {
                const Chunk now{h, t, smaller(rows, segment.last - t)};
                const Chunk later{head, t + rows, smaller(rows, segment.last - t - rows)};
                f(now, h + 1 < head + heads ? Chunk{h + 1, now.first, now.count} : later);
            }
    }
};

// One round of heads: its memory, with or without what only the backward needs, and its walks.
template <class Element> class Round {
public:
    int64_t first = 0, count = 0;  // heads

    Round(const Plan &plan, bool backward, char *workspace)
        : plan(plan),
          p(plan.p),
          workspace(workspace),
          arena(workspace),
          kv(arena, plan, plan.keys.count),
          dkv(arena, plan, backward ? plan.queries.count : 0),
          factor(arena, plan),
          transposed(arena, plan, backward) {}

    int64_t bytes() const { return arena.bytes() + plan.threads * packed_bytes(); }

    void sum_keys() const {
        walk(plan.keys, p.k, [&](const Walk &walk, Arena memory) {
            const Operand<Element> k(memory, kTokens, p.key_size, kOverTokens),
                v(memory, kTokens, p.value_size, kOverTokens);
            clear(kv, walk);
            walk.for_each_chunk([&](const Chunk &now, const Chunk &next) {
                k.load(rows(p.k, now), now.count);
                v.load(rows(p.v, now), now.count);
                add_outer(kv(now.head, walk.index), k, v, now.count, {soon(p.k, k, next), soon(p.v, v, next)});
            });
        });
        for_each_head([&](int64_t head) { kv.add_up(head); });
    }

    void store_kv() const {
        for_each_head([&](int64_t head) { store_state(kv.whole(head), p.key_size, p.value_size, caller_kv(head)); });
    }

    void load_kv() const {
        for_each_head([&](int64_t head) { load_state(caller_kv(head), p.key_size, p.value_size, kv.whole(head)); });
    }

    void answer_queries(const fulmen_tensor &output) const {
        for_each_head([&](int64_t head) { factor.fill(head, kv); });
        walk(plan.queries, p.q, [&](const Walk &walk, Arena memory) {
            const Operand<Element> q(memory, kTokens, p.key_size, kOverChannels);
            const Packed g(memory, kTokens, p.value_size), o(memory, kTokens, p.value_size);
            walk.for_each_chunk([&](const Chunk &now, const Chunk &next) {
                const Rows to = rows(output, now), gate = rows(p.gate, now), kept = rows(p.qkv, now);
                q.load(rows(p.q, now), now.count);
                if constexpr (kNumbers<Element> > 1)
                    if (in_whole_panels(p.value_size, now.count, {to, gate, kept}))
                        return multiply_gated(
                            to, gate, kept, o, q, factor(now.head, kv), now.count,
                            {soon(p.gate, g, next), soon(output, o, next), soon(p.qkv, o, next), soon(p.q, q, next)});
                multiply_rows(o, q, factor(now.head, kv), now.count,
                              {soon(p.gate, g, now), soon(output, o, now), soon(p.qkv, o, now), soon(p.q, q, next)});
                if (kept.present()) o.store(kept, now.count);
                g.load(rows(p.gate, now), now.count);
                multiply_elements(o.panels, o.panels, g.panels, p.value_size, now.count);
                o.store(rows(output, now), now.count);
            });
        });
    }

    // dg, dq and dkv
    void differentiate_queries(const fulmen_output_gate_backward_call &call) const {
        const fulmen_tensor &grad = call.grad_output;
        for_each_head([&](int64_t head) {
            factor.fill(head, kv);
            transposed.fill(head, kv.whole(head));
        });
        walk(plan.queries, p.q, [&](const Walk &walk, Arena memory) {
            const Operand<Element> q(memory, kTokens, p.key_size, Use{!p.qkv.data, true});
            const Operand<Element> g(memory, kTokens, p.value_size, Use{true, true, false, true});
            const Packed dq(memory, kTokens, p.key_size), go(memory, kTokens, p.value_size),
                qkv(memory, kTokens, p.value_size);
            clear(dkv, walk);
            walk.for_each_chunk([&](const Chunk &now, const Chunk &next) {
                q.load(rows(p.q, now), now.count);
                if (!gate_in_pairs(call, now, q, g, qkv)) {
                    go.load(rows(grad, now), now.count);
                    if (p.qkv.data)
                        qkv.load(rows(p.qkv, now), now.count);
                    else
                        multiply_rows(qkv, q, factor(now.head, kv), now.count, {});
                    multiply_elements(qkv.panels, go.panels, qkv.panels, p.value_size, now.count);
                    qkv.store(rows(call.dgate, now), now.count);
                    g.load(rows(p.gate, now), now.count);
                    multiply_elements(g.in_floats(), go.panels, g.in_floats(), p.value_size, now.count);
                    g.round(now.count);
                }
                multiply_rows_to(rows(call.dq, now), dq, g, transposed(now.head), now.count,
                                 {soon(call.dq, dq, next), soon(p.q, q, next), soon(grad, go, next)});
                add_outer(dkv(now.head, walk.index), q, g, now.count,
                          {soon(call.dgate, g, next), soon(p.gate, g, next), soon(p.qkv, qkv, next)});
            });
        });
        for_each_head([&](int64_t head) { dkv.add_up(head); });
    }

    // dk and dv
    void differentiate_keys(const fulmen_output_gate_backward_call &call) const {
        for_each_head([&](int64_t head) {
            factor.fill(head, dkv);
            transposed.fill(head, dkv.whole(head));
        });
        walk(plan.keys, p.k, [&](const Walk &walk, Arena memory) {
            const Operand<Element> k(memory, kTokens, p.key_size, kOverChannels);
            const Operand<Element> v(memory, kTokens, p.value_size, kOverChannels);
            const Packed dk(memory, kTokens, p.key_size), dv(memory, kTokens, p.value_size);
            walk.for_each_chunk([&](const Chunk &now, const Chunk &next) {
                k.load(rows(p.k, now), now.count);
                v.load(rows(p.v, now), now.count);
                multiply_rows_to(rows(call.dk, now), dk, v, transposed(now.head), now.count,
                                 {soon(call.dk, dk, next), soon(p.k, k, next)});
                multiply_rows_to(rows(call.dv, now), dv, k, factor(now.head, dkv), now.count,
                                 {soon(call.dv, dv, next), soon(p.v, v, next)});
            });
        });
    }

private:
    // dgate, and g = do gate, straight from the caller's rows, where these are whole panels of bfloat16.
    bool gate_in_pairs(const fulmen_output_gate_backward_call &call, const Chunk &at, const Operand<Element> &q,
                       const Operand<Element> &g, const Packed &qkv) const {
        if constexpr (kNumbers<Element> > 1) {
            const Rows grad = rows(call.grad_output, at), gate = rows(p.gate, at), dgate = rows(call.dgate, at);
            const Rows kept = rows(p.qkv, at);
            if (!in_whole_panels(p.value_size, at.count, {grad, gate, dgate, kept})) return false;
            if (kept.present())
                multiply_elements(dgate, grad, kept, p.value_size, at.count);
            else
                multiply_gated(dgate, grad, {}, qkv, q, factor(at.head, kv), at.count, {});
            g.load_products(grad, gate, at.count);
            return true;
        }
        return false;
    }

    static constexpr int64_t kTokens = kRows<Element>;
    static constexpr Use kOverChannels{true, false}, kOverTokens{false, true};
    const Plan &plan;
    const fulmen_output_gate_problem &p;
    char *const workspace;
    Arena arena;
    Sums kv, dkv;
    Factors<Element> factor;
    Transposes<Element> transposed;

    int64_t sample(int64_t head) const { return (first + head) / p.heads; }
    Rows rows(const fulmen_tensor &x, const Chunk &at) const {
        return rows_of(x, sample(at.head), (first + at.head) % p.heads).from(at.first, 0);
    }
    template <class Rows_> Soon soon(const fulmen_tensor &x, const Rows_ &like, const Chunk &at) const {
        return {at.count > 0 ? rows(x, at) : Rows{}, like.size, at.count};
    }
    Matrix caller_kv(int64_t head) const { return matrix_of(p.kv, sample(head), (first + head) % p.heads); }

    void clear(const Sums &sums, const Walk &walk) const {
        for (int64_t h = walk.head; h < walk.head + walk.heads; ++h)
            memset(sums(h, walk.index).data, 0, 4 * (size_t)plan.matrix());
    }

    // For the walk with the most operands, over the queries in the backward.
    int64_t packed_bytes() const {
        Arena counting(nullptr);
        Operand<Element>(counting, kTokens, p.key_size, Use{true, true});
        Operand<Element>(counting, kTokens, p.value_size, Use{true, true, false, true});
        for (int64_t size : {p.key_size, p.value_size, p.value_size}) Packed(counting, kTokens, size);
        return counting.bytes();
    }

    // f(walk, memory for its chunks) for all segments of all heads, which lie as in x.
    template <class F> void walk(const Partition &partition, const fulmen_tensor &x, F f) const {
        const bool interleaved = x.stride_head < x.stride_token;
        const int64_t to_spare = count * partition.count / (4 * plan.threads), bytes = packed_bytes();
        const int64_t together = interleaved ? larger<int64_t>(1, smaller(kTogether, to_spare)) : 1;
        const int64_t groups = (count + together - 1) / together;
        parallel_for(plan.threads, groups * partition.count, [&](int64_t task, int64_t worker) {
            const int64_t head = task / partition.count * together, index = task % partition.count;
            f(Walk{head, smaller(together, count - head), index, partition[index], kTokens},
              Arena(workspace + arena.bytes() + worker * bytes));
        });
    }
    template <class F> void for_each_head(F f) const {
        parallel_for(plan.threads, count, [&](int64_t head, int64_t) { f(head); });
    }
};

template <class Element, class F> int64_t for_each_round(const Plan &plan, bool backward, F f) {
    char *const workspace = workspace_of(plan.p.header, Round<Element>(plan, backward, nullptr).bytes());
    if (!workspace) return FULMEN_NO_WORKSPACE;
    Round<Element> round(plan, backward, workspace);
    for (; round.first < plan.heads; round.first += round.count) {
        round.count = smaller(plan.round, plan.heads - round.first);
        f(round);
    }
    return FULMEN_OK;
}

// Calls f with the element that a call's inputs are multiplied as.
template <class F> int64_t with_element(const fulmen_output_gate_problem &p, F f) {
    if constexpr (kTiles)
        if (p.q.dtype == FULMEN_BFLOAT16) return f(Tile());
    return with_element(p.q.dtype, f);
}

constexpr double kForwardProducts = 1, kBackwardProducts = 2.5;  // for each query and key

}  // namespace

int64_t output_gate_forward(const fulmen_output_gate_forward_call &call) {
    const Plan plan(call.problem, kForwardProducts);
    return with_element(call.problem, [&](auto element) {
        return for_each_round<decltype(element)>(plan, false, [&](const auto &round) {
            round.sum_keys();
            if (call.problem.kv.data) round.store_kv();
            round.answer_queries(call.output);
        });
    });
}

int64_t output_gate_backward(const fulmen_output_gate_backward_call &call) {
    const Plan plan(call.problem, kBackwardProducts);
    return with_element(call.problem, [&](auto element) {
        return for_each_round<decltype(element)>(plan, true, [&](const auto &round) {
            call.problem.kv.data ? round.load_kv() : round.sum_keys();
            round.differentiate_queries(call);
            round.differentiate_keys(call);
        });
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
