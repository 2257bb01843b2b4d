// The output gate, o = g (q kv) with kv = sum over the keys of k v^T, and its gradient:
//
//     dg = do (q kv)     dqkv = do g     dq = dqkv kv^T     dkv = sum over the queries of q dqkv^T
//     dk = v dkv^T       dv = k dkv
//
// Two walks over the tokens of a head, each way: one that sums a D x E matrix, and one that multiplies rows by such a
// matrix, which stays in the L2 cache. Rows are converted and packed once in each walk, and every result is written
// once. The tokens of few heads are cut into segments, whose sums are added up in order; how many depends on the call's
// sizes alone, so that bits do not depend on the number of threads.
#include "kernels.h"
#include "parallel.h"
#include "views.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

constexpr int64_t kRows = 32;                 // tokens packed at once
constexpr int64_t kTasks = 64;                // heads are cut into segments up to about this many tasks,
constexpr int64_t kShortestSegment = 512;     // of at least so many tokens

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

// The memory of one call: for each head of a round the sums of its segments and the transpose of a whole sum, and for
// each thread a chunk of rows of every operand.
struct Plan {
    const fulmen_gate_problem &p;
    Cut queries, keys;
    int64_t heads, round, threads;  // heads are taken in rounds, so that the workspace does not grow with them

    Plan(const fulmen_gate_problem &p, double products) : p(p), queries(p, p.queries), keys(p, p.keys) {
        heads = p.batch * p.heads;
        const double tokens = (double)heads * (double)(p.queries + p.keys);
        threads = worthwhile_threads(p.threads, 2 * products * tokens * (double)(p.key_features * p.value_features));
        round = smaller(heads, larger(kTasks, 4 * p.threads));
    }
    int64_t batch(int64_t head) const { return head / p.heads; }
    Rows rows(const fulmen_tensor &x, int64_t head) const { return rows_of(x, batch(head), head % p.heads); }
    int64_t matrix() const { return larger(panels_size(p.key_features, p.value_features),
                                           panels_size(p.value_features, p.key_features)); }
};

// A matrix for each segment of each head of a round; a head's own is its first segment's, once they are added up.
struct Sums {
    float *data;
    int64_t segments, matrix, stride;
    Sums(Arena &arena, const Plan &plan, int64_t segments)
        : data(arena.floats(plan.round * segments * plan.matrix())),
          segments(segments),
          matrix(plan.matrix()),
          stride(panel_stride(plan.p.key_features)) {}
    Panels operator()(int64_t head, int64_t segment) const { return {data + (head * segments + segment) * matrix, stride}; }
    Panels whole(int64_t head) const { return (*this)(head, 0); }
    void add_up(int64_t head) const {
        float *total = whole(head).data;
        for (int64_t s = 1; s < segments; ++s)
            for (int64_t i = 0; i < matrix; i += kLanes) store(total + i, load(total + i) + load((*this)(head, s).data + i));
    }
};

// kv^T or dkv^T, for each head of a round.
struct Transposes {
    float *data;
    int64_t matrix, stride, key_blocks, value_blocks;
    Transposes(Arena &arena, const Plan &plan, bool needed)
        : data(arena.floats(needed ? plan.round * plan.matrix() : 0)),
          matrix(plan.matrix()),
          stride(panel_stride(plan.p.value_features)),
          key_blocks(padded(plan.p.key_features) / kPanel),
          value_blocks(padded(plan.p.value_features) / kPanel) {}
    Panels operator()(int64_t head) const { return {data + head * matrix, stride}; }
    void fill(int64_t head, Panels from) const {
        for (int64_t d = 0; d < key_blocks; ++d)
            for (int64_t e = 0; e < value_blocks; ++e)
                transpose_block(from.panel(e) + d * kBlock, (*this)(head).panel(d) + e * kBlock);
    }
};

// Up to kRows tokens of one operand.
struct Chunk {
    Panels panels;
    int64_t features;
    Chunk(Arena &arena, int64_t features) : panels(arena.panels(kRows, features)), features(features) {}
    int64_t blocks() const { return padded(features) / kPanel; }
    float *panel(int64_t p) const { return panels.panel(p); }
    void load(Rows rows, int64_t first, int64_t count) const {
        for (int64_t r = 0; r < count; r += kPanel)
            pack(rows, first + r, smaller<int64_t>(kPanel, count - r), features, block(r));
    }
    void store(Rows rows, int64_t first, int64_t count) const {
        for (int64_t r = 0; r < count; r += kPanel)
            unpack(block(r), first + r, smaller<int64_t>(kPanel, count - r), features, rows);
    }
    Panels block(int64_t row) const { return {panels.data + row * kPanel, panels.stride}; }
};

int64_t row_blocks(int64_t count) { return (count + kPanel - 1) / kPanel; }

// Rows that are needed soon: the cache is asked for them share by share while a product is computed.
template <int Count> struct Soon {
    struct Tokens {
        Rows rows;
        int64_t features, first, count;
    } tokens[Count];
    FULMEN_MEMBER void ask(int64_t part, int64_t parts) const {
        for (const Tokens &x : tokens) prefetch(x.rows, x.first, x.count, x.features, part, parts);
    }
};

// result = left * right, for the rows of a chunk.
template <int Count>
void multiply_rows(const Chunk &result, const Chunk &left, Panels right, int64_t count, const Soon<Count> &soon) {
    for (int64_t p = 0; p < result.blocks(); ++p) {
        soon.ask(p, result.blocks());
        multiply(result.panel(p), row_blocks(count), Zero{}, Product<AsStored>{left.panels, right.panel(p), left.blocks()});
    }
}

// sum += left^T right, over the rows of two chunks.
template <int Count>
void add_outer(Panels sum, const Chunk &left, const Chunk &right, int64_t count, const Soon<Count> &soon) {
    for (int64_t p = 0; p < right.blocks(); ++p) {
        soon.ask(p, right.blocks());
        multiply(sum.panel(p), left.blocks(), Add{}, Product<Transposed>{left.panels, right.panel(p), row_blocks(count)});
    }
}

// result = a * b, element by element; result may be either.
void multiply_elements(const Chunk &result, const Chunk &a, const Chunk &b, int64_t count) {
    for (int64_t p = 0; p < result.blocks(); ++p)
        for (int64_t x = 0; x < row_blocks(count) * kBlock; x += kLanes)
            store(result.panel(p) + x, load(a.panel(p) + x) * load(b.panel(p) + x));
}

void clear(Panels sum, const Plan &plan) { memset(sum.data, 0, 4 * (size_t)plan.matrix()); }

// f(first token, count, count of the next chunk) for the chunks of a segment.
template <class F> void for_each_chunk(Segment segment, F f) {
    for (int64_t t = segment.first; t < segment.last; t += kRows)
        f(t, smaller(kRows, segment.last - t), smaller(kRows, segment.last - t - kRows));
}

// ---- the walks ----

// The keys, for kv.
struct KeySum {
    Chunk k, v;
    KeySum(Arena &arena, const fulmen_gate_problem &p) : k(arena, p.key_features), v(arena, p.value_features) {}
    void walk(const Plan &plan, int64_t head, Segment segment, Panels kv) const {
        const Rows keys = plan.rows(plan.p.k, head), values = plan.rows(plan.p.v, head);
        clear(kv, plan);
        for_each_chunk(segment, [&](int64_t t, int64_t count, int64_t next) {
            k.load(keys, t, count);
            v.load(values, t, count);
            add_outer(kv, k, v, count,
                      Soon<2>{{{keys, k.features, t + kRows, next}, {values, v.features, t + kRows, next}}});
        });
    }
};

// The queries, for the output.
struct Answer {
    Chunk q, g, o;
    Answer(Arena &arena, const fulmen_gate_problem &p)
        : q(arena, p.key_features), g(arena, p.value_features), o(arena, p.value_features) {}
    void walk(const Plan &plan, const fulmen_tensor &output, int64_t head, Segment segment, Panels kv) const {
        const Rows queries = plan.rows(plan.p.q, head), gates = plan.rows(plan.p.g, head);
        const Rows kept = plan.rows(plan.p.qkv, head), results = plan.rows(output, head);
        for_each_chunk(segment, [&](int64_t t, int64_t count, int64_t next) {
            q.load(queries, t, count);
            multiply_rows(o, q, kv, count,
                          Soon<4>{{{gates, g.features, t, count},
                                   {results, o.features, t, count},
                                   {kept, o.features, t, count},
                                   {queries, q.features, t + kRows, next}}});
            if (kept.present()) o.store(kept, t, count);
            g.load(gates, t, count);
            multiply_elements(o, o, g, count);
            o.store(results, t, count);
        });
    }
};

// The queries, for dg, dq and dkv. kv is read only where q kv was not kept.
struct QueryGradient {
    Chunk q, dq, g, grad, qkv;
    QueryGradient(Arena &arena, const fulmen_gate_problem &p)
        : q(arena, p.key_features),
          dq(arena, p.key_features),
          g(arena, p.value_features),
          grad(arena, p.value_features),
          qkv(arena, p.value_features) {}
    void walk(const Plan &plan, const fulmen_gate_backward_call &call, int64_t head, Segment segment, Panels kv,
              Panels kv_transposed, Panels dkv) const {
        const Rows queries = plan.rows(plan.p.q, head), gates = plan.rows(plan.p.g, head);
        const Rows kept = plan.rows(plan.p.qkv, head), grads = plan.rows(call.grad_output, head);
        const Rows dqs = plan.rows(call.dq, head), dgs = plan.rows(call.dg, head);
        clear(dkv, plan);
        for_each_chunk(segment, [&](int64_t t, int64_t count, int64_t next) {
            q.load(queries, t, count);
            grad.load(grads, t, count);
            if (kept.present())
                qkv.load(kept, t, count);
            else
                multiply_rows(qkv, q, kv, count, Soon<1>{{{dgs, g.features, t, count}}});
            multiply_elements(qkv, grad, qkv, count);
            qkv.store(dgs, t, count);
            g.load(gates, t, count);
            multiply_elements(g, grad, g, count);
            multiply_rows(dq, g, kv_transposed, count,
                          Soon<3>{{{dqs, q.features, t, count},
                                   {queries, q.features, t + kRows, next},
                                   {grads, g.features, t + kRows, next}}});
            dq.store(dqs, t, count);
            add_outer(dkv, q, g, count,
                      Soon<3>{{{dgs, g.features, t + kRows, next},
                               {gates, g.features, t + kRows, next},
                               {kept, g.features, t + kRows, next}}});
        });
    }
};

// The keys, for dk and dv.
struct KeyGradient {
    Chunk k, v, dk, dv;
    KeyGradient(Arena &arena, const fulmen_gate_problem &p)
        : k(arena, p.key_features),
          v(arena, p.value_features),
          dk(arena, p.key_features),
          dv(arena, p.value_features) {}
    void walk(const Plan &plan, const fulmen_gate_backward_call &call, int64_t head, Segment segment, Panels dkv,
              Panels dkv_transposed) const {
        const Rows keys = plan.rows(plan.p.k, head), values = plan.rows(plan.p.v, head);
        const Rows dks = plan.rows(call.dk, head), dvs = plan.rows(call.dv, head);
        for_each_chunk(segment, [&](int64_t t, int64_t count, int64_t next) {
            k.load(keys, t, count);
            v.load(values, t, count);
            multiply_rows(dk, v, dkv_transposed, count,
                          Soon<2>{{{dks, k.features, t, count}, {keys, k.features, t + kRows, next}}});
            dk.store(dks, t, count);
            multiply_rows(dv, k, dkv, count,
                          Soon<2>{{{dvs, v.features, t, count}, {values, v.features, t + kRows, next}}});
            dv.store(dvs, t, count);
        });
    }
};

// ---- a call ----

// Bytes of chunks that a thread needs: those of the walk with the most operands.
int64_t chunk_bytes(const fulmen_gate_problem &p) {
    Arena counting(nullptr);
    QueryGradient(counting, p);
    return counting.bytes();
}

// What one round of heads has in memory, with or without what only the backward needs.
struct Round {
    const Plan &plan;
    Arena arena;
    Sums kv, dkv;
    Transposes transposed;
    int64_t first = 0, count = 0;

    Round(const Plan &plan, bool backward)
        : plan(plan),
          arena(plan.p.workspace),
          kv(arena, plan, plan.keys.count),
          dkv(arena, plan, backward ? plan.queries.count : 0),
          transposed(arena, plan, backward) {}
    int64_t bytes() const { return arena.bytes() + plan.threads * chunk_bytes(plan.p); }

    // f(walk, head of the round, segment) for all of them at once.
    template <class Walk, class F> void walk(const Cut &cut, F f) const {
        const int64_t bytes = chunk_bytes(plan.p);
        parallel_for(plan.threads, count * cut.count, [&](int64_t task, int64_t worker) {
            Arena chunks((char *)plan.p.workspace + arena.bytes() + worker * bytes);
            f(Walk(chunks, plan.p), task / cut.count, task % cut.count);
        });
    }
    template <class F> void for_each_head(F f) const {
        parallel_for(plan.threads, count, [&](int64_t head, int64_t) { f(head); });
    }
    Matrix caller_kv(int64_t head) const {
        return matrix_of(plan.p.kv, plan.batch(first + head), (first + head) % plan.p.heads);
    }

    void sum_keys() const {
        walk<KeySum>(plan.keys, [&](const KeySum &sum, int64_t head, int64_t s) {
            sum.walk(plan, first + head, plan.keys[s], kv(head, s));
        });
    }
    void answer(const fulmen_tensor &output) const {
        for_each_head([&](int64_t head) {
            kv.add_up(head);
            if (caller_kv(head).present())
                store_state(kv.whole(head), plan.p.key_features, plan.p.value_features, caller_kv(head));
        });
        walk<Answer>(plan.queries, [&](const Answer &x, int64_t head, int64_t s) {
            x.walk(plan, output, first + head, plan.queries[s], kv.whole(head));
        });
    }
    void differentiate(const fulmen_gate_backward_call &call) const {
        for_each_head([&](int64_t head) {
            if (caller_kv(head).present())
                load_state(caller_kv(head), plan.p.key_features, plan.p.value_features, kv.whole(head));
            else
                kv.add_up(head);
            transposed.fill(head, kv.whole(head));
        });
        walk<QueryGradient>(plan.queries, [&](const QueryGradient &x, int64_t head, int64_t s) {
            x.walk(plan, call, first + head, plan.queries[s], kv.whole(head), transposed(head), dkv(head, s));
        });
        for_each_head([&](int64_t head) {
            dkv.add_up(head);
            transposed.fill(head, dkv.whole(head));
        });
        walk<KeyGradient>(plan.keys, [&](const KeyGradient &x, int64_t head, int64_t s) {
            x.walk(plan, call, first + head, plan.keys[s], dkv.whole(head), transposed(head));
        });
    }
};

template <class F> int64_t for_each_round(Round round, F f) {
    const Plan &plan = round.plan;
    for (; round.first < plan.heads; round.first += round.count) {
        round.count = smaller(plan.round, plan.heads - round.first);
        f(round);
    }
    return FULMEN_OK;
}

constexpr double kForwardProducts = 1, kBackwardProducts = 2.5;  // for each query and key

}  // namespace

int64_t gate_forward_workspace(const fulmen_gate_forward_call &call) {
    return Round(Plan(call.problem, kForwardProducts), false).bytes();
}

int64_t gate_backward_workspace(const fulmen_gate_backward_call &call) {
    return Round(Plan(call.problem, kBackwardProducts), true).bytes();
}

int64_t gate_forward(const fulmen_gate_forward_call &call) {
    const Plan plan(call.problem, kForwardProducts);
    return for_each_round(Round(plan, false), [&](const Round &round) {
        round.sum_keys();
        round.answer(call.output);
    });
}

int64_t gate_backward(const fulmen_gate_backward_call &call) {
    const Plan plan(call.problem, kBackwardProducts);
    return for_each_round(Round(plan, true), [&](const Round &round) {
        if (!call.problem.kv.data) round.sum_keys();
        round.differentiate(call);
    });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
