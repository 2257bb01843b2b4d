// Tensor-product attention of one token: softmax over keys and values that exist only as factors.
//
//     scores[m, h] = sum over key ranks of ak[m, h] * ((bk[m] bq^T) aq^T)[h]
//     o[h, :]      = sum over m and value ranks of softmax(scores)[m, h] * av[m, h] * bv[m, :]
//
// Heads stand in the lanes of vectors, tokens in rows: so do ak and av in memory, and the softmax is lane by lane.
// A sample is always partitioned into the same slices of tokens, and the slices are merged in their order, whoever
// computes them: bits depend neither on the split nor on the threads.
#include <atomic>

#include "kernels.h"
#include "operand.h"
#include "parallel.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

constexpr int64_t kTokens = 64;   // at a time
constexpr int64_t kColumns = 64;  // of values packed at a time
constexpr int64_t kSlice = 512;   // tokens

FULMEN_INLINE int64_t blocks(int64_t n) { return (n + kPanel - 1) / kPanel; }

// What exponents are taken from: the largest score, or 0 where every score so far is -inf.
FULMEN_INLINE Vec origin(Vec maximum) { return select(maximum == -__builtin_inff(), Vec{}, maximum); }

// Softmax over some of the tokens: with weights e^(score - maximum), their sum and the weighed sum of the values.
struct Partial {
    Panels output;                  // heads x value channels
    float *maximum, *sum, *weight;  // one per head; `weight` is what the tokens so far weigh beside new ones
    int64_t heads, columns;         // padded

    Partial(Arena &arena, int64_t active_heads, int64_t size)
        : output(arena.panels(active_heads, size)),
          maximum(arena.floats(padded(active_heads))),
          sum(arena.floats(padded(active_heads))),
          weight(arena.floats(padded(active_heads))),
          heads(padded(active_heads)),
          columns(padded(size)) {}

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

    // Divides by the sum of the weights. No tokens give zeros, and tokens that all score -inf NaN.
    void normalise(int64_t value_rank, bool any_tokens) {
        for (int64_t h = 0; h < heads; ++h) weight[h] = any_tokens ? 1.0f / (sum[h] * (float)value_rank) : 0.0f;
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
    const int64_t d = padded(call.key_size), r = padded(call.query_rank), h = padded(call.heads);
    const int64_t at_once = kPairs && call.bk.dtype == FULMEN_BFLOAT16 ? 2 : 1;
    return d * h < d * r / at_once + r * h;
}

// Whether rows can be multiplied where they are: they are made of Elements, and need no padding.
template <class Element> bool in_place(Rows rows, int64_t size) {
    return rows.element_bytes() * kNumbers<Element> == 4 && size % kPanel == 0 &&
           rows.stride % kNumbers<Element> == 0 && (uintptr_t)rows.data % 4 == 0;
}

// Tokens of one sample; none where last <= first.
struct Tokens {
    int64_t batch, first, last;
};

// Where the factors of a sample's keys and values are, from one head on.
struct Factors {
    Rows ak, av, bk, bv;
    Factors() = default;
    Factors(const fulmen_tpa_decode_call &call, int64_t batch, int64_t head)
        : ak(rows_of(call.ak, batch, head)),
          av(rows_of(call.av, batch, head)),
          bk(rows_of(call.bk, batch, 0)),
          bv(rows_of(call.bv, batch, 0)) {}
};

// One worker: the query of one sample and some heads, and memory for a few tokens. Elements are what keys and values
// are multiplied as. Pairs hold factors as they are, and of a weight what rounding it leaves, unless the caller does
// without.
template <class Element> class Decoder {
public:
    Decoder(Arena &arena, const fulmen_tpa_decode_call &call, int64_t heads)
        : call(call),
          heads(heads),
          direct(forms_query(call)),
          bq(arena.panels<Element>(elements<Element>(call.key_size), call.query_rank)),
          aq(arena.panels(call.query_rank, heads)),
          q(direct ? arena.panels<Element>(elements<Element>(call.key_size), heads) : bq),
          keys(arena, kPanel, call.key_size, Use{true, false}),
          of_query(arena.panels(kPanel, larger(heads, call.query_rank))),
          of_heads(direct ? of_query : arena.panels(kPanel, heads)),
          maximum(arena.floats(padded(heads))),
          scores(arena.panels(kTokens, heads)),
          weights(arena.panels<Element>(elements<Element>(kTokens), heads)),
          rests(has_rests() ? arena.panels<Element>(elements<Element>(kTokens), heads) : weights),
          values(arena.floats(panels_size(elements<Element>(kTokens), kColumns))) {}

    // Goes to a sample and some of its heads, whose query may be there already.
    void begin(int64_t batch, int64_t first_head, int64_t active_heads, bool has_query = false) {
        first = first_head;
        active = active_heads;
        sample = Factors(call, batch, first_head);
        if (!has_query) load_query(batch);
    }

    // The softmax over some tokens of the sample; this worker goes on to `next`.
    void attend(Tokens now, Tokens next, Partial &result) {
        result.clear();
        const Factors of_next(call, next.batch, first);
        for (int64_t t = now.first; t < now.last; t += kTokens) {
            const int64_t count = smaller(kTokens, now.last - t);
            const int64_t steps = blocks(count) * blocks(call.value_size) * blocks(heads);
            const bool ends = t + count == now.last;
            upcoming = ends ? of_next : sample;
            fetched = ends ? next.first : t + count;
            fetched_last = smaller(ends ? next.last : now.last, fetched + kTokens);
            fetched_at_once = (kTokens + steps - 1) / steps;
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
    int64_t first = 0, active = 0;  // heads
    Factors sample, upcoming;
    int64_t fetched = 0, fetched_last = 0, fetched_at_once = 0;  // tokens

    bool has_rests() const { return kNumbers<Element> > 1 && !call.round_weights; }

    // The query's factors, transposed.
    void load_query(int64_t batch) {
        const Rows bq_rows = ranks_of(call.bq, batch, 0), aq_rows = ranks_of(call.aq, batch, first);
        for (int64_t r = 0; r < call.query_rank; r += kPanel) {
            keys.load(bq_rows.from(r, 0), smaller<int64_t>(kPanel, call.query_rank - r));
            transpose(keys.over_channels(), elements<Element>(call.key_size), bq.panel(r / kPanel));
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
                    multiply(q.panel(h / kPanel), blocks(call.key_size), Zero(),
                             Product<AsStored>{bq, panel, blocks(call.query_rank)});
        }
    }

    // Prefetches the factors of a few of the next tokens, whose ranks stand side by side.
    struct Prefetching {
        Decoder *decoder;
        FULMEN_MEMBER void operator()() const { decoder->prefetch_some(); }
    };
    FULMEN_MEMBER void prefetch_some() {
        for (int64_t last = smaller(fetched_last, fetched + fetched_at_once); fetched < last; ++fetched) {
            prefetch(upcoming.bk, fetched, 1, call.key_rank * call.key_size, 0, 1);
            prefetch(upcoming.bv, fetched, 1, call.value_rank * call.value_size, 0, 1);
            prefetch(upcoming.ak, fetched, 1, call.key_rank * active, 0, 1);
            prefetch(upcoming.av, fetched, 1, call.value_rank * active, 0, 1);
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
    void score(int64_t token, int64_t row, int64_t count) {
        for (int64_t rank = 0; rank < call.key_rank; ++rank) {
            const Rows rows = sample.bk.from(token + row, rank * call.bk.stride_head);
            if (count == kPanel && in_place<Element>(rows, call.key_size)) {
                multiply_keys(InPlaceOf<Element>{(const Element *)rows.data, rows.stride / kNumbers<Element>});
            } else {
                keys.load(rows, count);
                multiply_keys(AsStoredOf<Element>(keys.over_channels()));
            }
            if (!direct)
                for (int64_t p = 0; p < blocks(heads); ++p)
                    multiply(of_heads.panel(p), 1, Zero(),
                             Product<AsStored>{of_query, aq.panel(p), blocks(call.query_rank)});
            with_heads(sample.ak.from(token + row, rank), call.ak.stride_head, [&](auto factor) {
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
            multiply_apart(of_query.panel(p), 0, Zero(), Product<Left>{left, q.panel(p), blocks(call.key_size)});
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
    void collect(int64_t rank, int64_t token, int64_t count, Partial &result) {
        const int64_t depth = blocks(count);
        with_heads(sample.av.from(token, rank), call.av.stride_head, [&](auto factor) {
            auto weight = [&](int64_t r, int64_t h) {
                return r < count ? load(scores.at(r, h)) * factor(r, h) : Vec{};
            };
            for (int64_t r = 0; r < depth * kDepth<Element>; ++r)
                for (int64_t h = 0; h < heads; h += kLanes)
                    if constexpr (kNumbers<Element> == 1)
                        store(weights.at(r, h), weight(r, h));
                    else
                        store_pair(r, h, weight(2 * r, h), weight(2 * r + 1, h));
        });
        const Rows rows = sample.bv.from(token, rank * call.bv.stride_head);
        if constexpr (kNumbers<Element> == 1)
            if (count % kPanel == 0 && in_place<Element>(rows, call.value_size)) {
                for (int64_t e = 0; e < call.value_size; e += kPanel)
                    add(rank, e, Columns{(const float *)rows.data + e, rows.stride}, depth, result);
                return;
            }
        for (int64_t e = 0; e < call.value_size; e += kColumns) {
            Arena arena(values);
            const Operand<Element> packed(arena, kTokens, smaller(kColumns, call.value_size - e), Use{false, true});
            packed.load(rows.from(0, e), count);
            for (int64_t p = 0; p < blocks(packed.size); ++p)
                add(rank, e + p * kPanel, PanelOf<Element>(packed.over_tokens().panel(p)), depth, result);
        }
    }

    void store_pair(int64_t r, int64_t h, Vec first, Vec second) const {
        const BitVec pair = lane_pairs(first, second);
        store(weights.at(r, h), pair);
        if (has_rests())
            store(rests.at(r, h), lane_pairs(first - (Vec)(pair << 16), second - (Vec)(pair & 0xffff0000u)));
    }

    // Adds 16 columns of them, and meanwhile prefetches the tokens that come next.
    template <class Right> void add(int64_t rank, int64_t column, Right right, int64_t depth, Partial &result) {
        const Product<TransposedOf<Element>, Right, Prefetching> rounded{weights, right, depth, {this}};
        float *panel = result.output.panel(column / kPanel);
        auto add_to = [&](int64_t block, auto start) {
            if constexpr (kNumbers<Element> == 1)
                multiply_apart(panel, block, start, rounded);
            else
                multiply_apart(panel, block, start, rounded,
                               Product<TransposedOf<Element>, Right>{rests, right, has_rests() ? depth : 0});
        };
        for (int64_t block = 0; block < blocks(heads); ++block)
            rank == 0 ? add_to(block, Scale{result.weight, nullptr}) : add_to(block, Add());
    }
};

// How a call is partitioned into tasks: samples, and either groups of heads or slices of tokens.
struct Plan {
    int64_t threads, split, group, groups, slices;
    Plan(const fulmen_tpa_decode_call &c) {
        const double flops =
            2.0 * (double)c.batch * (double)c.tokens *
            (double)(c.key_rank * c.query_rank * (c.key_size + c.heads) + c.value_rank * c.heads * c.value_size);
        slices = larger<int64_t>(1, (c.tokens + kSlice - 1) / kSlice);
        threads = worthwhile_threads(c.header.threads, flops);
        split = c.split;
        if (split == FULMEN_SPLIT_AUTO)
            split = threads == 1                  ? FULMEN_SPLIT_BATCH
                    : c.batch * slices >= threads ? FULMEN_SPLIT_SEQUENCE
                                                  : FULMEN_SPLIT_HEAD;
        group = split == FULMEN_SPLIT_HEAD ? smaller<int64_t>(kPanel, c.heads) : c.heads;
        groups = (c.heads + group - 1) / group;
        threads = larger<int64_t>(1, smaller(threads, c.batch * (partitions_sequences() ? slices : groups)));
    }
    bool partitions_sequences() const { return split == FULMEN_SPLIT_SEQUENCE; }
    // Two for each thread, and the one that slices of several threads are merged into.
    int64_t partials() const { return 2 * threads + partitions_sequences(); }
};

// A whole call.
template <class Element> class Call {
public:
    explicit Call(const fulmen_tpa_decode_call &call)
        : call(call),
          plan(call),
          per_worker(bytes_of([&](Arena &arena) { Decoder<Element>(arena, call, plan.group); })),
          per_partial(bytes_of([&](Arena &arena) { Partial(arena, plan.group, call.value_size); })) {}

    int64_t run() {
        workspace = workspace_of(call.header, plan.threads * per_worker + plan.partials() * per_partial);
        if (!workspace) return FULMEN_NO_WORKSPACE;
        plan.partitions_sequences() ? attend_slices() : attend_samples();
        return FULMEN_OK;
    }

private:
    const fulmen_tpa_decode_call &call;
    const Plan plan;
    const int64_t per_worker, per_partial;
    char *workspace = nullptr;

    template <class F> static int64_t bytes_of(F f) {
        Arena counting(nullptr);
        f(counting);
        return counting.bytes();
    }
    Decoder<Element> decoder(int64_t worker) const {
        Arena arena(workspace + worker * per_worker);
        return Decoder<Element>(arena, call, plan.group);
    }
    Partial partial(int64_t index) const {
        Arena arena(workspace + plan.threads * per_worker + index * per_partial);
        return Partial(arena, plan.group, call.value_size);
    }
    int64_t length_of(int64_t batch) const { return call.lengths ? call.lengths[batch] : call.tokens; }
    Tokens slice(int64_t batch, int64_t index) const {
        const int64_t length = length_of(batch);
        return {batch, smaller(length, index * kSlice), smaller(length, (index + 1) * kSlice)};
    }

    void write(Partial &result, int64_t batch, int64_t head, int64_t heads) const {
        result.normalise(call.value_rank, length_of(batch) > 0);
        unpack(result.output, 0, heads, call.value_size, ranks_of(call.output, batch, head));
    }

    // Samples, or groups of heads.
    void attend_samples() const {
        parallel_for(plan.threads, call.batch * plan.groups, [&](int64_t index, int64_t worker) {
            attend_sample(worker, index / plan.groups, index % plan.groups * plan.group);
        });
    }

    void attend_sample(int64_t worker, int64_t batch, int64_t head) const {
        const int64_t heads = smaller(plan.group, call.heads - head);
        auto decoder = this->decoder(worker);
        Partial total = partial(2 * worker), part = partial(2 * worker + 1);
        decoder.begin(batch, head, heads);
        total.clear();
        for (int64_t s = 0; s < plan.slices; ++s) {
            const Tokens now = slice(batch, s);
            if (now.first == now.last) break;
            decoder.attend(now, slice(batch, s + 1), part);
            total.merge(part);
        }
        write(total, batch, head, heads);
    }

    // How many of the samples are tasks as a whole: as many as leave enough to do for the threads that are done first.
    int64_t whole_samples() const {
        int64_t samples = 0, longest = 0, rest = 0;
        for (int64_t b = 0; b < call.batch; ++b) rest += length_of(b);
        for (; samples < call.batch; ++samples) {
            longest = larger(longest, length_of(samples));
            rest -= length_of(samples);
            if (rest < plan.threads * longest) break;
        }
        return samples;
    }

    // Slices are small tasks that even out the time of the threads, but they are merged by one thread at a time.
    void attend_slices() const {
        const int64_t whole = whole_samples();
        std::atomic<int64_t> taken{0};
        auto begin = [&](int64_t worker) {
            for (int64_t batch; (batch = taken++) < whole;) attend_sample(worker, batch, 0);
        };
        auto tokens_of = [&](int64_t step) {
            return step < 0 ? Tokens{} : slice(whole + step / plan.slices, step % plan.slices);
        };
        auto compute = [&](const Turn &turn) {
            const Tokens now = tokens_of(turn.step), before = tokens_of(turn.before);
            if (now.first == now.last) return;
            auto decoder = this->decoder(turn.worker);
            decoder.begin(now.batch, 0, call.heads, before.first < before.last && before.batch == now.batch);
            Partial part = partial(2 * turn.worker + turn.slot);
            decoder.attend(now, tokens_of(turn.after), part);
        };
        Partial total = partial(2 * plan.threads);
        auto collect = [&](int64_t step, int64_t worker, int64_t slot) {
            const Tokens now = tokens_of(step);
            if (step % plan.slices == 0) total.clear();
            if (now.first < now.last) {
                Partial part = partial(2 * worker + slot);
                total.merge(part);
            }
            if ((step + 1) % plan.slices == 0) write(total, now.batch, 0, call.heads);
        };
        parallel_in_order(plan.threads, (call.batch - whole) * plan.slices, begin, compute, collect);
    }
};

}  // namespace

int64_t tpa_decode(const fulmen_tpa_decode_call &call) {
    return with_element(forms_query(call) ? (int64_t)FULMEN_FLOAT32 : call.bk.dtype,
                        [&](auto element) { return Call<decltype(element)>(call).run(); });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
