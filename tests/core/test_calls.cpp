// What the C interface refuses: with the status that says why, and before a kernel sees it. The kernels here only note
// that they were called.
#include <stddef.h>
#include <string.h>

#include <initializer_list>

#include "check.h"
#include "kernels.h"
#include "self_check.h"

namespace fulmen {

const char *called = "";

#define STUB(name) \
    static int64_t name(const fulmen_##name##_call &) { return called = #name, FULMEN_OK; }
FULMEN_CALLS(STUB)
#define NAME(name) name,
static int64_t fma_burst(int64_t rounds) { return rounds; }
extern const Kernels kernels_baseline;
const Kernels kernels_baseline = {FULMEN_CALLS(NAME) fma_burst, false};

bool self_check(const Kernels &) { return true; }

}  // namespace fulmen

namespace {

float memory[1];  // where every tensor is

constexpr fulmen_tensor kFloats = {memory, FULMEN_FLOAT32, 0, 0, 0}, kHalves = {memory, FULMEN_BFLOAT16, 0, 0, 0};
constexpr fulmen_tensor kWrong = {memory, FULMEN_FLOAT16, 0, 0, 0}, kUnknown = {memory, 3, 0, 0, 0}, kAbsent = {};
constexpr fulmen_state kState = {memory, FULMEN_FLOAT32, 0, 0, 4, 1},
                       kHalfState = {memory, FULMEN_BFLOAT16, 0, 0, 4, 1};

// A valid call, and the function that takes it.
template <class Call> struct Valid {
    const char *name;
    int64_t (*run)(const Call *);
    Call call = {};
};
#define VALID(name) \
    Valid<fulmen_##name##_call> { #name, fulmen_##name }

// A valid call that is changed: refused without reaching a kernel, or taken nevertheless.
#define REFUSES(valid, status, change)                                                        \
    do {                                                                                      \
        auto call = (valid).call;                                                             \
        change;                                                                               \
        fulmen::called = "";                                                                  \
        const int64_t got = (valid).run(&call);                                               \
        CHECK(got == status, "%s, %s: %s", (valid).name, #change, fulmen_error_text(got));    \
        CHECK(!*fulmen::called, "%s, %s: reached %s", (valid).name, #change, fulmen::called); \
    } while (0)
#define TAKES(valid, change)                                                                             \
    do {                                                                                                 \
        auto call = (valid).call;                                                                        \
        change;                                                                                          \
        fulmen::called = "";                                                                             \
        const int64_t got = (valid).run(&call);                                                          \
        CHECK(got == FULMEN_OK, "%s, %s: %s", (valid).name, #change, fulmen_error_text(got));            \
        CHECK(strcmp(fulmen::called, (valid).name) == 0, "%s reached %s", (valid).name, fulmen::called); \
    } while (0)

// The first words of every call.
template <class Call> void check_header(const Valid<Call> &x) {
    auto header = [](Call &call) -> fulmen_header & { return *(fulmen_header *)&call; };
    TAKES(x, (void)0);
    REFUSES(x, FULMEN_BAD_VERSION, header(call).version = FULMEN_VERSION - 1);
    REFUSES(x, FULMEN_BAD_VERSION, header(call).version = FULMEN_VERSION + 1);
    REFUSES(x, FULMEN_BAD_STRUCT, header(call).bytes -= 8);
    REFUSES(x, FULMEN_BAD_STRUCT, header(call).bytes += 8);
    REFUSES(x, FULMEN_BAD_STRUCT, header(call).bytes = 0);
    REFUSES(x, FULMEN_BAD_OPTION, header(call).threads = 0);
}
template <class Call> fulmen_header valid_header() {
    fulmen_header x = {};
    x.bytes = sizeof(Call);
    x.version = FULMEN_VERSION;
    x.threads = 1;
    return x;
}

// What the calls on sequences share: bfloat16 inputs, which two heads share, and all that is optional.
template <class Call> void check_problem(Valid<Call> &x, int64_t query_heads) {
    fulmen_problem &p = x.call.problem;
    p.header = valid_header<Call>();
    p.batch = p.key_heads = p.value_heads = 1;
    p.tokens = 5;
    p.heads = 2;
    p.query_heads = query_heads;
    p.key_size = 3;
    p.value_size = 4;
    p.decay_form = p.decay_v_form = FULMEN_DECAY_CHANNEL;
    p.scale = 1;
    p.q = p.k = p.v = kHalves;
    p.log_decay = kFloats;
    p.log_decay_v = kWrong;  // decays have dtypes of their own
    p.initial_state = kState;

    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.batch = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.tokens = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.heads = 0);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.key_size = 0);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.key_size = FULMEN_MAX_SIZE + 1);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.value_size = 0);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.value_size = FULMEN_MAX_SIZE + 1);
    REFUSES(x, FULMEN_BAD_HEADS, call.problem.query_heads = 0);
    REFUSES(x, FULMEN_BAD_HEADS, call.problem.key_heads = 3);
    REFUSES(x, FULMEN_BAD_HEADS, call.problem.value_heads = 4);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.k = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.v = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.q = call.problem.k = call.problem.v = kUnknown);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.log_decay.dtype = -1);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.log_decay_v.dtype = 3);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.initial_state = kHalfState);
    REFUSES(x, FULMEN_BAD_DECAY, call.problem.decay_form = FULMEN_DECAY_CHANNEL + 1);
    REFUSES(x, FULMEN_BAD_DECAY, call.problem.decay_form = -1);
    REFUSES(x, FULMEN_BAD_DECAY, call.problem.decay_v_form = FULMEN_DECAY_HEAD);
    REFUSES(x, FULMEN_BAD_OPTION, call.problem.schedule = -1);
    REFUSES(x, FULMEN_BAD_OPTION, call.problem.schedule = FULMEN_RECOMPUTE + 1);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.problem.k.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.problem.v.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.problem.log_decay.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.problem.log_decay_v.data = nullptr);
    TAKES(x, call.problem.initial_state.data = nullptr);
    TAKES(x, call.problem.key_size = call.problem.value_size = FULMEN_MAX_SIZE);
}

void check_attention_forward() {
    auto x = VALID(attention_forward);
    x.call.output = kHalves;
    x.call.final_state = kState;
    check_problem(x, 1);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.q = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.final_state = kHalfState);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.problem.q.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    TAKES(x, call.output = kFloats);
    TAKES(x, call.final_state.data = nullptr);
    TAKES(x, (call.problem.tokens = 0, call.problem.q.data = call.output.data = nullptr));
    auto weighed = x;
    weighed.call.problem.decay_form = FULMEN_DECAY_TOKEN;
    weighed.call.problem.decay_v_form = FULMEN_DECAY_NONE;
    for (auto own : {&fulmen_attention_forward_call::value_weights, &fulmen_attention_forward_call::skip}) {
        TAKES(weighed, call.*own = kFloats);
        TAKES(weighed, call.*own = kHalves);
        REFUSES(weighed, FULMEN_BAD_DTYPE, call.*own = kUnknown);
        REFUSES(weighed, FULMEN_BAD_OPTION, (call.*own = kFloats, call.problem.schedule = FULMEN_RECURRENT));
        REFUSES(weighed, FULMEN_BAD_OPTION, (call.*own = kFloats, call.problem.decay_form = FULMEN_DECAY_CHANNEL));
        REFUSES(weighed, FULMEN_BAD_OPTION, (call.*own = kFloats, call.problem.decay_v_form = FULMEN_DECAY_CHANNEL));
    }
    // Not by a product of sizes, which is 0 in 64 bits.
    REFUSES(x, FULMEN_MISSING_TENSOR,
            (call.problem.batch = call.problem.tokens = 1ll << 32, call.problem.q.data = nullptr));

    const int64_t right[] = {0, 2, 2, 5}, late[] = {1, 2, 2, 5}, early[] = {0, 2, 2, 4}, falling[] = {0, 3, 2, 5};
    x.call.problem.sequences = 3;
    x.call.problem.cu_seqlens = right;
    TAKES(x, (void)0);
    for (const int64_t *wrong : {late, early, falling})
        REFUSES(x, FULMEN_BAD_SEQUENCES, call.problem.cu_seqlens = wrong);
    REFUSES(x, FULMEN_BAD_SEQUENCES, call.problem.sequences = -1);
    REFUSES(x, FULMEN_BAD_SEQUENCES, call.problem.batch = 2);
}

void check_attention_backward() {
    typedef fulmen_attention_backward_call Call;
    auto x = VALID(attention_backward);
    x.call.grad_output = x.call.dq = x.call.dk = x.call.dv = kHalves;
    x.call.grad_state = x.call.dinitial = kState;
    check_problem(x, 1);
    x.call.dlog_decay = x.call.dlog_decay_v = kFloats;
    TAKES(x, (void)0);
    for (auto gradient : {&Call::grad_output, &Call::dq, &Call::dk, &Call::dv}) {
        REFUSES(x, FULMEN_BAD_DTYPE, call.*gradient = kWrong);
        TAKES(x, call.*gradient = kFloats);
        TAKES(x, call.*gradient = kAbsent);
    }
    REFUSES(x, FULMEN_BAD_DTYPE, call.dlog_decay = kHalves);
    REFUSES(x, FULMEN_BAD_DTYPE, call.dlog_decay_v = kHalves);
    REFUSES(x, FULMEN_BAD_DTYPE, call.grad_state = kHalfState);
    REFUSES(x, FULMEN_BAD_DTYPE, call.dinitial = kHalfState);
    REFUSES(x, FULMEN_BAD_DECAY, call.problem.decay_form = FULMEN_DECAY_NONE);
    REFUSES(x, FULMEN_BAD_DECAY, call.problem.decay_v_form = FULMEN_DECAY_NONE);
}

template <class Call> void check_states(Valid<Call> &x) {
    x.call.chunk_size = 2;
    x.call.states = memory;
    check_problem(x, 2);
    const int64_t offsets[] = {0, 2, 2, 5};
    TAKES(x, call.problem.q = kAbsent);
    for (const int64_t size : {(int64_t)0, INT64_MAX}) REFUSES(x, FULMEN_BAD_SIZE, call.chunk_size = size);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.states = nullptr);
    REFUSES(x, FULMEN_BAD_SEQUENCES, (call.problem.sequences = 3, call.problem.cu_seqlens = offsets));
    TAKES(x, (call.problem.batch = 0, call.states = nullptr));
}

void check_states_forward() {
    auto x = VALID(states_forward);
    check_states(x);
}

void check_states_backward() {
    auto x = VALID(states_backward);
    x.call.grad_states = memory;
    x.call.dk = x.call.dv = kHalves;
    x.call.dinitial = kState;
    check_states(x);
    x.call.dlog_decay = x.call.dlog_decay_v = kFloats;
    TAKES(x, (void)0);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.grad_states = nullptr);
    REFUSES(x, FULMEN_BAD_DTYPE, call.dk = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.dv = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.dlog_decay = kHalves);
    REFUSES(x, FULMEN_BAD_DTYPE, call.dinitial = kHalfState);
    REFUSES(x, FULMEN_BAD_DECAY, call.problem.decay_form = FULMEN_DECAY_NONE);
}

void check_step() {
    typedef fulmen_step_call Call;
    auto x = VALID(step);
    x.call.header = valid_header<Call>();
    x.call.batch = x.call.query_heads = x.call.key_heads = x.call.value_heads = 1;
    x.call.heads = 2;
    x.call.key_size = 3;
    x.call.value_size = 4;
    x.call.decay_form = x.call.decay_v_form = FULMEN_DECAY_CHANNEL;
    x.call.q = x.call.k = x.call.v = x.call.output = kHalves;
    x.call.log_decay = x.call.log_decay_v = kFloats;
    x.call.state = kHalfState;

    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.batch = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.heads = 0);
    REFUSES(x, FULMEN_BAD_SIZE, call.key_size = FULMEN_MAX_SIZE + 1);
    REFUSES(x, FULMEN_BAD_SIZE, call.value_size = 0);
    REFUSES(x, FULMEN_BAD_HEADS, call.query_heads = 3);
    REFUSES(x, FULMEN_BAD_HEADS, call.key_heads = 0);
    REFUSES(x, FULMEN_BAD_HEADS, call.value_heads = -1);
    REFUSES(x, FULMEN_BAD_DTYPE, call.k = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.v = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.q = call.k = call.v = kUnknown);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.state.dtype = 3);
    REFUSES(x, FULMEN_BAD_DTYPE, call.log_decay.dtype = 3);
    REFUSES(x, FULMEN_BAD_DECAY, call.decay_form = FULMEN_DECAY_CHANNEL + 1);
    REFUSES(x, FULMEN_BAD_STATE, call.state.stride_column = 2);
    for (auto tensor : {&Call::q, &Call::k, &Call::v, &Call::log_decay, &Call::log_decay_v, &Call::output})
        REFUSES(x, FULMEN_MISSING_TENSOR, (call.*tensor).data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.state.data = nullptr);
    TAKES(x, (call.state.stride_row = 1, call.state.stride_column = 3));
    TAKES(x, (call.batch = 0, call.q.data = call.state.data = nullptr));
}

// What differs from linear attention; the rest is checked there, by the same functions.
template <class Call> void check_delta_rule(Valid<Call> &x) {
    fulmen_problem &p = x.call.problem.attention;
    p.header = valid_header<Call>();
    p.batch = p.key_heads = p.value_heads = p.query_heads = 1;
    p.tokens = 5;
    p.heads = 2;
    p.key_size = 3;
    p.value_size = 4;
    p.decay_form = FULMEN_DECAY_TOKEN;
    p.q = p.k = p.v = kHalves;
    p.log_decay = kFloats;
    p.initial_state = kState;
    x.call.problem.beta = kWrong;  // has a dtype of its own

    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.attention.key_size = 0);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.beta = kUnknown);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.problem.beta.data = nullptr);
    REFUSES(x, FULMEN_BAD_DECAY,
            (call.problem.attention.decay_v_form = FULMEN_DECAY_CHANNEL, call.problem.attention.log_decay_v = kFloats));
    TAKES(x, (call.problem.attention.tokens = 0, call.problem.beta.data = nullptr));
}

void check_delta_rule_forward() {
    auto x = VALID(delta_rule_forward);
    x.call.output = kHalves;
    check_delta_rule(x);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.final_state = kHalfState);
}

void check_delta_rule_backward() {
    typedef fulmen_delta_rule_backward_call Call;
    auto x = VALID(delta_rule_backward);
    x.call.grad_output = x.call.dq = x.call.dk = x.call.dv = kHalves;
    x.call.dbeta = x.call.dlog_decay = kFloats;
    x.call.dinitial = x.call.grad_state = kState;
    check_delta_rule(x);
    for (auto gradient : {&Call::grad_output, &Call::dq, &Call::dk, &Call::dv})
        REFUSES(x, FULMEN_BAD_DTYPE, call.*gradient = kWrong);
    for (auto gradient : {&Call::dbeta, &Call::dlog_decay}) REFUSES(x, FULMEN_BAD_DTYPE, call.*gradient = kHalves);
    REFUSES(x, FULMEN_BAD_DTYPE, call.dinitial = kHalfState);
    REFUSES(x, FULMEN_BAD_DECAY, call.problem.attention.decay_form = FULMEN_DECAY_NONE);
}

void check_delta_rule_step() {
    auto x = VALID(delta_rule_step);
    fulmen_step_call &step = x.call.attention;
    step.header = valid_header<fulmen_delta_rule_step_call>();
    step.batch = step.heads = step.query_heads = step.key_heads = step.value_heads = 1;
    step.key_size = step.value_size = 3;
    step.q = step.k = step.v = step.output = kHalves;
    step.state = kState;
    x.call.beta = kFloats;
    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.attention.value_size = 0);
    REFUSES(x, FULMEN_BAD_DTYPE, call.beta = kUnknown);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.beta.data = nullptr);
    REFUSES(x, FULMEN_BAD_DECAY,
            (call.attention.decay_v_form = FULMEN_DECAY_CHANNEL, call.attention.log_decay_v = kFloats));
    TAKES(x, (call.attention.batch = 0, call.beta.data = nullptr));
}

void check_tpa_decode() {
    typedef fulmen_tpa_decode_call Call;
    const int64_t lengths[] = {0, 5}, negative[] = {0, -1}, longer[] = {6, 0};
    auto x = VALID(tpa_decode);
    x.call.header = valid_header<Call>();
    x.call.batch = x.call.heads = x.call.query_rank = x.call.key_rank = x.call.value_rank = 2;
    x.call.tokens = 5;
    x.call.key_size = 3;
    x.call.value_size = 4;
    x.call.lengths = lengths;
    x.call.aq = x.call.ak = x.call.av = x.call.bq = x.call.bk = x.call.bv = x.call.output = kHalves;

    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.batch = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.tokens = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.heads = 0);
    for (auto size : {&Call::query_rank, &Call::key_rank, &Call::value_rank, &Call::key_size, &Call::value_size}) {
        REFUSES(x, FULMEN_BAD_SIZE, call.*size = 0);
        REFUSES(x, FULMEN_BAD_SIZE, call.*size = FULMEN_MAX_SIZE + 1);
    }
    for (auto factor : {&Call::aq, &Call::ak, &Call::av, &Call::bq, &Call::bk, &Call::bv}) {
        REFUSES(x, FULMEN_BAD_DTYPE, call.*factor = kFloats);
        REFUSES(x, FULMEN_MISSING_TENSOR, (call.*factor).data = nullptr);
    }
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    REFUSES(x, FULMEN_BAD_OPTION, call.split = -1);
    REFUSES(x, FULMEN_BAD_OPTION, call.split = FULMEN_SPLIT_SEQUENCE + 1);
    for (const int64_t *wrong : {negative, longer}) REFUSES(x, FULMEN_BAD_SEQUENCES, call.lengths = wrong);
    TAKES(x, call.lengths = nullptr);
    TAKES(x, (call.tokens = 0, call.lengths = nullptr, call.ak.data = nullptr));
}

template <class Call> void check_output_gate(Valid<Call> &x) {
    fulmen_output_gate_problem &p = x.call.problem;
    p.header = valid_header<Call>();
    p.batch = p.heads = 1;
    p.queries = 5;
    p.keys = 6;
    p.key_size = 3;
    p.value_size = 4;
    p.q = p.k = p.v = p.gate = kHalves;
    p.kv = kState;
    p.qkv = kFloats;

    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.batch = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.queries = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.keys = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.heads = 0);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.key_size = 0);
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.value_size = FULMEN_MAX_SIZE + 1);
    typedef fulmen_output_gate_problem Problem;
    for (auto tensor : {&Problem::q, &Problem::k, &Problem::v, &Problem::gate}) {
        REFUSES(x, FULMEN_BAD_DTYPE, call.problem.*tensor = kFloats);
        REFUSES(x, FULMEN_MISSING_TENSOR, (call.problem.*tensor).data = nullptr);
    }
    TAKES(x, call.problem.qkv = kHalves);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.qkv.dtype = FULMEN_FLOAT16);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.kv = kHalfState);
    TAKES(x, (call.problem.kv.data = nullptr, call.problem.qkv.data = nullptr));
    REFUSES(x, FULMEN_MISSING_TENSOR,
            (call.problem.batch = call.problem.queries = 1ll << 32, call.problem.q.data = nullptr));
}

void check_output_gate_forward() {
    auto x = VALID(output_gate_forward);
    x.call.output = kHalves;
    check_output_gate(x);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
}

void check_output_gate_backward() {
    typedef fulmen_output_gate_backward_call Call;
    auto x = VALID(output_gate_backward);
    x.call.grad_output = x.call.dq = x.call.dk = x.call.dv = x.call.dgate = kHalves;
    check_output_gate(x);
    for (auto gradient : {&Call::grad_output, &Call::dq, &Call::dk, &Call::dv, &Call::dgate}) {
        REFUSES(x, FULMEN_BAD_DTYPE, call.*gradient = kWrong);
        REFUSES(x, FULMEN_MISSING_TENSOR, (call.*gradient).data = nullptr);
    }
}

// What the whole and the step have in common: access(call) is where.
template <class Call, class Access> void check_convolution(Valid<Call> &x, Access access) {
    auto &p = access(x.call);
    p.header = valid_header<Call>();
    p.batch = 1;
    p.channels = 5;
    p.width = 4;
    p.state_width = 3;
    p.x = kHalves;
    p.weight = p.bias = kFloats;

    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, access(call).batch = -1);
    REFUSES(x, FULMEN_BAD_SIZE, access(call).channels = 0);
    REFUSES(x, FULMEN_BAD_SIZE, access(call).width = 0);
    REFUSES(x, FULMEN_BAD_SIZE, access(call).width = FULMEN_MAX_WIDTH + 1);
    REFUSES(x, FULMEN_BAD_SIZE, access(call).state_width = 2);
    REFUSES(x, FULMEN_BAD_OPTION, access(call).activation = FULMEN_SILU + 1);
    for (auto wrong : {&access(x.call).x, &access(x.call).weight, &access(x.call).bias}) {
        const fulmen_tensor before = *wrong;
        *wrong = kUnknown;
        REFUSES(x, FULMEN_BAD_DTYPE, (void)call);
        *wrong = before;
    }
    REFUSES(x, FULMEN_MISSING_TENSOR, access(call).x.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, access(call).weight.data = nullptr);
    TAKES(x, access(call).bias.data = nullptr);
}

template <class Call> void check_convolution_of_sequences(Valid<Call> &x) {
    static const int64_t bounds[] = {0, 2, 2, 6}, falling[] = {0, 3, 2, 6}, early[] = {0, 2, 2, 5};
    fulmen_causal_conv1d_problem &p = x.call.problem;
    p.tokens = 6;
    p.initial_state = kHalves;
    check_convolution(x, [](auto &call) -> auto & { return call.problem; });
    REFUSES(x, FULMEN_BAD_SIZE, call.problem.tokens = -1);
    REFUSES(x, FULMEN_BAD_DTYPE, call.problem.initial_state = kFloats);
    p.cu_seqlens = bounds;
    p.sequences = 3;
    TAKES(x, (void)call);
    REFUSES(x, FULMEN_BAD_SEQUENCES, call.problem.batch = 2);
    for (const int64_t *wrong : {falling, early}) REFUSES(x, FULMEN_BAD_SEQUENCES, call.problem.cu_seqlens = wrong);
}

void check_causal_conv1d_forward() {
    auto x = VALID(causal_conv1d_forward);
    x.call.output = x.call.final_state = kHalves;
    check_convolution_of_sequences(x);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.final_state = kWrong);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    TAKES(x, call.final_state.data = nullptr);
}

void check_causal_conv1d_backward() {
    typedef fulmen_causal_conv1d_backward_call Call;
    auto x = VALID(causal_conv1d_backward);
    x.call.grad_output = x.call.grad_state = x.call.dx = x.call.dinitial = kHalves;
    x.call.dweight = x.call.dbias = kFloats;
    check_convolution_of_sequences(x);
    for (auto gradient :
         {&Call::grad_output, &Call::grad_state, &Call::dx, &Call::dinitial, &Call::dweight, &Call::dbias}) {
        REFUSES(x, FULMEN_BAD_DTYPE, call.*gradient = kWrong);
        TAKES(x, (call.*gradient).data = nullptr);
    }
    REFUSES(x, FULMEN_BAD_DTYPE, call.dweight = kHalves);
}

void check_causal_conv1d_step() {
    auto x = VALID(causal_conv1d_step);
    x.call.state = kFloats;
    x.call.output = kHalves;
    check_convolution(x, [](auto &call) -> auto & { return call; });
    REFUSES(x, FULMEN_BAD_DTYPE, call.state = kUnknown);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.state.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    TAKES(x, (call.batch = 0, call.state.data = nullptr));
}

void check_rms_norm() {
    auto x = VALID(rms_norm);
    fulmen_rms_norm_call &c = x.call;
    c.header = valid_header<fulmen_rms_norm_call>();
    c.batch = c.tokens = c.heads = 1;
    c.size = 5;
    c.activation = FULMEN_SIGMOID;
    c.x = c.gate = c.output = kHalves;
    c.weight = kFloats;
    c.rates = memory;
    check_header(x);
    for (auto size : {&fulmen_rms_norm_call::batch, &fulmen_rms_norm_call::tokens, &fulmen_rms_norm_call::heads})
        REFUSES(x, FULMEN_BAD_SIZE, call.*size = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.size = 0);
    REFUSES(x, FULMEN_BAD_DTYPE, call.x = call.gate = call.output = kUnknown);
    REFUSES(x, FULMEN_BAD_DTYPE, call.gate = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.weight = kWrong);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kFloats);
    REFUSES(x, FULMEN_BAD_OPTION, call.activation = FULMEN_IDENTITY);
    REFUSES(x, FULMEN_BAD_OPTION, call.activation = FULMEN_SIGMOID + 1);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.x.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.weight.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    TAKES(x, (call.gate.data = nullptr, call.activation = FULMEN_IDENTITY));
    TAKES(x, call.rates = nullptr);
    TAKES(x, call.weight = kHalves);
    TAKES(x, (call.tokens = 0, call.x.data = call.output.data = nullptr));
}

void check_rms_norm_backward() {
    auto x = VALID(rms_norm_backward);
    fulmen_rms_norm_backward_call &c = x.call;
    c.header = valid_header<fulmen_rms_norm_backward_call>();
    c.batch = c.tokens = c.heads = 1;
    c.size = 5;
    c.activation = FULMEN_SIGMOID;
    c.weight_heads = 1;
    c.x = c.gate = c.grad_output = c.dx = c.dgate = kHalves;
    c.weight = kFloats;
    c.rates = c.dweight = memory;
    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.size = 0);
    REFUSES(x, FULMEN_BAD_OPTION, call.activation = FULMEN_IDENTITY);
    for (auto tensor : {&fulmen_rms_norm_backward_call::gate, &fulmen_rms_norm_backward_call::grad_output,
                        &fulmen_rms_norm_backward_call::dx, &fulmen_rms_norm_backward_call::dgate})
        REFUSES(x, FULMEN_BAD_DTYPE, call.*tensor = kFloats);
    for (auto tensor : {&fulmen_rms_norm_backward_call::x, &fulmen_rms_norm_backward_call::weight,
                        &fulmen_rms_norm_backward_call::grad_output, &fulmen_rms_norm_backward_call::dx,
                        &fulmen_rms_norm_backward_call::dgate})
        REFUSES(x, FULMEN_MISSING_TENSOR, (call.*tensor).data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.rates = nullptr);
    TAKES(x, (call.gate.data = call.dgate.data = nullptr, call.activation = FULMEN_IDENTITY));
    REFUSES(x, FULMEN_BAD_HEADS, (call.heads = 4, call.weight_heads = 2));
    TAKES(x, call.heads = call.weight_heads = 4);
    TAKES(x, call.dweight = nullptr);
    TAKES(x, call.weight = kHalves);
    TAKES(x, (call.tokens = 0, call.x.data = call.dx.data = nullptr, call.rates = nullptr));
}

void check_linear() {
    auto x = VALID(linear);
    fulmen_linear_call &c = x.call;
    c.header = valid_header<fulmen_linear_call>();
    c.rows = 2;
    c.inputs = c.outputs = 3;
    c.x = c.weight = c.bias = c.output = kHalves;
    check_header(x);
    REFUSES(x, FULMEN_BAD_SIZE, call.rows = -1);
    REFUSES(x, FULMEN_BAD_SIZE, call.inputs = 0);
    REFUSES(x, FULMEN_BAD_SIZE, call.outputs = 0);
    REFUSES(x, FULMEN_BAD_DTYPE, call.x = call.weight = call.bias = call.output = kUnknown);
    REFUSES(x, FULMEN_BAD_DTYPE, call.weight = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.bias = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kFloats);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.x.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.weight.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    TAKES(x, call.bias.data = nullptr);
    TAKES(x, (call.rows = 0, call.x.data = call.output.data = nullptr));
}

void check_matmul() {
    auto x = VALID(matmul);
    fulmen_matmul_call &c = x.call;
    c.header = valid_header<fulmen_matmul_call>();
    c.rows = c.columns = c.depth = 2;
    c.a = c.b = c.bias = c.output = kHalves;
    c.a.stride_token = c.b.stride_head = 1;
    check_header(x);
    for (auto size : {&fulmen_matmul_call::rows, &fulmen_matmul_call::columns, &fulmen_matmul_call::depth})
        REFUSES(x, FULMEN_BAD_SIZE, call.*size = -1);
    REFUSES(x, FULMEN_BAD_DTYPE, call.a.dtype = call.b.dtype = call.bias.dtype = call.output.dtype = 3);
    REFUSES(x, FULMEN_BAD_DTYPE, call.b.dtype = FULMEN_FLOAT32);
    REFUSES(x, FULMEN_BAD_DTYPE, call.bias = kFloats);
    REFUSES(x, FULMEN_BAD_DTYPE, call.output = kWrong);
    REFUSES(x, FULMEN_BAD_STATE, call.a.stride_token = 2);
    REFUSES(x, FULMEN_BAD_STATE, call.b.stride_head = 2);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.a.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.b.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    TAKES(x, call.bias.data = nullptr);
    TAKES(x, call.output = kFloats);
    TAKES(x, (call.depth = 0, call.a.data = call.b.data = nullptr));
    TAKES(x, (call.rows = 0, call.a.data = call.output.data = nullptr));
    TAKES(x, (call.columns = 0, call.b.data = call.output.data = nullptr));
}

void check_elementwise() {
    auto x = VALID(elementwise);
    fulmen_elementwise_call &c = x.call;
    c.header = valid_header<fulmen_elementwise_call>();
    c.batch = c.tokens = c.channels = 1;
    c.function = FULMEN_DIVIDE;
    c.a = c.output = kHalves;
    c.b = kFloats;
    check_header(x);
    for (auto size :
         {&fulmen_elementwise_call::batch, &fulmen_elementwise_call::tokens, &fulmen_elementwise_call::channels}) {
        REFUSES(x, FULMEN_BAD_SIZE, call.*size = -1);
        TAKES(x, (call.*size = 0, call.a.data = call.output.data = nullptr));
    }
    for (auto tensor : {&fulmen_elementwise_call::a, &fulmen_elementwise_call::b, &fulmen_elementwise_call::output})
        REFUSES(x, FULMEN_BAD_DTYPE, call.*tensor = kUnknown);
    REFUSES(x, FULMEN_BAD_OPTION, call.function = FULMEN_IDENTITY - 1);
    REFUSES(x, FULMEN_BAD_OPTION, call.function = FULMEN_SMALLER + 1);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.a.data = nullptr);
    REFUSES(x, FULMEN_MISSING_TENSOR, call.output.data = nullptr);
    TAKES(x, call.b = kAbsent);
}

// A program of two calls, the second of which was described without an address.
void check_programs() {
    struct {
        int64_t first_number;
        fulmen_linear_call first;
        int64_t second_number;
        fulmen_elementwise_call second;
    } words = {};
    words.first_number = fulmen_call_number("linear");
    words.second_number = fulmen_call_number("elementwise");
    words.first.header.bytes = sizeof words.first;
    words.first.rows = 0;
    words.first.inputs = words.first.outputs = 1;
    words.second.header.bytes = sizeof words.second;
    words.second.batch = words.second.tokens = words.second.channels = 1;
    words.second.output = kFloats;
    const fulmen_patch patch = {1, offsetof(fulmen_elementwise_call, a.data) / 8, 0, 0};
    const fulmen_program program = {sizeof program, 2, (const int64_t *)&words, 1, &patch};
    const fulmen_header header = valid_header<fulmen_header>();
    void *const tensors[] = {memory}, *const none[] = {nullptr};
    const auto run = [&](const fulmen_program &changed, void *const *at) {
        fulmen::called = "";
        return fulmen_run_program(&changed, &header, at);
    };
    CHECK(fulmen_call_number("nothing") == -1, "a call that there is not");
    CHECK(run(program, tensors) == FULMEN_OK && strcmp(fulmen::called, "elementwise") == 0, "%s", fulmen::called);
    CHECK(run(program, none) == FULMEN_MISSING_TENSOR && strcmp(fulmen::called, "linear") == 0, "%s", fulmen::called);
    fulmen_program changed = program;
    changed.bytes -= 8;
    CHECK(run(changed, tensors) == FULMEN_BAD_STRUCT, "the size of the program");
    fulmen_patch outside = patch;
    outside.word = sizeof(fulmen_elementwise_call) / 8;
    changed = program;
    changed.patch = &outside;
    CHECK(run(changed, tensors) == FULMEN_BAD_STRUCT, "a word after the last");
    words.second_number = words.first_number;
    CHECK(run(program, tensors) == FULMEN_BAD_STRUCT, "a number of another call");
    words.second_number = -1;
    CHECK(run(program, tensors) == FULMEN_BAD_STRUCT, "a number of none");
}

// The builds: this program has one.
void check_builds() {
    CHECK(fulmen_isa_count() == 1 && strcmp(fulmen_isa_name(0), "baseline") == 0, "%s", fulmen_isa_name(0));
    CHECK(fulmen_isa_supported(0) && fulmen_isa_current() == 0, "build %d", (int)fulmen_isa_current());
    for (const int64_t none : {(int64_t)-1, (int64_t)1, (int64_t)INT64_MAX}) {
        CHECK(!fulmen_isa_supported(none) && !fulmen_isa_select(none) && !fulmen_isa_self_check(none), "build %d",
              (int)none);
        CHECK(!*fulmen_isa_name(none), "%s", fulmen_isa_name(none));
    }
    for (int64_t status = FULMEN_GROWS; status <= FULMEN_BAD_STRUCT; ++status)
        CHECK(strcmp(fulmen_error_text(status), "unknown status") != 0, "status %d", (int)status);
    CHECK(strcmp(fulmen_error_text(1000), "unknown status") == 0, "%s", fulmen_error_text(1000));
}

}  // namespace

#define CHECK_CALL(name) check_##name();

int main() {
    FULMEN_CALLS(CHECK_CALL)
    check_programs();
    check_builds();
    return outcome();
}
