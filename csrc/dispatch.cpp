// The C interface: which ISA build serves a call.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "decay_form.h"
#include "huge_pages.h"
#include "kernels.h"
#include "parallel.h"
#include "self_check.h"
#include "tile_permission.h"
#include "validate.h"

namespace fulmen {

// The builds that CMakeLists.txt lists, best first, but for the last: 512-bit sources on 256-bit registers exist for
// tests. FULMEN_BUILDS is BUILD(name) for each.
#define BUILD(isa) extern const Kernels kernels_##isa;
FULMEN_BUILDS
#undef BUILD

namespace {

[[maybe_unused]] bool supports_baseline() { return true; }
#if defined(__x86_64__)
bool has_f16c() {  // a name that Clang's __builtin_cpu_supports has learnt only lately
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
[[maybe_unused]] bool supports_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
[[maybe_unused]] bool supports_avx512() {
    return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
[[maybe_unused]] bool supports_avx512_bf16() { return supports_avx512() && __builtin_cpu_supports("avx512bf16"); }
[[maybe_unused]] bool supports_avx512_on_avx2() { return supports_avx2(); }
[[maybe_unused]] bool supports_amx_on_avx2() { return supports_avx2(); }

[[maybe_unused]] bool supports_amx() {
    constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;  // of cpuid's leaf 7, edx
    unsigned eax, ebx, ecx, edx;
    return supports_avx512_bf16() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kBFloat16) &&
           (edx & kTile) && request_tiles();
}

// Intel's CPUs multiply pairs of bfloat16 at half the rate of floats (Golden Cove: one vdpbf16ps in two clocks, and two
// FMAs in each): their units for bfloat16 are AMX's tiles, which have a build of their own.
bool pairs_are_faster() { return __builtin_cpu_is("amd"); }
#else
bool pairs_are_faster() { return true; }
#endif

struct Build {
    const char *name;
    const Kernels *kernels;
    bool (*supported)();
};
#define BUILD(isa) {#isa, &kernels_##isa, supports_##isa},
const Build builds[] = {FULMEN_BUILDS};
#undef BUILD

constexpr int64_t build_count = sizeof builds / sizeof builds[0];

int64_t choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    if (const char *wanted = getenv("FULMEN_ISA"))
        for (int64_t i = 0; i < build_count; ++i)
            if (strcmp(wanted, builds[i].name) == 0 && builds[i].supported()) return i;
    for (int64_t i = 0; i < build_count; ++i)
        if (builds[i].supported() && (pairs_are_faster() || !builds[i].kernels->multiplies_pairs)) return i;
    return build_count - 1;
}

std::atomic<int64_t> current{choose()};

const Kernels &kernels() { return *builds[current.load(std::memory_order_relaxed)].kernels; }

void expect_results(const fulmen_attention_forward_call &call) {
    const fulmen_problem &p = call.problem;
    prefer_huge_pages(call.output, p.batch, p.tokens, p.heads, p.value_size);
}
template <class Call> void expect_gradients(const Call &call, const fulmen_problem &p) {
    prefer_huge_pages(call.dq, p.batch, p.tokens, p.query_heads, p.key_size);
    prefer_huge_pages(call.dk, p.batch, p.tokens, p.key_heads, p.key_size);
    prefer_huge_pages(call.dv, p.batch, p.tokens, p.value_heads, p.value_size);
    if (by_channel(p.decay_form)) prefer_huge_pages(call.dlog_decay, p.batch, p.tokens, p.heads, p.key_size);
}
void expect_results(const fulmen_attention_backward_call &call) {
    const fulmen_problem &p = call.problem;
    expect_gradients(call, p);
    prefer_huge_pages(call.dlog_decay_v, p.batch, p.tokens, p.heads, p.value_size);
}
void expect_results(const fulmen_delta_rule_forward_call &call) {
    const fulmen_problem &p = call.problem.attention;
    prefer_huge_pages(call.output, p.batch, p.tokens, p.heads, p.value_size);
}
void expect_results(const fulmen_delta_rule_backward_call &call) { expect_gradients(call, call.problem.attention); }
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

void expect_results(const fulmen_causal_conv1d_forward_call &call) {
    const fulmen_causal_conv1d_problem &p = call.problem;
    prefer_huge_pages(call.output, p.batch, p.tokens, p.channels, 1);
}
void expect_results(const fulmen_causal_conv1d_backward_call &call) {
    const fulmen_causal_conv1d_problem &p = call.problem;
    prefer_huge_pages(call.dx, p.batch, p.tokens, p.channels, 1);
}
void expect_results(const fulmen_rms_norm_call &call) {
    prefer_huge_pages(call.output, call.batch, call.tokens, call.heads, call.size);
}
void expect_results(const fulmen_rms_norm_backward_call &call) {
    prefer_huge_pages(call.dx, call.batch, call.tokens, call.heads, call.size);
    prefer_huge_pages(call.dgate, call.batch, call.tokens, call.heads, call.size);
}
void expect_results(const fulmen_matmul_call &call) { prefer_huge_pages(call.output, 1, call.rows, 1, call.columns); }

// They write little.
void expect_results(const fulmen_causal_conv1d_step_call &) {}
void expect_results(const fulmen_step_call &) {}
void expect_results(const fulmen_delta_rule_step_call &) {}
void expect_results(const fulmen_tpa_decode_call &) {}
void expect_results(const fulmen_linear_call &) {}
void expect_results(const fulmen_elementwise_call &) {}

template <class Call> int64_t run(const Call *call, int64_t (*kernel)(const Call &)) {
    const fulmen_header &header = *(const fulmen_header *)call;
    if (header.version != FULMEN_VERSION) return FULMEN_BAD_VERSION;
    if (header.bytes != sizeof(Call)) return FULMEN_BAD_STRUCT;
    if (header.threads < 1) return FULMEN_BAD_OPTION;
    if (const int64_t status = invalid(*call)) return status;
    expect_results(*call);
    return kernel(*call);
}

}  // namespace
}  // namespace fulmen

using namespace fulmen;

int64_t fulmen_version(void) { return FULMEN_VERSION; }

const char *fulmen_error_text(int64_t status) {
    switch (status) {
        case FULMEN_OK: return "no error";
        case FULMEN_BAD_VERSION: return "the struct belongs to another version of the interface";
        case FULMEN_BAD_SIZE:
            return "a size is out of range (D, E and ranks must be 1 to 512, K 1 to 64, W at least K - 1, chunk_size "
                   "at least 1 and with N below 2^63)";
        case FULMEN_BAD_HEADS: return "query_heads, key_heads and value_heads must each divide heads";
        case FULMEN_BAD_DTYPE:
            return "a dtype is unknown or does not fit: inputs share one, results have it or float32";
        case FULMEN_BAD_DECAY:
            return "the form of log_decay or log_decay_v is unknown, or its gradient is requested without it";
        case FULMEN_BAD_SEQUENCES: return "cu_seqlens must rise from 0 to N, with batch = 1; lengths must be 0 to M";
        case FULMEN_BAD_OPTION: return "schedule, split or activation is unknown, or threads is below 1";
        case FULMEN_MISSING_TENSOR: return "a tensor that the call needs is absent";
        case FULMEN_BAD_STATE: return "a state or a factor must have rows or columns dense";
        case FULMEN_NO_WORKSPACE: return "no memory was found for the workspace";
        case FULMEN_BAD_STRUCT: return "the struct has another size than this version of the interface gives it";
        case FULMEN_GROWS: return "a log-decay is above 0";
    }
    return "unknown status";
}

#define FULMEN_DISPATCH(name) \
    int64_t fulmen_##name(const fulmen_##name##_call *call) { return run(call, kernels().name); }
FULMEN_CALLS(FULMEN_DISPATCH)

namespace {

struct ProgramCall {
    const char *name;
    int64_t bytes;
    int64_t (*run)(const void *call);
};
#define FULMEN_PROGRAM_CALL(name)         \
    {#name, sizeof(fulmen_##name##_call), \
     [](const void *call) { return fulmen_##name((const fulmen_##name##_call *)call); }},
const ProgramCall program_calls[] = {FULMEN_CALLS(FULMEN_PROGRAM_CALL)};
constexpr int64_t program_call_count = sizeof program_calls / sizeof program_calls[0];

#define FULMEN_MEMBER_OF_ANY(name) fulmen_##name##_call name;
union AnyCall {
    fulmen_header header;
    FULMEN_CALLS(FULMEN_MEMBER_OF_ANY)
};

}  // namespace

int64_t fulmen_call_number(const char *name) {
    for (int64_t i = 0; i < program_call_count; ++i)
        if (strcmp(program_calls[i].name, name) == 0) return i;
    return -1;
}

int64_t fulmen_run_program(const fulmen_program *program, const fulmen_header *header, void *const *tensors) {
    if (program->bytes != sizeof *program) return FULMEN_BAD_STRUCT;
    const int64_t *words = program->words;
    const fulmen_patch *patch = program->patch, *const last = patch + program->patches;
    bool grows = false;
    for (int64_t i = 0; i < program->calls; ++i) {
        const int64_t number = *words++;
        if (number < 0 || number >= program_call_count || *words != program_calls[number].bytes)
            return FULMEN_BAD_STRUCT;
        const int64_t bytes = *words;
        AnyCall call;
        memcpy(&call, words, (size_t)bytes);
        call.header = *header;
        call.header.bytes = bytes;
        for (; patch < last && patch->call == i; ++patch) {
            if (patch->word < 0 || patch->word >= bytes / 8) return FULMEN_BAD_STRUCT;
            char *const address = (char *)tensors[patch->tensor] + patch->offset;
            memcpy((char *)&call + 8 * patch->word, &address, sizeof address);
        }
        const int64_t status = program_calls[number].run(&call);
        if (status > FULMEN_OK) return status;
        grows |= status == FULMEN_GROWS;
        words += bytes / 8;
    }
    return grows ? FULMEN_GROWS : FULMEN_OK;
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
int64_t fulmen_isa_multiplies_pairs(int64_t index) {
    return index >= 0 && index < build_count && builds[index].kernels->multiplies_pairs;
}
int64_t fulmen_isa_multiplies_tiles(int64_t index) {
    return index >= 0 && index < build_count && builds[index].kernels->multiplies_tiles;
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
