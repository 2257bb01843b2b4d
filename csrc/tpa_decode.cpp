// Tensor-product attention of one token: softmax over keys and values that exist only as factors.
//
//     scores[m, h] = sum over key ranks of ak[m, h] * ((bk[m] bq^T) aq^T)[h]
//     o[h, :]      = sum over m and value ranks of softmax(scores)[m, h] * av[m, h] * bv[m, :]
//
// Heads stand in the lanes of vectors, tokens in rows: so do ak and av in memory, and the softmax is lane by lane.
// A sample is always cut into the same slices of tokens, and the slices are merged in their order, whoever computes
// them: bits depend neither on the split nor on the threads.
#include "kernels.h"
#include "operand.h"
#include "parallel.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

constexpr int64_t kTokens = 64;   // at a time
constexpr int64_t kColumns = 64;  // of values packed at a time
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

// Whether to form q: worth it when there are few heads for many ranks. It would have to be rounded to be multiplied in
// pairs, and its factors not.
bool forms_query(const fulmen_tpa_decode_call &call) {
    const int64_t d = padded(call.key_features), r = padded(call.query_rank), h = padded(call.heads);
    const int64_t at_once = kPairs && call.bk.dtype == FULMEN_BFLOAT16 ? 2 : 1;
    return d * h < d * r / at_once + r * h;
}

// Whether rows can be multiplied where they are: they are made of Elements, and need no padding.
template <class Element> bool in_place(Rows rows, int64_t features) {
    return rows.element_bytes() * kNumbers<Element> == 4 && features % (kPanel * kNumbers<Element>) == 0 &&
           rows.stride % kNumbers<Element> == 0 && (uintptr_t)rows.data % 4 == 0;
}

// One worker: the query of one sample and some heads, and memory for a few tokens. Elements are what keys and values are
// multiplied as. Pairs hold factors as they are, and of a weight what rounding it leaves, unless the caller does without.
template <class Element> class Decoder {
public:
    Decoder(Arena &arena, const fulmen_tpa_decode_call &call, int64_t heads)
        : call(call),
          heads(heads),
          direct(forms_query(call)),
          bq(arena.panels<Element>(elements<Element>(call.key_features), call.query_rank)),
          aq(arena.panels(call.query_rank, heads)),
          q(direct ? arena.panels<Element>(elements<Element>(call.key_features), heads) : bq),
          keys(arena, kPanel, call.key_features, Use{true, false}),
          of_query(arena.panels(kPanel, larger(heads, call.query_rank))),
          of_heads(direct ? of_query : arena.panels(kPanel, heads)),
          maximum(arena.floats(padded(heads))),
          scores(arena.panels(kTokens, heads)),
          weights(arena.panels<Element>(elements<Element>(kTokens), heads)),
          rests(has_rests() ? arena.panels<Element>(elements<Element>(kTokens), heads) : weights),
          values(arena.floats(panels_size(elements<Element>(kTokens), kColumns))) {}

    // The query's factors, transposed, and where the keys and values of this sample and these heads are.
    void begin(int64_t batch, int64_t first_head, int64_t active_heads) {
        active = active_heads;
        ak = rows_of(call.ak, batch, first_head);
        av = rows_of(call.av, batch, first_head);
        bk = rows_of(call.bk, batch, 0);
        bv = rows_of(call.bv, batch, 0);
        const Rows bq_rows = ranks_of(call.bq, batch, 0), aq_rows = ranks_of(call.aq, batch, first_head);
        for (int64_t r = 0; r < call.query_rank; r += kPanel) {
            keys.load(bq_rows.from(r, 0), smaller<int64_t>(kPanel, call.query_rank - r));
            transpose(keys.over_features(), elements<Element>(call.key_features), bq.panel(r / kPanel));
        }
        // The scale and the mean over ranks go into the smallest factor.
        const float scale = (float)(call.scale / (double)(call.query_rank * call.key_rank));
        for (int64_t h = 0; h < heads; h += kPanel) {
            pack(aq_rows, h, larger<int64_t>(0, smaller<int64_t>(kPanel, active - h)), call.query_rank, of_query);
            float *panel = aq.panel(h / kPanel);
            transpose(of_query, call.query_rank, panel);
            for (int64_t x = 0; x < padded(call.query_rank) * kPanel; x += kLanes)
                store(panel + x, load(panel + x) * scale);
            if constexpr (kNumbers<Element> == 1)
                if (direct)
                    multiply(q.panel(h / kPanel), blocks(call.key_features), Zero(),
                             Product<AsStored>{bq, panel, blocks(call.query_rank)});
        }
    }

    // The softmax over tokens [first, last); this worker goes on to `end`.
    void attend(int64_t first, int64_t last, int64_t end, Partial &result) {
        result.clear();
        for (int64_t t = first; t < last; t += kTokens) {
            const int64_t count = smaller(kTokens, last - t);
            const int64_t steps = depth_blocks<Element>(count) * blocks(call.value_features) * blocks(heads);
            asked = t + count;
            asked_last = smaller(end, asked + kTokens);
            asked_at_once = (kTokens + steps - 1) / steps;
            for (int64_t h = 0; h < heads; h += kLanes) store(maximum + h, load(result.maximum + h));
            for (int64_t r = 0; r < count; r += kPanel) score(t, r, smaller<int64_t>(kPanel, count - r));
            weigh(count, result);
            for (int64_t rank = 0; rank < call.value_rank; ++rank) collect(rank, t, count, result);
        }
    }

private:
    const fulmen_tpa_decode_call &call;
    const int64_t heads;
    const bool direct;
    const PanelsOf<Element> bq;  // transposed: D x R
    const Panels aq;             // transposed: R x H
    const PanelsOf<Element> q;   // transposed: D x H, or bq if q is not formed
    const Operand<Element> keys;
    const Panels of_query, of_heads;
    float *const maximum;
    const Panels scores;
    const PanelsOf<Element> weights, rests;
    float *const values;
    int64_t active = 0;
    Rows ak, av, bk, bv;
    int64_t asked = 0, asked_last = 0, asked_at_once = 0;  // tokens

    bool has_rests() const { return kNumbers<Element> > 1 && !call.round_weights; }

    // Asks for the factors of a few of the next tokens, whose ranks stand side by side.
    struct Asking {
        Decoder *decoder;
        FULMEN_MEMBER void operator()() const { decoder->ask(); }
    };
    FULMEN_MEMBER void ask() {
        for (int64_t last = smaller(asked_last, asked + asked_at_once); asked < last; ++asked) {
            prefetch(bk, asked, 1, call.key_rank * call.key_features, 0, 1);
            prefetch(bv, asked, 1, call.value_rank * call.value_features, 0, 1);
            prefetch(ak, asked, 1, call.key_rank * active, 0, 1);
            prefetch(av, asked, 1, call.value_rank * active, 0, 1);
        }
    }

    // Calls f with factor(r, h): kLanes heads of row r of one rank of ak or av.
    template <class F> FULMEN_MEMBER void with_heads(Rows rows, int64_t stride_head, F f) const {
        with_type(rows.dtype, [&](auto type) {
            typedef typename decltype(type)::Stored Stored;
            if (stride_head == 1)
                f([&](int64_t r, int64_t h) { return load_some(type, (const Stored *)rows.row(r) + h, active - h); });
            else
                f([&](int64_t r, int64_t h) {
                    Stored some[kLanes] = {};
                    for (int64_t l = 0; l < kLanes && h + l < active; ++l)
                        some[l] = ((const Stored *)rows.row(r))[(h + l) * stride_head];
                    return load_as(type, some);
                });
        });
    }

    // The scores of up to 16 tokens, and what is now the largest.
    void score(int64_t first, int64_t row, int64_t count) {
        for (int64_t rank = 0; rank < call.key_rank; ++rank) {
            const Rows rows = bk.from(first + row, rank * call.bk.stride_head);
            if (count == kPanel && in_place<Element>(rows, call.key_features)) {
                multiply_keys(InPlaceOf<Element>{(const Element *)rows.data, rows.stride / kNumbers<Element>});
            } else {
                keys.load(rows, count);
                multiply_keys(AsStoredOf<Element>(keys.over_features()));
            }
            if (!direct)
                for (int64_t p = 0; p < blocks(heads); ++p)
                    multiply(of_heads.panel(p), 1, Zero(),
                             Product<AsStored>{of_query, aq.panel(p), blocks(call.query_rank)});
            with_heads(ak.from(first + row, rank), call.ak.stride_head, [&](auto factor) {
                for (int64_t h = 0; h < heads; h += kLanes) {
                    const float *products = of_heads.at(0, h);
                    float *column = scores.at(row, h);
                    Vec largest = load(maximum + h);
                    for (int64_t r = 0; r < count; ++r) {
                        Vec score = load(products + r * kPanel) * factor(r, h);
                        if (rank > 0) score += load(column + r * kPanel);
                        store(column + r * kPanel, score);
                        largest = larger(largest, score);
                    }
                    if (rank + 1 == call.key_rank) store(maximum + h, largest);
                }
            });
        }
    }

    template <class Left> void multiply_keys(Left left) const {
        for (int64_t p = 0; p < blocks(direct ? heads : call.query_rank); ++p)
            multiply_apart(of_query.panel(p), 0, Zero(),
                           Product<Left>{left, q.panel(p), depth_blocks<Element>(call.key_features)});
    }

    // Scores become weights e^(score - maximum).
    void weigh(int64_t count, Partial &result) const {
        for (int64_t h = 0; h < heads; h += kLanes) {
            float *column = scores.at(0, h);
            const Vec from = origin(load(maximum + h));
            const Vec kept = exp_of_negative(load(result.maximum + h) - from);
            Vec sum = load(result.sum + h) * kept;
            for (int64_t r = 0; r < count; ++r) {
                const Vec weight = exp_of_negative(load(column + r * kPanel) - from);
                store(column + r * kPanel, weight);
                sum += weight;
            }
            store(result.maximum + h, load(maximum + h));
            store(result.sum + h, sum);
            store(result.weight + h, kept);
        }
    }

    // Adds the weighed values of one rank.
    void collect(int64_t rank, int64_t first, int64_t count, Partial &result) {
        const int64_t depth = depth_blocks<Element>(count);
        with_heads(av.from(first, rank), call.av.stride_head, [&](auto factor) {
            auto weight = [&](int64_t r, int64_t h) { return r < count ? load(scores.at(r, h)) * factor(r, h) : Vec{}; };
            for (int64_t r = 0; r < depth * kPanel; ++r)
                for (int64_t h = 0; h < heads; h += kLanes)
                    if constexpr (kNumbers<Element> == 1)
                        store(weights.at(r, h), weight(r, h));
                    else
                        store_pair(r, h, weight(2 * r, h), weight(2 * r + 1, h));
        });
        const Rows rows = bv.from(first, rank * call.bv.stride_head);
        if constexpr (kNumbers<Element> == 1)
            if (count % kPanel == 0 && in_place<Element>(rows, call.value_features)) {
                for (int64_t e = 0; e < call.value_features; e += kPanel)
                    add(rank, e, Columns{(const float *)rows.data + e, rows.stride}, depth, result);
                return;
            }
        for (int64_t e = 0; e < call.value_features; e += kColumns) {
            Arena arena(values);
            const Operand<Element> packed(arena, kTokens, smaller(kColumns, call.value_features - e), Use{false, true});
            packed.load(rows.from(0, e), count);
            for (int64_t p = 0; p < blocks(packed.features); ++p)
                add(rank, e + p * kPanel, PanelOf<Element>(packed.over_tokens().panel(p)), depth, result);
        }
    }

    void store_pair(int64_t r, int64_t h, Vec first, Vec second) const {
        const BitVec pair = lane_pairs(first, second);
        store(weights.at(r, h), pair);
        if (has_rests())
            store(rests.at(r, h), lane_pairs(first - (Vec)(pair << 16), second - (Vec)(pair & 0xffff0000u)));
    }

    // Adds 16 columns of them, and meanwhile asks for the tokens that come next.
    template <class Right> void add(int64_t rank, int64_t column, Right right, int64_t depth, Partial &result) {
        const Product<TransposedOf<Element>, Right, Asking> rounded{weights, right, depth, {this}};
        const Product<TransposedOf<Element>, Right> rest{rests, right, has_rests() ? depth : 0};
        float *panel = result.output.panel(column / kPanel);
        for (int64_t block = 0; block < blocks(heads); ++block)
            if (rank == 0)
                multiply_apart(panel, block, Scale{result.weight, nullptr}, rounded, rest);
            else
                multiply_apart(panel, block, Add(), rounded, rest);
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
template <class Element> struct Desk {
    Decoder<Element> decoder;
    Partial total, part;
    Desk(Arena &arena, const fulmen_tpa_decode_call &call, const Plan &plan)
        : decoder(arena, call, plan.group),
          total(arena, plan.group, call.value_features),
          part(arena, plan.group, call.value_features) {}
};

int64_t partial_bytes(const fulmen_tpa_decode_call &call) {
    Arena counting(nullptr);
    Partial(counting, call.heads, call.value_features);
    return counting.bytes();
}

// A whole call.
template <class Element> class Call {
public:
    explicit Call(const fulmen_tpa_decode_call &call)
        : call(call), plan(call), per_worker(desk_bytes()), per_slice(partial_bytes(call)) {}

    int64_t workspace() const { return plan.threads * per_worker + call.batch * plan.kept_slices * per_slice; }

    int64_t run() const {
        plan.split == FULMEN_SPLIT_SEQUENCE ? cut_sequences() : cut_heads();
        return FULMEN_OK;
    }

private:
    const fulmen_tpa_decode_call &call;
    const Plan plan;
    const int64_t per_worker, per_slice;

    int64_t desk_bytes() const {
        Arena counting(nullptr);
        Desk<Element>(counting, call, plan);
        return counting.bytes();
    }
    Desk<Element> desk_of(int64_t worker) const {
        Arena arena((char *)call.workspace + worker * per_worker);
        return Desk<Element>(arena, call, plan);
    }
    Partial slice_of(int64_t batch, int64_t slice) const {
        const int64_t index = batch * plan.kept_slices + slice;
        Arena arena((char *)call.workspace + plan.threads * per_worker + index * per_slice);
        return Partial(arena, call.heads, call.value_features);
    }
    int64_t length_of(int64_t batch) const { return call.lengths ? call.lengths[batch] : call.tokens; }

    void write(Partial &result, int64_t batch, int64_t head, int64_t heads) const {
        result.normalise(call.value_rank);
        unpack(result.output, 0, heads, call.value_features, ranks_of(call.output, batch, head));
    }

    // Samples, or groups of heads.
    void cut_heads() const {
        parallel_for(plan.threads, call.batch * plan.groups, [&](int64_t index, int64_t worker) {
            const int64_t batch = index / plan.groups, head = index % plan.groups * plan.group;
            const int64_t heads = smaller(plan.group, call.heads - head), length = length_of(batch);
            auto desk = desk_of(worker);
            desk.decoder.begin(batch, head, heads);
            desk.total.clear();
            for (int64_t t = 0; t < length; t += kSlice) {
                desk.decoder.attend(t, smaller(length, t + kSlice), length, desk.part);
                desk.total.merge(desk.part);
            }
            write(desk.total, batch, head, heads);
        });
    }

    // Some slices in a row are a task, so that few of them begin with tokens that nobody has asked for.
    void cut_sequences() const {
        const int64_t stretch = kSlice * larger<int64_t>(1, call.batch * plan.kept_slices / (8 * plan.threads));
        const int64_t stretches = (call.tokens + stretch - 1) / stretch;
        parallel_for(plan.threads, call.batch * stretches, [&](int64_t index, int64_t worker) {
            const int64_t batch = index / stretches, first = index % stretches * stretch;
            const int64_t last = smaller(length_of(batch), first + stretch);
            auto desk = desk_of(worker);
            desk.decoder.begin(batch, 0, call.heads);
            for (int64_t t = first; t < last; t += kSlice) {
                Partial part = slice_of(batch, t / kSlice);
                desk.decoder.attend(t, smaller(last, t + kSlice), last, part);
            }
        });
        parallel_for(plan.threads, call.batch, [&](int64_t batch, int64_t worker) {
            auto desk = desk_of(worker);
            desk.total.clear();
            for (int64_t t = 0; t < length_of(batch); t += kSlice) {
                Partial part = slice_of(batch, t / kSlice);
                desk.total.merge(part);
            }
            write(desk.total, batch, 0, call.heads);
        });
    }
};

template <class F> int64_t with_call(const fulmen_tpa_decode_call &call, F f) {
    return with_element(forms_query(call) ? (int64_t)FULMEN_FLOAT32 : call.bk.dtype,
                        [&](auto element) { return f(Call<decltype(element)>(call)); });
}

}  // namespace

int64_t tpa_decode_workspace(const fulmen_tpa_decode_call &call) {
    return with_call(call, [](const auto &call) { return call.workspace(); });
}

int64_t tpa_decode(const fulmen_tpa_decode_call &call) {
    return with_call(call, [](const auto &call) { return call.run(); });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
