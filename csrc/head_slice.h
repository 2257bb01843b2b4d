// The tasks of a forward pass: one head's slice of value channels, walked in chunks or token by token.
#pragma once

#include "recurrence.h"
#include "state.h"

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

template <class Worker> bool attend_whole(Worker &worker, const HeadSlice &x) {
    enter(worker, x);
    worker.attend(x.output, 0, x.sequence.tokens, !x.initial.present(), x.final.present());
    return leave(worker, x);
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
