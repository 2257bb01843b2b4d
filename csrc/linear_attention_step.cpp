// Decoding: one token for every head, the state updated in place.
#include "kernels.h"
#include "recurrence.h"

namespace fulmen {
namespace FULMEN_ISA {

int64_t step(const fulmen_step_call &call) {
    // A thread is worth waking for some 64 KiB of state.
    const int64_t heads = call.batch * call.heads, cells = call.key_size * call.value_size;
    const int64_t threads = smaller(call.header.threads, 1 + heads * cells / 16384);
    Notice grows;
    parallel_for_in_place(threads, heads, [&](int64_t index) {
        const int64_t batch = index / call.heads, h = index % call.heads;
        Head head;
        head.q = rows_of(call.q, batch, h / (call.heads / call.query_heads));
        head.k = rows_of(call.k, batch, h / (call.heads / call.key_heads));
        head.v = rows_of(call.v, batch, h / (call.heads / call.value_heads));
        head.log_decay_v = rows_of(call.log_decay_v, batch, h);
        const Rows log_decay = rows_of(call.log_decay, batch, h);

        alignas(64) float memory[6 * FULMEN_MAX_SIZE];
        Arena arena(memory);
        TokenBuffer buffer(arena, call.key_size, call.value_size);
        const Token token = buffer.load(head, 0, call.decay_form, log_decay, call.decay_v_form, (float)call.scale);
        const fulmen_state &s = call.state;
        with_type(s.dtype, [&](auto type) {
            auto *state = (typename decltype(type)::Stored *)s.data + batch * s.stride_batch + h * s.stride_head;
            if (s.stride_column == 1)
                sweep_rows(type, state, s.stride_row, call.key_size, call.value_size, token);
            else
                sweep_columns(type, state, s.stride_column, call.key_size, call.value_size, token);
        });
        buffer.store_output(rows_of(call.output, batch, h), 0);
        grows |= buffer.grows();
    });
    return grows ? FULMEN_GROWS : FULMEN_OK;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
