// Tensor-product attention of one token: softmax over keys and values that exist only as factors.
//
//     scores[m, h] = sum over key ranks of ak[m, h] * ((bk[m] bq^T) aq^T)[h]
//     o[h, :]      = sum over m and value ranks of softmax(scores)[m, h] * av[m, h] * bv[m, :]
//
// Heads stand in the lanes of vectors, tokens in rows: so do ak and av in memory, and the softmax is lane by lane.
// A sample is always cut into the same slices of tokens, and the slices are merged in their order, whoever computes
// them: bits depend neither on the split nor on the threads.
#include "kernels.h"
#include "parallel.h"
#include "views.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

constexpr int64_t kRows = 64;    // tokens at a time
constexpr int64_t kSlice = 512;  // tokens

FULMEN_INLINE int64_t blocks(int64_t n) { return (n + kPanel - 1) / kPanel; }

// What exponents are taken from: the largest score, or 0 where every score so far is -inf.
FULMEN_INLINE Vec origin(Vec maximum) { return select(maximum == -__builtin_inff(), Vec{}, maximum); }

// Softmax over some of the tokens: with weights e^(score - maximum), their sum and the weighed sum of the values.
struct Partial {
    Panels output;                  // heads x value features
    float *maximum, *sum, *weight;  // one per head; `weight` is what the tokens so far weigh beside new ones
    int64_t heads, columns;         // padded

    Partial(Arena &arena, int64_t active_heads, int64_t features)
        : output(arena.panels(active_heads, features)),
          maximum(arena.floats(padded(active_heads))),
          sum(arena.floats(padded(active_heads))),
          weight(arena.floats(padded(active_heads))),
          heads(padded(active_heads)),
          columns(padded(features)) {}

    void clear() {
        for (int64_t p = 0; p * kPanel < columns; ++p)
            for (int64_t x = 0; x < heads * kPanel; x += kLanes) store(output.panel(p) + x, Vec{});
        for (int64_t h = 0; h < heads; h += kLanes) {
            store(maximum + h, broadcast(-__builtin_inff()));
            store(sum + h, Vec{});
        }
    }

    // Adds the tokens of another one, whose own `weight` becomes what it weighs here.
    void merge(Partial &other) {
        for (int64_t h = 0; h < heads; h += kLanes) {
            const Vec a = load(maximum + h), b = load(other.maximum + h), from = origin(larger(a, b));
            const Vec own = exp_of_negative(a - from), added = exp_of_negative(b - from);
            store(maximum + h, larger(a, b));
            store(sum + h, load(sum + h) * own + load(other.sum + h) * added);
            store(weight + h, own);
            store(other.weight + h, added);
        }
        for (int64_t p = 0; p * kPanel < columns; ++p)
            for (int64_t x = 0; x < heads * kPanel; x += kLanes) {
                const int64_t h = x / kPanel;
                float *to = output.panel(p) + x;
                store(to, load(to) * weight[h] + load(other.output.panel(p) + x) * other.weight[h]);
            }
    }

    // Divides by the sum of the weights; no tokens give zeros.
    void normalise(int64_t value_rank) {
        for (int64_t h = 0; h < heads; ++h) weight[h] = sum[h] == 0 ? 0.0f : 1.0f / (sum[h] * (float)value_rank);
        for (int64_t p = 0; p * kPanel < columns; ++p)
            for (int64_t x = 0; x < heads * kPanel; x += kLanes) {
                float *to = output.panel(p) + x;
                store(to, load(to) * weight[x / kPanel]);
            }
    }
};

// Rows that are one head or rank apart.
Rows ranks_of(const fulmen_tensor &x, int64_t batch, int64_t head) {
    Rows rows = rows_of(x, batch, head);
    rows.stride = x.stride_head;
    return rows;
}

// One worker: the query of one sample and some heads, and memory for a few tokens.
class Decoder {
public:
    Decoder(Arena &arena, const fulmen_tpa_decode_call &call, int64_t heads)
        : call(call),
          heads(heads),
          direct(multiplications(true) < multiplications(false)),
          bq(arena.panels(call.key_features, call.query_rank)),
          aq(arena.panels(call.query_rank, heads)),
          q(direct ? arena.panels(call.key_features, heads) : Panels{}),
          features(arena.panels(kRows, larger(call.key_features, call.value_features))),
          of_ranks(arena.panels(kRows, call.query_rank)),
          weights(arena.panels(kRows, heads)),
          of_heads(call.key_rank > 1 ? arena.panels(kRows, heads) : weights),
          factor(arena.panels(kRows, heads)) {}

    // The query's factors, transposed, and where the keys and values of this sample and these heads are.
    void begin(int64_t batch, int64_t first_head, int64_t active_heads) {
        active = active_heads;
        ak = rows_of(call.ak, batch, first_head);
        av = rows_of(call.av, batch, first_head);
        bk = rows_of(call.bk, batch, 0);
        bv = rows_of(call.bv, batch, 0);
        const Rows bq_rows = ranks_of(call.bq, batch, 0), aq_rows = ranks_of(call.aq, batch, first_head);
        for (int64_t r = 0; r < call.query_rank; r += kPanel) {
            pack(bq_rows, r, smaller<int64_t>(kPanel, call.query_rank - r), call.key_features, features);
            transpose(features, call.key_features, bq.panel(r / kPanel));
        }
        // The scale and the mean over ranks go into the smallest factor.
        const float scale = (float)(call.scale / (double)(call.query_rank * call.key_rank));
        for (int64_t h = 0; h < heads; h += kPanel) {
            pack(aq_rows, h, larger<int64_t>(0, smaller<int64_t>(kPanel, active - h)), call.query_rank, of_ranks);
            float *panel = aq.panel(h / kPanel);
            transpose(of_ranks, call.query_rank, panel);
            for (int64_t x = 0; x < padded(call.query_rank) * kPanel; x += kLanes)
                store(panel + x, load(panel + x) * scale);
            if (direct)
                multiply(q.panel(h / kPanel), blocks(call.key_features), Zero(),
                         Product<AsStored>{bq, panel, blocks(call.query_rank)});
        }
    }

    // The softmax over tokens [first, last).
    void attend(int64_t first, int64_t last, Partial &result) {
        result.clear();
        for (int64_t t = first; t < last; t += kRows) {
            const int64_t count = smaller(kRows, last - t);
            score(t, count);
            weigh(count, result);
            collect(t, count, smaller(kRows, last - t - count), result);
        }
    }

private:
    const fulmen_tpa_decode_call &call;
    const int64_t heads;
    // Whether to form q: worth it when there are few heads for many ranks.
    const bool direct;
    Panels bq, aq, q;  // transposed: D x R, R x H, D x H
    Panels features, of_ranks, weights, of_heads, factor;
    int64_t active = 0;
    Rows ak, av, bk, bv;

    // For each token.
    int64_t multiplications(bool directly) const {
        const int64_t d = padded(call.key_features), r = padded(call.query_rank), h = padded(call.heads);
        return directly ? d * h : d * r + r * h;
    }

    void pack_rows(Rows rows, int64_t first, int64_t count, int64_t width, Panels to) const {
        for (int64_t r = 0; r < count; r += kPanel)
            pack(rows, first + r, smaller<int64_t>(kPanel, count - r), width, {to.data + r * kPanel, to.stride});
    }

    // One rank of ak or av: a number for each token and head.
    void pack_heads(Rows rows, int64_t stride_head, int64_t first, int64_t count, Panels to) const {
        if (stride_head == 1) return pack_rows(rows, first, count, active, to);
        with_type(rows.dtype, [&](auto type) {
            typedef typename decltype(type)::Stored Stored;
            for (int64_t r = 0; r < blocks(count) * kPanel; ++r)
                for (int64_t h = 0; h < heads; h += kPanel) {
                    Stored values[kPanel] = {};
                    const Stored *row = (const Stored *)rows.row(first + r);
                    for (int64_t l = 0; r < count && l < kPanel && h + l < active; ++l)
                        values[l] = row[(h + l) * stride_head];
                    for (int v = 0; v < kPanel; v += kLanes)
                        store(to.panel(h / kPanel) + r * kPanel + v, load_as(type, values + v));
                }
        });
    }

    void score(int64_t first, int64_t count) {
        const int64_t rows = blocks(count);
        for (int64_t rank = 0; rank < call.key_rank; ++rank) {
            pack_rows(bk.from(0, rank * call.bk.stride_head), first, count, call.key_features, features);
            pack_heads(ak.from(0, rank), call.ak.stride_head, first, count, factor);
            if (!direct)
                for (int64_t p = 0; p < blocks(call.query_rank); ++p)
                    multiply(of_ranks.panel(p), rows, Zero(),
                             Product<AsStored>{features, bq.panel(p), blocks(call.key_features)});
            for (int64_t p = 0; p < blocks(heads); ++p) {
                if (direct)
                    multiply(of_heads.panel(p), rows, Zero(),
                             Product<AsStored>{features, q.panel(p), blocks(call.key_features)});
                else
                    multiply(of_heads.panel(p), rows, Zero(),
                             Product<AsStored>{of_ranks, aq.panel(p), blocks(call.query_rank)});
                for (int64_t x = 0; x < rows * kBlock; x += kLanes) {
                    float *scores = weights.panel(p) + x;
                    const Vec term = load(of_heads.panel(p) + x) * load(factor.panel(p) + x);
                    store(scores, rank == 0 ? term : load(scores) + term);
                }
            }
        }
    }

    // Scores become weights e^(score - maximum).
    void weigh(int64_t count, Partial &result) {
        for (int64_t p = 0; p < blocks(heads); ++p)
            for (int c = 0; c < kPanel; c += kLanes) {
                float *column = weights.panel(p) + c;
                const int64_t h = p * kPanel + c;
                const Vec before = load(result.maximum + h);
                Vec maximum = before;
                for (int64_t r = 0; r < count; ++r) maximum = larger(maximum, load(column + r * kPanel));
                const Vec from = origin(maximum);
                const Vec kept = exp_of_negative(before - from);
                Vec sum = load(result.sum + h) * kept;
                for (int64_t r = 0; r < count; ++r) {
                    const Vec weight = exp_of_negative(load(column + r * kPanel) - from);
                    store(column + r * kPanel, weight);
                    sum += weight;
                }
                for (int64_t r = count; r < blocks(count) * kPanel; ++r) store(column + r * kPanel, Vec{});
                store(result.maximum + h, maximum);
                store(result.sum + h, sum);
                store(result.weight + h, kept);
            }
    }

    // Asks for share `part` of some tokens' factors, whose ranks stand side by side.
    void expect(int64_t first, int64_t count, int64_t part, int64_t parts) const {
        prefetch(bk, first, count, call.key_rank * call.key_features, part, parts);
        prefetch(bv, first, count, call.value_rank * call.value_features, part, parts);
        prefetch(ak, first, count, call.key_rank * active, part, parts);
        prefetch(av, first, count, call.value_rank * active, part, parts);
    }

    void collect(int64_t first, int64_t count, int64_t next_count, Partial &result) {
        for (int64_t rank = 0; rank < call.value_rank; ++rank) {
            pack_heads(av.from(0, rank), call.av.stride_head, first, count, factor);
            for (int64_t p = 0; p < blocks(heads); ++p)
                for (int64_t x = 0; x < blocks(count) * kBlock; x += kLanes) {
                    float *value = factor.panel(p) + x;
                    store(value, load(value) * load(weights.panel(p) + x));
                }
            const Rows rows = bv.from(0, rank * call.bv.stride_head);
            const int64_t expected = rank == 0 ? next_count : 0;
            // Whole blocks of float32 are read where they are.
            if (rows.dtype == FULMEN_FLOAT32 && count % kPanel == 0 && call.value_features % kPanel == 0) {
                const float *values = (const float *)rows.row(first);
                add(rank, first, count, expected, result,
                    [&](int64_t p) { return Columns{values + p * kPanel, rows.stride}; });
            } else {
                pack_rows(rows, first, count, call.value_features, features);
                add(rank, first, count, expected, result, [&](int64_t p) { return Panel(features.panel(p)); });
            }
        }
    }

    // Adds the weighed values of one rank, and meanwhile asks for the tokens that come next.
    template <class Values>
    void add(int64_t rank, int64_t first, int64_t count, int64_t next_count, Partial &result, Values values) const {
        const int64_t tiles = blocks(call.value_features) * blocks(heads);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t p = tile / blocks(heads), head_block = tile % blocks(heads);
            const Product<Transposed, decltype(values(p))> product{factor, values(p), blocks(count)};
            expect(first + count, next_count, tile, tiles);
            if (rank == 0)
                multiply_block<0, 0>(result.output.panel(p), head_block, Scale{result.weight, nullptr}, product);
            else
                multiply_block<0, 0>(result.output.panel(p), head_block, Add(), product);
        }
    }
};

// How a call is cut into tasks: samples, and either groups of heads or slices of tokens.
struct Plan {
    int64_t threads, split, group, groups, kept_slices;
    Plan(const fulmen_tpa_decode_call &c) {
        const double flops = 2.0 * (double)c.batch * (double)c.tokens *
                             (double)(c.key_rank * c.query_rank * (c.key_features + c.heads) +
                                      c.value_rank * c.heads * c.value_features);
        const int64_t slices = (c.tokens + kSlice - 1) / kSlice;
        threads = smaller(c.threads, 1 + (int64_t)smaller(1e6, flops / 2e6));  // waking one costs more than less work
        split = c.split;
        if (split == FULMEN_SPLIT_AUTO)
            split = threads == 1 || c.batch >= 4 * threads ? FULMEN_SPLIT_BATCH
                    : slices > 1                           ? FULMEN_SPLIT_SEQUENCE
                                                           : FULMEN_SPLIT_HEAD;
        group = split == FULMEN_SPLIT_HEAD ? smaller<int64_t>(kPanel, c.heads) : c.heads;
        groups = (c.heads + group - 1) / group;
        kept_slices = split == FULMEN_SPLIT_SEQUENCE ? slices : 0;
        threads = larger<int64_t>(1, smaller(threads, c.batch * larger(groups, kept_slices)));
    }
};

// What a worker has: its tools, and the partial results of one slice and of all so far.
struct Desk {
    Decoder decoder;
    Partial total, part;
    Desk(Arena &arena, const fulmen_tpa_decode_call &call, const Plan &plan)
        : decoder(arena, call, plan.group),
          total(arena, plan.group, call.value_features),
          part(arena, plan.group, call.value_features) {}
};

int64_t desk_bytes(const fulmen_tpa_decode_call &call, const Plan &plan) {
    Arena counting(nullptr);
    Desk(counting, call, plan);
    return counting.bytes();
}

int64_t partial_bytes(const fulmen_tpa_decode_call &call) {
    Arena counting(nullptr);
    Partial(counting, call.heads, call.value_features);
    return counting.bytes();
}

void write(Partial &result, const fulmen_tpa_decode_call &call, int64_t batch, int64_t head, int64_t heads) {
    result.normalise(call.value_rank);
    unpack(result.output, 0, heads, call.value_features, ranks_of(call.output, batch, head));
}

}  // namespace

int64_t tpa_decode_workspace(const fulmen_tpa_decode_call &call) {
    const Plan plan(call);
    return plan.threads * desk_bytes(call, plan) + call.batch * plan.kept_slices * partial_bytes(call);
}

int64_t tpa_decode(const fulmen_tpa_decode_call &call) {
    const Plan plan(call);
    const int64_t per_worker = desk_bytes(call, plan), per_slice = partial_bytes(call), kept = plan.kept_slices;
    char *slices = (char *)call.workspace + plan.threads * per_worker;
    auto length_of = [&](int64_t batch) { return call.lengths ? call.lengths[batch] : call.tokens; };
    auto desk_of = [&](int64_t worker) {
        Arena arena((char *)call.workspace + worker * per_worker);
        return Desk(arena, call, plan);
    };
    auto slice_of = [&](int64_t batch, int64_t slice) {
        Arena arena(slices + (batch * kept + slice) * per_slice);
        return Partial(arena, call.heads, call.value_features);
    };

    if (plan.split != FULMEN_SPLIT_SEQUENCE) {
        parallel_for(plan.threads, call.batch * plan.groups, [&](int64_t index, int64_t worker) {
            const int64_t batch = index / plan.groups, head = index % plan.groups * plan.group;
            const int64_t heads = smaller(plan.group, call.heads - head), length = length_of(batch);
            Desk desk = desk_of(worker);
            desk.decoder.begin(batch, head, heads);
            desk.total.clear();
            for (int64_t t = 0; t < length; t += kSlice) {
                desk.decoder.attend(t, smaller(length, t + kSlice), desk.part);
                desk.total.merge(desk.part);
            }
            write(desk.total, call, batch, head, heads);
        });
        return FULMEN_OK;
    }

    parallel_for(plan.threads, call.batch * kept, [&](int64_t index, int64_t worker) {
        const int64_t batch = index / kept, first = index % kept * kSlice, length = length_of(batch);
        if (first >= length) return;
        Desk desk = desk_of(worker);
        desk.decoder.begin(batch, 0, call.heads);
        Partial part = slice_of(batch, index % kept);
        desk.decoder.attend(first, smaller(length, first + kSlice), part);
    });
    parallel_for(plan.threads, call.batch, [&](int64_t batch, int64_t worker) {
        Desk desk = desk_of(worker);
        desk.total.clear();
        for (int64_t t = 0; t < length_of(batch); t += kSlice) {
            Partial part = slice_of(batch, t / kSlice);
            desk.total.merge(part);
        }
        write(desk.total, call, batch, 0, call.heads);
    });
    return FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
