// What a call is partitioned into: sequences, heads, slices of value channels.
#pragma once

#include "decay_form.h"
#include "parallel.h"
#include "rows.h"

namespace fulmen {
namespace FULMEN_ISA {

// One sequence of the batch or of the pack.
struct Sequence {
    int64_t batch;  // whose tensors
    int64_t first;  // token
    int64_t tokens;
    int64_t state;  // whose states
};

template <class Problem> FULMEN_INLINE int64_t sequences_of(const Problem &p) {
    return p.cu_seqlens ? p.sequences : p.batch;
}

template <class Problem> FULMEN_INLINE Sequence sequence(const Problem &p, int64_t s) {
    if (p.cu_seqlens) return {0, p.cu_seqlens[s], p.cu_seqlens[s + 1] - p.cu_seqlens[s], s};
    return {s, 0, p.tokens, s};
}

FULMEN_INLINE int64_t longest_sequence(const fulmen_problem &p) {
    int64_t longest = 0;
    for (int64_t s = 0; s < sequences_of(p); ++s) longest = larger(longest, sequence(p, s).tokens);
    return longest;
}

// The inputs of one head of one sequence, with value channels from `column` on.
struct Head {
    Rows q, k, v, log_decay, log_decay_v;
    int64_t tokens;
    bool reversed = false;  // from the last token to the first; between two of them is the decay of the later one
};

FULMEN_INLINE Head head_of(const fulmen_problem &p, const Sequence &s, int64_t h, int64_t column) {
    Head head;
    head.q = rows_of(p.q, s.batch, h / (p.heads / p.query_heads)).from(s.first, 0);
    head.k = rows_of(p.k, s.batch, h / (p.heads / p.key_heads)).from(s.first, 0);
    head.v = rows_of(p.v, s.batch, h / (p.heads / p.value_heads)).from(s.first, column);
    head.log_decay = rows_of(p.log_decay, has_tokens(p.decay_form) ? s.batch : 0, h);
    if (has_tokens(p.decay_form)) head.log_decay = head.log_decay.from(s.first, 0);
    head.log_decay_v = rows_of(p.log_decay_v, s.batch, h).from(s.first, column);
    head.tokens = s.tokens;
    return head;
}

FULMEN_INLINE int64_t useful_threads(const fulmen_problem &p, double flops_per_token) {
    return worthwhile_threads(p.header.threads, flops_per_token * (double)p.batch * (double)p.tokens * (double)p.heads);
}

// The value channels are partitioned into slices of whole panels when heads alone do not occupy the threads evenly.
struct Slices {
    int64_t count, width;
};

FULMEN_INLINE Slices slices_of(int64_t tasks, int64_t threads, int64_t size) {
    const int64_t blocks = padded(size) / kPanel;
    int64_t count = 1;
    while (tasks * count < 4 * threads && tasks * count % threads != 0 && 4 * count <= blocks) count *= 2;
    const int64_t width = (blocks + count - 1) / count * kPanel;
    return {(size + width - 1) / width, width};
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
