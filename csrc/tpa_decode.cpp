// Tensor-product attention of one token: softmax over keys and values that exist only as factors.
//
//     scores[m, h] = sum over key ranks of ak[m, h] * ((bk[m] bq^T) aq^T)[h]
//     o[h, :]      = sum over m and value ranks of softmax(scores)[m, h] * av[m, h] * bv[m, :]
//
// A sample is always partitioned into the same slices of tokens, and the slices are merged in their order, whoever
// computes them: bits depend neither on the split nor on the threads.
#include <atomic>

#include "kernels.h"
#include "parallel.h"
#include "tpa_decoder.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

constexpr int64_t kSlice = 512;  // tokens

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
