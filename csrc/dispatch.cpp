// The C interface: which ISA build serves a call.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "huge_pages.h"
#include "kernels.h"
#include "parallel.h"
#include "self_check.h"
#include "validate.h"

namespace fulmen {

struct Build {
    const char *name;
    const Kernels *kernels;
    bool (*supported)();
};

#if defined(__x86_64__)
extern const Kernels kernels_avx512_bf16, kernels_avx512, kernels_avx512_on_avx2, kernels_avx2, kernels_baseline;
namespace {
bool has_f16c() {  // a name that Clang's __builtin_cpu_supports has learnt only lately
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool always() { return true; }

// Best first, but for the last: the 512-bit source on 256-bit registers exists for tests.
const Build builds[] = {{"avx512_bf16", &kernels_avx512_bf16, has_avx512_bf16},
                        {"avx512", &kernels_avx512, has_avx512},
                        {"avx2", &kernels_avx2, has_avx2},
                        {"baseline", &kernels_baseline, always},
                        {"avx512_on_avx2", &kernels_avx512_on_avx2, has_avx2}};
}  // namespace
#else
extern const Kernels kernels_baseline;
namespace {
const Build builds[] = {{"baseline", &kernels_baseline, [] { return true; }}};
}  // namespace
#endif

namespace {

constexpr int64_t build_count = sizeof builds / sizeof builds[0];

int64_t choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    if (const char *wanted = getenv("FULMEN_ISA"))
        for (int64_t i = 0; i < build_count; ++i)
            if (strcmp(wanted, builds[i].name) == 0 && builds[i].supported()) return i;
    for (int64_t i = 0; i < build_count; ++i)
        if (builds[i].supported()) return i;
    return build_count - 1;
}

std::atomic<int64_t> current{choose()};

const Kernels &kernels() { return *builds[current.load(std::memory_order_relaxed)].kernels; }

void expect_results(const fulmen_attention_forward_call &call) {
    const fulmen_problem &p = call.problem;
    prefer_huge_pages(call.output, p.batch, p.tokens, p.heads, p.value_size);
}
void expect_results(const fulmen_attention_backward_call &call) {
    const fulmen_problem &p = call.problem;
    prefer_huge_pages(call.dq, p.batch, p.tokens, p.query_heads, p.key_size);
    prefer_huge_pages(call.dk, p.batch, p.tokens, p.key_heads, p.key_size);
    prefer_huge_pages(call.dv, p.batch, p.tokens, p.value_heads, p.value_size);
    if (p.decay_form == FULMEN_DECAY_CHANNEL)
        prefer_huge_pages(call.dlog_decay, p.batch, p.tokens, p.heads, p.key_size);
    prefer_huge_pages(call.dlog_decay_v, p.batch, p.tokens, p.heads, p.value_size);
}
void expect_results(const fulmen_states_forward_call &call) {
    const fulmen_problem &p = call.problem;
    const int64_t chunks = (p.tokens + call.chunk_size - 1) / call.chunk_size;
    const fulmen_tensor states = {call.states, FULMEN_FLOAT32, call.stride_batch, call.stride_chunk, call.stride_head};
    prefer_huge_pages(states, p.batch, chunks + 1, p.heads, p.key_size * p.value_size);
}
void expect_results(const fulmen_states_backward_call &call) {
    const fulmen_problem &p = call.problem;
    prefer_huge_pages(call.dk, p.batch, p.tokens, p.key_heads, p.key_size);
    prefer_huge_pages(call.dv, p.batch, p.tokens, p.value_heads, p.value_size);
}

void expect_results(const fulmen_output_gate_forward_call &call) {
    const fulmen_output_gate_problem &p = call.problem;
    prefer_huge_pages(call.output, p.batch, p.queries, p.heads, p.value_size);
    prefer_huge_pages(p.qkv, p.batch, p.queries, p.heads, p.value_size);
}
void expect_results(const fulmen_output_gate_backward_call &call) {
    const fulmen_output_gate_problem &p = call.problem;
    prefer_huge_pages(call.dq, p.batch, p.queries, p.heads, p.key_size);
    prefer_huge_pages(call.dk, p.batch, p.keys, p.heads, p.key_size);
    prefer_huge_pages(call.dv, p.batch, p.keys, p.heads, p.value_size);
    prefer_huge_pages(call.dgate, p.batch, p.queries, p.heads, p.value_size);
}

template <class Call>
int64_t run(const Call *call, int64_t (*kernel)(const Call &), int64_t (*workspace)(const Call &)) {
    if (const int64_t status = invalid(call)) return status;
    const int64_t needed = workspace(*call);
    if (needed > call->problem.workspace_bytes || (needed > 0 && !call->problem.workspace))
        return FULMEN_SMALL_WORKSPACE;
    expect_results(*call);
    return kernel(*call);
}

template <class Call> int64_t measure(const Call *call, int64_t (*workspace)(const Call &)) {
    const int64_t status = invalid(call);
    return status ? -status : workspace(*call);
}

}  // namespace
}  // namespace fulmen

using namespace fulmen;

int64_t fulmen_abi_version(void) { return FULMEN_ABI_VERSION; }

const char *fulmen_error_text(int64_t status) {
    switch (status) {
        case FULMEN_OK: return "no error";
        case FULMEN_BAD_VERSION: return "the struct belongs to another version of the interface";
        case FULMEN_BAD_SIZE: return "a size is out of range (D, E and ranks must be 1 to 512, chunk_size at least 1)";
        case FULMEN_BAD_HEADS: return "query_heads, key_heads and value_heads must each divide heads";
        case FULMEN_BAD_DTYPE:
            return "a dtype is unknown or does not fit: inputs share one, results have it or float32";
        case FULMEN_BAD_DECAY:
            return "the form of log_decay or log_decay_v is unknown, or its gradient is requested without it";
        case FULMEN_BAD_SEQUENCES: return "cu_seqlens must rise from 0 to N, with batch = 1; lengths must be 0 to M";
        case FULMEN_BAD_OPTION: return "schedule or split is unknown, or threads is below 1";
        case FULMEN_MISSING_TENSOR: return "a tensor that the call needs is absent";
        case FULMEN_BAD_STATE: return "the state must have rows or columns dense";
        case FULMEN_SMALL_WORKSPACE: return "the workspace is smaller than the call needs";
    }
    return "unknown status";
}

int64_t fulmen_attention_forward(const fulmen_attention_forward_call *call) {
    return run(call, kernels().attention_forward, kernels().attention_forward_workspace);
}
int64_t fulmen_attention_backward(const fulmen_attention_backward_call *call) {
    return run(call, kernels().attention_backward, kernels().attention_backward_workspace);
}
int64_t fulmen_states_forward(const fulmen_states_forward_call *call) {
    return run(call, kernels().states_forward, kernels().states_forward_workspace);
}
int64_t fulmen_states_backward(const fulmen_states_backward_call *call) {
    return run(call, kernels().states_backward, kernels().states_backward_workspace);
}
int64_t fulmen_step(const fulmen_step_call *call) {
    const int64_t status = invalid(call);
    return status ? status : kernels().step(*call);
}
int64_t fulmen_tpa_decode(const fulmen_tpa_decode_call *call) {
    if (const int64_t status = invalid(call)) return status;
    const int64_t needed = kernels().tpa_decode_workspace(*call);
    if (needed > call->workspace_bytes || (needed > 0 && !call->workspace)) return FULMEN_SMALL_WORKSPACE;
    return kernels().tpa_decode(*call);
}

int64_t fulmen_attention_forward_workspace(const fulmen_attention_forward_call *call) {
    return measure(call, kernels().attention_forward_workspace);
}
int64_t fulmen_attention_backward_workspace(const fulmen_attention_backward_call *call) {
    return measure(call, kernels().attention_backward_workspace);
}
int64_t fulmen_states_forward_workspace(const fulmen_states_forward_call *call) {
    return measure(call, kernels().states_forward_workspace);
}
int64_t fulmen_states_backward_workspace(const fulmen_states_backward_call *call) {
    return measure(call, kernels().states_backward_workspace);
}
int64_t fulmen_tpa_decode_workspace(const fulmen_tpa_decode_call *call) {
    return measure(call, kernels().tpa_decode_workspace);
}

int64_t fulmen_output_gate_forward(const fulmen_output_gate_forward_call *call) {
    return run(call, kernels().output_gate_forward, kernels().output_gate_forward_workspace);
}
int64_t fulmen_output_gate_backward(const fulmen_output_gate_backward_call *call) {
    return run(call, kernels().output_gate_backward, kernels().output_gate_backward_workspace);
}
int64_t fulmen_output_gate_forward_workspace(const fulmen_output_gate_forward_call *call) {
    return measure(call, kernels().output_gate_forward_workspace);
}
int64_t fulmen_output_gate_backward_workspace(const fulmen_output_gate_backward_call *call) {
    return measure(call, kernels().output_gate_backward_workspace);
}

int64_t fulmen_isa_count(void) { return build_count; }
const char *fulmen_isa_name(int64_t index) { return index >= 0 && index < build_count ? builds[index].name : ""; }
int64_t fulmen_isa_supported(int64_t index) { return index >= 0 && index < build_count && builds[index].supported(); }
int64_t fulmen_isa_current(void) { return current.load(); }
int64_t fulmen_isa_select(int64_t index) {
    if (!fulmen_isa_supported(index)) return 0;
    current.store(index);
    return 1;
}
int64_t fulmen_isa_self_check(int64_t index) {
    return fulmen_isa_supported(index) && self_check(*builds[index].kernels);
}
int64_t fulmen_has_openmp(void) { return has_openmp(); }

int64_t fulmen_fma_burst(int64_t rounds, int64_t threads) {
    struct Burst {
        int64_t rounds;
        std::atomic<int64_t> flops;
    } burst{rounds, {0}};
    run_tasks(
        threads, threads,
        [](void *context, int64_t, int64_t) {
            Burst &b = *(Burst *)context;
            b.flops += kernels().fma_burst(b.rounds);
        },
        &burst);
    return burst.flops;
}
