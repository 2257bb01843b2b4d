// The output gate, o = g (q kv) with kv = sum over the keys of k v^T, and its gradient:
//
//     dg = do (q kv)     dqkv = do g     dq = dqkv kv^T     dkv = sum over the queries of q dqkv^T
//     dk = v dkv^T       dv = k dkv
//
// Two walks over the tokens of a head, each way: one that sums a D x E matrix, and one that multiplies rows by such a
// matrix, which stays in the L2 cache. Rows are converted and packed once in each walk, and every result is written
// once. Where heads interleave in memory, a few neighbours walk together and take turns, chunk by chunk: their rows share
// pages, and looking up an address costs more than reading what is there.
//
// The tokens of few heads are cut into segments, whose sums are added up in order; how many depends on the call's sizes
// alone, so that bits do not depend on the number of threads.
#include <initializer_list>

#include "kernels.h"
#include "operand.h"
#include "parallel.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

template <class Element> constexpr int64_t kRows = 32 * kNumbers<Element>;  // tokens packed at once

constexpr int64_t kTogether = 4;           // heads that walk together, at most
constexpr int64_t kTasks = 64;             // heads are cut into segments up to about this many tasks,
constexpr int64_t kShortestSegment = 512;  // of at least so many tokens

struct Segment {
    int64_t first, last;
};

// How the tokens of one axis, queries or keys, are cut.
struct Cut {
    int64_t tokens, count;
    Cut(const fulmen_gate_problem &p, int64_t tokens) : tokens(tokens), count(1) {
        const int64_t heads = larger<int64_t>(1, p.batch * p.heads);
        if (!p.deterministic)
            count = larger<int64_t>(1, smaller((kTasks + heads - 1) / heads, tokens / kShortestSegment));
    }
    Segment operator[](int64_t index) const {
        const int64_t blocks = (tokens + kPanel - 1) / kPanel;
        return {smaller(tokens, blocks * index / count * kPanel), smaller(tokens, blocks * (index + 1) / count * kPanel)};
    }
};

// How a call is cut. Heads are taken in rounds, so that the workspace does not grow with their number.
struct Plan {
    const fulmen_gate_problem &p;
    Cut queries, keys;
    int64_t heads, threads, round;

    Plan(const fulmen_gate_problem &p, double products) : p(p), queries(p, p.queries), keys(p, p.keys) {
        heads = p.batch * p.heads;
        const double pairs = (double)heads * (double)(p.queries + p.keys) * (double)(p.key_features * p.value_features);
        threads = worthwhile_threads(p.threads, 2 * products * pairs);
        round = smaller(heads, larger(kTasks, 4 * p.threads));
    }
    int64_t matrix() const {
        return larger(panels_size(p.key_features, p.value_features), panels_size(p.value_features, p.key_features));
    }
};

// A matrix for each segment of each head of a round; a head's own is its first segment's, once they are added up.
template <class Element> class Sums {
public:
    Sums(Arena &arena, const Plan &plan, int64_t segments)
        : p(plan.p),
          segments(segments),
          matrix(plan.matrix()),
          data(arena.floats(plan.round * segments * matrix)),
          pairs(kNumbers<Element> > 1 && segments ? arena.floats(plan.round * matrix) : nullptr) {}

    Panels operator()(int64_t head, int64_t segment) const {
        return {data + (head * segments + segment) * matrix, panel_stride(p.key_features)};
    }
    Panels whole(int64_t head) const { return (*this)(head, 0); }
    void add_up(int64_t head) const {
        float *total = whole(head).data;
        for (int64_t s = 1; s < segments; ++s)
            for (int64_t i = 0; i < matrix; i += kLanes) store(total + i, load(total + i) + load((*this)(head, s).data + i));
    }

    // The whole as the right factor of a product: itself, or rounded to pairs.
    PanelsOf<Element> factor(int64_t head) const {
        if constexpr (kNumbers<Element> == 1) return whole(head);
        else return {(Element *)pairs + head * matrix, panel_stride(elements<Element>(p.key_features))};
    }
    void prepare_factor(int64_t head) const {
        if constexpr (kNumbers<Element> > 1) pair_matrix(whole(head), p.key_features, p.value_features, factor(head));
    }

private:
    const fulmen_gate_problem &p;
    const int64_t segments, matrix;
    float *const data, *const pairs;
};

// kv^T or dkv^T, for each head of a round.
template <class Element> struct Transposes {
    const fulmen_gate_problem &p;
    int64_t matrix;
    float *data;
    Transposes(Arena &arena, const Plan &plan, bool needed)
        : p(plan.p), matrix(plan.matrix()), data(arena.floats(needed ? plan.round * matrix : 0)) {}
    PanelsOf<Element> operator()(int64_t head) const {
        return {(Element *)data + head * matrix, panel_stride(elements<Element>(p.value_features))};
    }
    void fill(int64_t head, Panels from) const {
        transpose_matrix(from, p.key_features, p.value_features, (*this)(head));
    }
};

// Up to kRows tokens of a result.
struct Chunk {
    Panels panels;
    int64_t features;
    Chunk(Arena &arena, int64_t rows, int64_t features) : panels(arena.panels(rows, features)), features(features) {}
    void load(Rows rows, int64_t count) const {
        for (int64_t r = 0; r < count; r += kPanel) pack(rows, r, smaller<int64_t>(kPanel, count - r), features, block(r));
    }
    void store(Rows rows, int64_t count) const { unpack(panels, 0, count, features, rows); }
    Panels block(int64_t row) const { return {panels.data + row * kPanel, panels.stride}; }
};

// Rows that are needed soon.
struct Soon {
    Rows rows;
    int64_t features, count;
    int64_t bytes() const { return rows.present() ? features * rows.element_bytes() : 0; }
};
typedef std::initializer_list<Soon> Prefetches;

// Asks the cache for them while a product is computed, a few lines at a time: more than it can wait for at once hold up the
// product.
class Prefetcher {
public:
    Prefetcher(Prefetches list, int64_t times) : next(list.begin()), end(list.end()) {
        int64_t lines = 0;
        for (const Soon &x : list) lines += x.count * ((x.bytes() + 63) / 64);
        at_once = (lines + times - 1) / larger<int64_t>(1, times);
        skip_absent();
    }
    FULMEN_MEMBER void ask() {
        for (int64_t i = 0; i < at_once && next != end; ++i) {
            __builtin_prefetch(next->rows.row(row) + byte, 0, 2);
            if ((byte += 64) < next->bytes()) continue;
            byte = 0;
            if (++row < next->count) continue;
            row = 0;
            ++next;
            skip_absent();
        }
    }

private:
    const Soon *next, *end;
    int64_t at_once, row = 0, byte = 0;
    void skip_absent() {
        while (next != end && (next->count <= 0 || next->bytes() == 0)) ++next;
    }
};

// A panel that asks on the way down.
template <class Element> struct AskingPanel : PanelOf<Element> {
    Prefetcher *prefetcher;
    AskingPanel(const Element *panel, Prefetcher &prefetcher) : PanelOf<Element>(panel), prefetcher(&prefetcher) {}
    FULMEN_MEMBER void next_depth() {
        PanelOf<Element>::next_depth();
        prefetcher->ask();
    }
};

int64_t row_blocks(int64_t count) { return (count + kPanel - 1) / kPanel; }

// result = start(result) + left * right.
template <class Left, class Start>
void multiply_panels(Panels result, int64_t rows, int64_t columns, Start start, Left left,
                     PanelsOf<typename Left::Element> right, int64_t depth, Prefetches soon) {
    Prefetcher prefetcher(soon, row_blocks(rows) * row_blocks(columns) * depth);
    for (int64_t p = 0; p < row_blocks(columns); ++p)
        multiply(result.panel(p), row_blocks(rows), start,
                 Product<Left, AskingPanel<typename Left::Element>>{left, {right.panel(p), prefetcher}, depth});
}

// result = left * right, for the rows of a chunk.
template <class Element>
void multiply_rows(const Chunk &result, const Operand<Element> &left, PanelsOf<Element> right, int64_t count,
                   Prefetches soon) {
    multiply_panels(result.panels, count, result.features, Zero{}, AsStoredOf<Element>(left.over_features()), right,
                    depth_blocks<Element>(left.features), soon);
}

// sum += left^T right, over the rows of two chunks.
template <class Element>
void add_outer(Panels sum, const Operand<Element> &left, const Operand<Element> &right, int64_t count,
               Prefetches soon) {
    multiply_panels(sum, left.features, right.features, Add{}, TransposedOf<Element>(left.over_tokens()),
                    right.over_tokens(), depth_blocks<Element>(count), soon);
}

// result = x * factor, element by element, in the caller's memory.
void store_product(Chunk x, Rows factor, Rows result, int64_t count) {
    with_type(factor.dtype, [=](auto factor_type) {
        with_type(result.dtype, [=](auto result_type) {
            for (int64_t r = 0; r < count; ++r) {
                auto from = (const typename decltype(factor_type)::Stored *)factor.row(r);
                auto to = (typename decltype(result_type)::Stored *)result.row(r);
                for (int64_t f = 0; f < x.features; f += kLanes) {
                    const int64_t n = x.features - f;
                    store_some(result_type, to + f, load(x.panels.at(r, f)) * load_some(factor_type, from + f, n), n);
                }
            }
        });
    });
}

// to = a * b, element by element.
template <class Element> void load_product(const Operand<Element> &to, Rows a, Rows b, int64_t count) {
    with_type(a.dtype, [=](auto a_type) {
        with_type(b.dtype, [=](auto b_type) {
            to.fill(count, [=, features = to.features](int64_t r, int64_t f) {
                const int64_t n = features - f;
                const auto from_a = (const typename decltype(a_type)::Stored *)a.row(r) + f;
                const auto from_b = (const typename decltype(b_type)::Stored *)b.row(r) + f;
                return load_some(a_type, from_a, n) * load_some(b_type, from_b, n);
            });
        });
    });
}

// Some tokens of one head of a round.
struct Stretch {
    int64_t head, first, count;
};

// One segment of `heads` neighbours from `head` on.
struct Walk {
    int64_t head, heads, index;
    Segment segment;

    // f(this stretch, the next one)
    template <class F> void for_each_stretch(int64_t rows, F f) const {
        for (int64_t t = segment.first; t < segment.last; t += rows)
            for (int64_t h = head; h < head + heads; ++h) {
                const Stretch now{h, t, smaller(rows, segment.last - t)};
                const Stretch later{head, t + rows, smaller(rows, segment.last - t - rows)};
                f(now, h + 1 < head + heads ? Stretch{h + 1, now.first, now.count} : later);
            }
    }
};

// One round of heads: its memory, with or without what only the backward needs, and its walks. Products of two inputs,
// k^T v, are of one element, and those with an intermediate as a factor of another (or the same).
template <class Inputs, class Element> class Round {
public:
    int64_t first = 0, count = 0;  // heads

    Round(const Plan &plan, bool backward)
        : plan(plan),
          p(plan.p),
          arena(plan.p.workspace),
          kv(arena, plan, plan.keys.count),
          dkv(arena, plan, backward ? plan.queries.count : 0),
          transposed(arena, plan, backward) {}

    int64_t bytes() const { return arena.bytes() + plan.threads * chunk_bytes(); }

    void sum_keys() const {
        walk(plan.keys, p.k, [&](const Walk &walk, Arena chunks) {
            const auto k = operand<Inputs>(chunks, p.key_features, over_tokens);
            const auto v = operand<Inputs>(chunks, p.value_features, over_tokens);
            clear(kv, walk);
            walk.for_each_stretch(kRows<Inputs>, [&](const Stretch &now, const Stretch &next) {
                k.load(rows(p.k, now), now.count);
                v.load(rows(p.v, now), now.count);
                add_outer(kv(now.head, walk.index), k, v, now.count,
                          {soon(p.k, k.features, next), soon(p.v, v.features, next)});
            });
        });
        for_each_head([&](int64_t head) {
            kv.add_up(head);
            kv.prepare_factor(head);
        });
    }

    void store_kv() const {
        for_each_head([&](int64_t head) {
            store_state(kv.whole(head), p.key_features, p.value_features, caller_kv(head));
        });
    }

    void load_kv() const {
        for_each_head([&](int64_t head) {
            load_state(caller_kv(head), p.key_features, p.value_features, kv.whole(head));
            kv.prepare_factor(head);
        });
    }

    void answer_queries(const fulmen_tensor &output) const {
        walk(plan.queries, p.q, [&](const Walk &walk, Arena chunks) {
            const auto q = operand<Element>(chunks, p.key_features, over_features);
            const Chunk qkv = result(chunks, p.value_features);
            walk.for_each_stretch(kRows<Element>, [&](const Stretch &now, const Stretch &next) {
                q.load(rows(p.q, now), now.count);
                multiply_rows(qkv, q, kv.factor(now.head), now.count,
                              {soon(p.g, qkv.features, now), soon(output, qkv.features, now),
                               soon(p.qkv, qkv.features, now), soon(p.q, q.features, next)});
                if (p.qkv.data) qkv.store(rows(p.qkv, now), now.count);
                store_product(qkv, rows(p.g, now), rows(output, now), now.count);
            });
        });
    }

    // dg, dq and dkv
    void differentiate_queries(const fulmen_gate_backward_call &call) const {
        const fulmen_tensor &grad = call.grad_output;
        const int64_t d = p.key_features, e = p.value_features;
        for_each_head([&](int64_t head) { transposed.fill(head, kv.whole(head)); });
        walk(plan.queries, p.q, [&](const Walk &walk, Arena chunks) {
            const auto q = operand<Element>(chunks, d, Use{!p.qkv.data, true});
            const auto dqkv = operand<Element>(chunks, e, Use{true, true});
            const Chunk qkv = result(chunks, e), dq = result(chunks, d);
            clear(dkv, walk);
            walk.for_each_stretch(kRows<Element>, [&](const Stretch &now, const Stretch &next) {
                q.load(rows(p.q, now), now.count);
                if (p.qkv.data)
                    qkv.load(rows(p.qkv, now), now.count);
                else
                    multiply_rows(qkv, q, kv.factor(now.head), now.count, {});
                store_product(qkv, rows(grad, now), rows(call.dg, now), now.count);
                load_product(dqkv, rows(grad, now), rows(p.g, now), now.count);
                multiply_rows(dq, dqkv, transposed(now.head), now.count,
                              {soon(call.dq, d, now), soon(p.q, d, next), soon(grad, e, next)});
                dq.store(rows(call.dq, now), now.count);
                add_outer(dkv(now.head, walk.index), q, dqkv, now.count,
                          {soon(call.dg, e, next), soon(p.g, e, next), soon(p.qkv, e, next)});
            });
        });
        for_each_head([&](int64_t head) {
            dkv.add_up(head);
            dkv.prepare_factor(head);
        });
    }

    // dk and dv
    void differentiate_keys(const fulmen_gate_backward_call &call) const {
        const int64_t d = p.key_features, e = p.value_features;
        for_each_head([&](int64_t head) { transposed.fill(head, dkv.whole(head)); });
        walk(plan.keys, p.k, [&](const Walk &walk, Arena chunks) {
            const auto k = operand<Element>(chunks, d, over_features), v = operand<Element>(chunks, e, over_features);
            const Chunk dk = result(chunks, d), dv = result(chunks, e);
            walk.for_each_stretch(kRows<Element>, [&](const Stretch &now, const Stretch &next) {
                k.load(rows(p.k, now), now.count);
                v.load(rows(p.v, now), now.count);
                multiply_rows(dk, v, transposed(now.head), now.count, {soon(call.dk, d, now), soon(p.k, d, next)});
                dk.store(rows(call.dk, now), now.count);
                multiply_rows(dv, k, dkv.factor(now.head), now.count, {soon(call.dv, e, now), soon(p.v, e, next)});
                dv.store(rows(call.dv, now), now.count);
            });
        });
    }

private:
    const Plan &plan;
    const fulmen_gate_problem &p;
    Arena arena;
    Sums<Element> kv, dkv;
    Transposes<Element> transposed;

    static constexpr Use over_features{true, false}, over_tokens{false, true};
    template <class Any> Operand<Any> operand(Arena &arena, int64_t features, Use use) const {
        return Operand<Any>(arena, kRows<Any>, features, use);
    }
    Chunk result(Arena &arena, int64_t features) const { return Chunk(arena, kRows<Element>, features); }

    int64_t sample(int64_t head) const { return (first + head) / p.heads; }
    Rows rows(const fulmen_tensor &x, const Stretch &at) const {
        return rows_of(x, sample(at.head), (first + at.head) % p.heads).from(at.first, 0);
    }
    Soon soon(const fulmen_tensor &x, int64_t features, const Stretch &at) const {
        return {at.count > 0 ? rows(x, at) : Rows{}, features, at.count};
    }
    Matrix caller_kv(int64_t head) const { return matrix_of(p.kv, sample(head), (first + head) % p.heads); }

    void clear(const Sums<Element> &sums, const Walk &walk) const {
        for (int64_t h = walk.head; h < walk.head + walk.heads; ++h)
            memset(sums(h, walk.index).data, 0, 4 * (size_t)plan.matrix());
    }

    // For the walk with the most operands, over the queries in the backward; for floats these are as large as for pairs.
    int64_t chunk_bytes() const {
        Arena counting(nullptr);
        for (int64_t features : {p.key_features, p.value_features}) {
            operand<Element>(counting, features, Use{true, true});
            result(counting, features);
        }
        return counting.bytes();
    }

    // f(walk, memory for chunks) for all segments of all heads, which lie as in x.
    template <class F> void walk(const Cut &cut, const fulmen_tensor &x, F f) const {
        const bool interleaved = x.stride_head < x.stride_token;
        const int64_t to_spare = count * cut.count / (4 * plan.threads), bytes = chunk_bytes();
        const int64_t together = interleaved ? larger<int64_t>(1, smaller(kTogether, to_spare)) : 1;
        const int64_t groups = (count + together - 1) / together;
        parallel_for(plan.threads, groups * cut.count, [&](int64_t task, int64_t worker) {
            const int64_t head = task / cut.count * together, index = task % cut.count;
            f(Walk{head, smaller(together, count - head), index, cut[index]},
              Arena((char *)p.workspace + arena.bytes() + worker * bytes));
        });
    }
    template <class F> void for_each_head(F f) const {
        parallel_for(plan.threads, count, [&](int64_t head, int64_t) { f(head); });
    }
};

template <class Round, class F> int64_t for_each_round(Round &round, const Plan &plan, F f) {
    for (; round.first < plan.heads; round.first += round.count) {
        round.count = smaller(plan.round, plan.heads - round.first);
        f();
    }
    return FULMEN_OK;
}

constexpr double kForwardProducts = 1, kBackwardProducts = 2.5;  // for each query and key

// f(a plan, the round that fits the call)
template <class F>
int64_t with_round(const fulmen_gate_problem &p, double products, bool backward, F f) {
    const Plan plan(p, products);
    return with_element(p.q.dtype, [&](auto inputs) {
        if (p.round_factors) return f(plan, Round<decltype(inputs), decltype(inputs)>(plan, backward));
        return f(plan, Round<decltype(inputs), float>(plan, backward));
    });
}

}  // namespace

int64_t gate_forward_workspace(const fulmen_gate_forward_call &call) {
    return with_round(call.problem, kForwardProducts, false, [](auto &, auto round) { return round.bytes(); });
}

int64_t gate_backward_workspace(const fulmen_gate_backward_call &call) {
    return with_round(call.problem, kBackwardProducts, true, [](auto &, auto round) { return round.bytes(); });
}

int64_t gate_forward(const fulmen_gate_forward_call &call) {
    return with_round(call.problem, kForwardProducts, false, [&](const Plan &plan, auto round) {
        return for_each_round(round, plan, [&] {
            round.sum_keys();
            if (call.problem.kv.data) round.store_kv();
            round.answer_queries(call.output);
        });
    });
}

int64_t gate_backward(const fulmen_gate_backward_call &call) {
    return with_round(call.problem, kBackwardProducts, true, [&](const Plan &plan, auto round) {
        return for_each_round(round, plan, [&] {
            call.problem.kv.data ? round.load_kv() : round.sum_keys();
            round.differentiate_queries(call);
            round.differentiate_keys(call);
        });
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
