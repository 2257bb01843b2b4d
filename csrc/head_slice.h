// The tasks of a forward pass: one head's slice of value channels, walked in chunks or token by token.
#pragma once

#include "decay.h"
#include "recurrence.h"
#include "segments.h"

namespace fulmen {
namespace FULMEN_ISA {

struct HeadSlice {
    Sequence sequence;
    Head head;
    int64_t index, column, columns;  // which head, and which of its value channels
    Rows output;
    Matrix initial, final;
};

FULMEN_INLINE HeadSlice head_slice(const fulmen_problem &p, const fulmen_tensor &output,
                                   const fulmen_state &final_state, Slices slices, int64_t index) {
    HeadSlice x;
    x.column = index % slices.count * slices.width;
    x.columns = smaller(slices.width, p.value_size - x.column);
    x.index = index / slices.count % p.heads;
    x.sequence = sequence(p, index / slices.count / p.heads);
    x.head = head_of(p, x.sequence, x.index, x.column);
    x.output = rows_of(output, x.sequence.batch, x.index).from(x.sequence.first, x.column);
    x.initial = matrix_of(p.initial_state, x.sequence.state, x.index).from_column(x.column);
    x.final = matrix_of(final_state, x.sequence.state, x.index).from_column(x.column);
    return x;
}

// The same from its last token to its first.
FULMEN_INLINE HeadSlice reversed(HeadSlice x) {
    const int64_t last = x.head.tokens - 1;
    for (Rows *rows : {&x.head.q, &x.head.k, &x.head.v, &x.output}) *rows = rows->backwards(last);
    if (x.head.log_decay.stride != 0) x.head.log_decay = x.head.log_decay.backwards(last + 1);
    x.head.reversed = true;
    return x;
}

// Panel p of `size` columns, once it is computed.
FULMEN_INLINE void unpack_panel(float *panel, int64_t p, int64_t first, int64_t count, int64_t size, Rows rows) {
    const int64_t column = p * kPanel;
    unpack(Panels{panel, 0}, first, count, smaller<int64_t>(kPanel, size - column), rows.from(0, column));
}

// Neighbouring heads that are walked at once, chunk by chunk: the rows of a token stand side by side in memory, often
// on one page, where those of one head are kilobytes apart.
constexpr int64_t kMostTogether = 8;
struct Together {
    int64_t heads = 1;
    int64_t sharers = 1;  // of queries and keys: all of them, or each has its own
};

// As many as keep their states in L2 and all threads at work; rather fewer that share than more that do not. A decay
// per channel weighs queries and keys themselves, so that each head needs its own.
constexpr int64_t kStatesInL2 = 65536;  // floats
FULMEN_INLINE Together heads_together(const fulmen_problem &p, int64_t columns, int64_t tasks, int64_t threads) {
    const int64_t most = smaller<int64_t>(kMostTogether, kStatesInL2 / (p.key_size * columns));
    auto fits = [&](int64_t n) { return p.heads % n == 0 && (tasks / n % threads == 0 || tasks / n >= 4 * threads); };
    auto share = [&](int64_t n) {
        return !by_channel(p.decay_form) && p.heads / p.query_heads % n == 0 && p.heads / p.key_heads % n == 0;
    };
    if (p.schedule == FULMEN_RECURRENT) return {};
    for (int64_t n = most; n > 1; --n)
        if (fits(n) && share(n)) return {n, n};
    for (int64_t n = most; n > 1; --n)
        if (fits(n)) return {n, 1};
    return {};
}

// How a call is partitioned: heads, or several together, slices of value channels, and segments of tokens. These are
// fewer than `least` only where the schedule asks for them: they take more work than they divide.
struct ForwardPlan {
    int64_t threads, heads, segments;
    Slices slices;
    Together together;
    ForwardPlan(const fulmen_problem &p, double flops_per_token, int64_t least) {
        threads = useful_threads(p, flops_per_token);
        heads = sequences_of(p) * p.heads;
        slices = slices_of(heads, threads, p.value_size);
        segments = segments_for(p, head_slices(), threads);
        if (segments < least) segments = 1;
        if (may_partition(p) && p.schedule == FULMEN_PARALLEL)
            segments = larger(segments, larger<int64_t>(2, p.header.threads));
        if (segments == 1) together = heads_together(p, slices.width, head_slices(), threads);
        threads = larger<int64_t>(1, smaller(threads, tasks() * segments));
    }
    int64_t head_slices() const { return heads * slices.count; }
    int64_t tasks() const { return head_slices() / together.heads; }  // unless there are segments
};

// Shared loads the queries and keys of a chunk, then each Worker that has these attends to it, kTokens at a time. One
// that kExpects is told who attends next; others prefetch the chunk after for themselves.
template <class Shared, class Worker> class HeadsTogether {
public:
    static constexpr int64_t kTokens = Worker::kTokens;  // of a chunk

    template <class Problem>
    HeadsTogether(Arena &arena, const Problem &p, int64_t columns, Together together)
        : together(together), rows(arena, p) {
        for (int64_t i = 0; i < together.heads; ++i)
            heads[i] = arena.place<Worker>(p, columns, rows, i % together.sharers, together.sharers);
    }

    Worker &head(int64_t i) const { return *heads[i]; }

    // Heads have been started, and states have entered. `empty`: they are, and need not be there. `final`: the states
    // that leave are wanted; they are not advanced over the last chunk else.
    void attend(const HeadSlice *slices, int64_t first, int64_t last, bool empty, bool final) const {
        for (int64_t i = 0; i < together.heads && !empty; ++i) heads[i]->round_state();
        for (int64_t t = first; t < last; t += kTokens, empty = false) {
            const int64_t count = smaller<int64_t>(kTokens, last - t);
            for (int64_t i = 0; i < together.heads; ++i) {
                if (i % together.sharers == 0) rows.load(slices[i].head, t, count);
                if constexpr (Worker::kExpects) {
                    const bool last_head = i + 1 == together.heads;
                    heads[i]->expect(slices[last_head ? 0 : i + 1], last_head ? t + kTokens : t,
                                     !last_head && (i + 1) % together.sharers != 0);
                }
                heads[i]->attend(slices[i].output, t, count, empty, final || t + kTokens < last);
            }
        }
    }

    const Together together;

private:
    const Shared rows;
    Worker *heads[kMostTogether];
};

// Before and after a worker that has been started walks a whole head. The second returns, as the others do, whether a
// log-decay was above 0.
template <class Worker> void enter(Worker &worker, const HeadSlice &x) {
    if (x.initial.present() || x.final.present() || x.sequence.tokens > kPanel)
        worker.enter(x.initial);
    else
        worker.enter();  // nobody reads the state
}
template <class Worker> bool leave(const Worker &worker, const HeadSlice &x) {
    if (x.final.present()) store_state(worker.state, worker.key.size(), x.columns, x.final);
    return worker.grows();
}

// Several heads, one slice of each: slice_of(index) tells which, and start(worker, slice) begins with it.
template <class Workers, class Problem, class SliceOf, class Start>
bool attend_whole(Arena arena, const Problem &p, const ForwardPlan &plan, int64_t task, SliceOf slice_of, Start start) {
    const int64_t heads = plan.together.heads, slices = plan.slices.count, first = task / slices * heads;
    HeadSlice x[kMostTogether];
    for (int64_t i = 0; i < heads; ++i) x[i] = slice_of((first + i) * slices + task % slices);
    const Workers workers(arena, p, x[0].columns, plan.together);
    for (int64_t i = 0; i < heads; ++i) {
        start(workers.head(i), x[i]);
        enter(workers.head(i), x[i]);
    }
    workers.attend(x, 0, x[0].sequence.tokens, !x[0].initial.present(), x[0].final.present());
    bool grows = false;
    for (int64_t i = 0; i < heads; ++i) grows |= leave(workers.head(i), x[i]);
    return grows;
}

// How much of an arena the next one takes, and its buffer.
template <class Buffer> int64_t token_by_token_bytes(const fulmen_problem &p, int64_t columns) {
    return bytes_of<Buffer>(p.key_size, columns) + 4 * p.key_size * padded(columns);
}

// sweep(state, stride, token, log_decay) updates a state with dense rows and leaves the output in the buffer; log_decay
// begins at the token.
template <class Buffer, class Sweep>
bool attend_token_by_token(const fulmen_problem &p, const HeadSlice &x, Arena &arena, Buffer &buffer, Sweep sweep) {
    const int64_t stride = padded(x.columns);
    float *state = arena.floats(p.key_size * stride);
    for (int64_t d = 0; d < p.key_size; ++d)
        for (int64_t e = 0; e < x.columns; ++e)
            state[d * stride + e] = x.initial.present() ? *x.initial.at(d, e) : 0.0f;
    for (int64_t t = 0; t < x.sequence.tokens; ++t) {
        sweep(state, stride, t, has_tokens(p.decay_form) ? x.head.log_decay.from(t, 0) : x.head.log_decay);
        buffer.store_output(x.output, t);
    }
    for (int64_t d = 0; d < p.key_size && x.final.present(); ++d)
        for (int64_t e = 0; e < x.columns; ++e) *x.final.at(d, e) = state[d * stride + e];
    return buffer.grows();
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
