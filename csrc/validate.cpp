#include "validate.h"

#include "decay_form.h"

#include <initializer_list>

namespace fulmen {
namespace {

bool is_size(int64_t n) { return n >= 1 && n <= FULMEN_MAX_SIZE; }
bool is_dtype(int64_t dtype) { return dtype >= FULMEN_FLOAT32 && dtype <= FULMEN_FLOAT16; }
bool is_chunk_size(int64_t n, int64_t tokens) { return n >= 1 && n <= INT64_MAX - tokens; }  // the two may be added
bool divides(int64_t part, int64_t whole) { return part >= 1 && part <= whole && whole % part == 0; }

// A result or its gradient: absent, float32, or of the inputs' dtype.
bool fits(const fulmen_tensor &x, int64_t dtype) { return !x.data || x.dtype == dtype || x.dtype == FULMEN_FLOAT32; }
template <class T> bool is_float32(const T &x) { return !x.data || x.dtype == FULMEN_FLOAT32; }

int64_t invalid_decays(int64_t form, const fulmen_tensor &log_decay, int64_t form_v, const fulmen_tensor &log_decay_v) {
    if (!is_decay_form(form) || (decays(form_v) && !by_channel(form_v))) return FULMEN_BAD_DECAY;
    if ((decays(form) && !is_dtype(log_decay.dtype)) || (decays(form_v) && !is_dtype(log_decay_v.dtype)))
        return FULMEN_BAD_DTYPE;
    return FULMEN_OK;
}

// Of packed sequences, if they are.
template <class Problem> bool are_sequences(const Problem &p) {
    if (!p.cu_seqlens) return true;
    if (p.batch != 1 || p.sequences < 0 || p.cu_seqlens[0] != 0 || p.cu_seqlens[p.sequences] != p.tokens) return false;
    for (int64_t s = 0; s < p.sequences; ++s)
        if (p.cu_seqlens[s + 1] < p.cu_seqlens[s]) return false;
    return true;
}

int64_t invalid_problem(const fulmen_problem &p, bool has_query) {
    if (p.batch < 0 || p.tokens < 0 || p.heads < 1 || !is_size(p.key_size) || !is_size(p.value_size))
        return FULMEN_BAD_SIZE;
    if (!divides(p.query_heads, p.heads) || !divides(p.key_heads, p.heads) || !divides(p.value_heads, p.heads))
        return FULMEN_BAD_HEADS;
    if (!is_dtype(p.k.dtype) || p.v.dtype != p.k.dtype || (has_query && p.q.dtype != p.k.dtype))
        return FULMEN_BAD_DTYPE;
    if (p.schedule < FULMEN_AUTO || p.schedule > FULMEN_RECOMPUTE) return FULMEN_BAD_OPTION;
    if (!are_sequences(p)) return FULMEN_BAD_SEQUENCES;
    if (const int64_t status = invalid_decays(p.decay_form, p.log_decay, p.decay_v_form, p.log_decay_v)) return status;
    if (!is_float32(p.initial_state)) return FULMEN_BAD_DTYPE;
    if (p.batch == 0 || p.tokens == 0) return FULMEN_OK;
    if (!p.k.data || !p.v.data || (has_query && !p.q.data)) return FULMEN_MISSING_TENSOR;
    if ((decays(p.decay_form) && !p.log_decay.data) || (decays(p.decay_v_form) && !p.log_decay_v.data))
        return FULMEN_MISSING_TENSOR;
    return FULMEN_OK;
}

// What a norm and its gradients have in common.
template <class Call> bool is_empty(const Call &c) { return c.batch == 0 || c.tokens == 0 || c.heads == 0; }
template <class Call> int64_t invalid_norm(const Call &c) {
    if (c.batch < 0 || c.tokens < 0 || c.heads < 0 || c.size < 1) return FULMEN_BAD_SIZE;
    if (!is_dtype(c.x.dtype) || (c.gate.data && c.gate.dtype != c.x.dtype) || !fits(c.weight, c.x.dtype))
        return FULMEN_BAD_DTYPE;
    const bool is_activation = c.activation == FULMEN_SILU || c.activation == FULMEN_SIGMOID;
    return c.gate.data && !is_activation ? FULMEN_BAD_OPTION : FULMEN_OK;
}

// Of q, k, v, and of what they give.
template <class Call> int64_t invalid_attention_forward(const fulmen_problem &p, const Call &call) {
    if (const int64_t status = invalid_problem(p, true)) return status;
    if (!fits(call.output, p.q.dtype) || !is_float32(call.final_state)) return FULMEN_BAD_DTYPE;
    return call.output.data || p.batch == 0 || p.tokens == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

template <class Call> int64_t invalid_attention_backward(const fulmen_problem &p, const Call &call) {
    if (const int64_t status = invalid_problem(p, true)) return status;
    for (const fulmen_tensor *x : {&call.grad_output, &call.dq, &call.dk, &call.dv})
        if (!fits(*x, p.q.dtype)) return FULMEN_BAD_DTYPE;
    return is_float32(call.grad_state) ? FULMEN_OK : FULMEN_BAD_DTYPE;
}

int64_t invalid_delta_rule(const fulmen_tensor &beta, int64_t decay_v_form, bool empty) {
    if (decays(decay_v_form)) return FULMEN_BAD_DECAY;
    if (!is_dtype(beta.dtype)) return FULMEN_BAD_DTYPE;
    return beta.data || empty ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}
int64_t invalid_delta_rule(const fulmen_delta_rule_problem &p) {
    return invalid_delta_rule(p.beta, p.attention.decay_v_form, p.attention.batch == 0 || p.attention.tokens == 0);
}

template <class Call> int64_t invalid_gradients(const fulmen_problem &p, const Call &call) {
    if (!is_float32(call.dlog_decay) || !is_float32(call.dlog_decay_v) || !is_float32(call.dinitial))
        return FULMEN_BAD_DTYPE;
    if ((call.dlog_decay.data && !decays(p.decay_form)) || (call.dlog_decay_v.data && !decays(p.decay_v_form)))
        return FULMEN_BAD_DECAY;
    return FULMEN_OK;
}

}  // namespace

int64_t invalid(const fulmen_attention_forward_call &call) {
    const fulmen_problem &p = call.problem;
    if (const int64_t status = invalid_attention_forward(p, call)) return status;
    if (!call.value_weights.data && !call.skip.data) return FULMEN_OK;
    for (const fulmen_tensor *x : {&call.value_weights, &call.skip})
        if (x->data && !is_dtype(x->dtype)) return FULMEN_BAD_DTYPE;
    const bool can_weigh = !by_channel(p.decay_form) && !decays(p.decay_v_form) && p.schedule != FULMEN_RECURRENT;
    return can_weigh ? FULMEN_OK : FULMEN_BAD_OPTION;
}

int64_t invalid(const fulmen_attention_backward_call &call) {
    if (const int64_t status = invalid_attention_backward(call.problem, call)) return status;
    return invalid_gradients(call.problem, call);
}

int64_t invalid(const fulmen_delta_rule_forward_call &call) {
    if (const int64_t status = invalid_attention_forward(call.problem.attention, call)) return status;
    return invalid_delta_rule(call.problem);
}

int64_t invalid(const fulmen_delta_rule_backward_call &call) {
    const fulmen_problem &p = call.problem.attention;
    if (const int64_t status = invalid_attention_backward(p, call)) return status;
    if (!is_float32(call.dbeta) || !is_float32(call.dlog_decay) || !is_float32(call.dinitial)) return FULMEN_BAD_DTYPE;
    if (call.dlog_decay.data && !decays(p.decay_form)) return FULMEN_BAD_DECAY;
    return invalid_delta_rule(call.problem);
}

int64_t invalid(const fulmen_states_forward_call &call) {
    if (const int64_t status = invalid_problem(call.problem, false)) return status;
    if (!is_chunk_size(call.chunk_size, call.problem.tokens)) return FULMEN_BAD_SIZE;
    if (call.problem.cu_seqlens) return FULMEN_BAD_SEQUENCES;
    return call.states || call.problem.batch == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_states_backward_call &call) {
    const fulmen_problem &p = call.problem;
    if (const int64_t status = invalid_problem(p, false)) return status;
    if (!is_chunk_size(call.chunk_size, p.tokens)) return FULMEN_BAD_SIZE;
    if (p.cu_seqlens) return FULMEN_BAD_SEQUENCES;
    if ((!call.states || !call.grad_states) && p.batch > 0) return FULMEN_MISSING_TENSOR;
    for (const fulmen_tensor *x : {&call.dk, &call.dv})
        if (!fits(*x, p.k.dtype)) return FULMEN_BAD_DTYPE;
    return invalid_gradients(p, call);
}

int64_t invalid(const fulmen_step_call &call) {
    const fulmen_step_call &c = call;
    if (c.batch < 0 || c.heads < 1 || !is_size(c.key_size) || !is_size(c.value_size)) return FULMEN_BAD_SIZE;
    if (!divides(c.query_heads, c.heads) || !divides(c.key_heads, c.heads) || !divides(c.value_heads, c.heads))
        return FULMEN_BAD_HEADS;
    if (!is_dtype(c.q.dtype) || c.k.dtype != c.q.dtype || c.v.dtype != c.q.dtype || !fits(c.output, c.q.dtype))
        return FULMEN_BAD_DTYPE;
    if (const int64_t status = invalid_decays(c.decay_form, c.log_decay, c.decay_v_form, c.log_decay_v)) return status;
    if (!is_dtype(c.state.dtype)) return FULMEN_BAD_DTYPE;
    if (c.state.stride_row != 1 && c.state.stride_column != 1) return FULMEN_BAD_STATE;
    if (c.batch == 0) return FULMEN_OK;
    if (!c.q.data || !c.k.data || !c.v.data || !c.state.data || !c.output.data ||
        (decays(c.decay_form) && !c.log_decay.data) || (decays(c.decay_v_form) && !c.log_decay_v.data))
        return FULMEN_MISSING_TENSOR;
    return FULMEN_OK;
}

int64_t invalid(const fulmen_delta_rule_step_call &call) {
    if (const int64_t status = invalid(call.attention)) return status;
    return invalid_delta_rule(call.beta, call.attention.decay_v_form, call.attention.batch == 0);
}

int64_t invalid(const fulmen_tpa_decode_call &call) {
    const fulmen_tpa_decode_call &c = call;
    if (c.batch < 0 || c.tokens < 0 || c.heads < 1) return FULMEN_BAD_SIZE;
    for (const int64_t size : {c.query_rank, c.key_rank, c.value_rank, c.key_size, c.value_size})
        if (!is_size(size)) return FULMEN_BAD_SIZE;
    for (const fulmen_tensor *x : {&c.ak, &c.av, &c.bq, &c.bk, &c.bv})
        if (x->dtype != c.aq.dtype) return FULMEN_BAD_DTYPE;
    if (!is_dtype(c.aq.dtype) || !fits(c.output, c.aq.dtype)) return FULMEN_BAD_DTYPE;
    if (c.split < FULMEN_SPLIT_AUTO || c.split > FULMEN_SPLIT_SEQUENCE) return FULMEN_BAD_OPTION;
    if (c.lengths)
        for (int64_t b = 0; b < c.batch; ++b)
            if (c.lengths[b] < 0 || c.lengths[b] > c.tokens) return FULMEN_BAD_SEQUENCES;
    if (c.batch == 0) return FULMEN_OK;
    if (!c.aq.data || !c.bq.data || !c.output.data) return FULMEN_MISSING_TENSOR;
    if (c.tokens > 0 && (!c.ak.data || !c.av.data || !c.bk.data || !c.bv.data)) return FULMEN_MISSING_TENSOR;
    return FULMEN_OK;
}

namespace {

int64_t invalid_gate(const fulmen_output_gate_problem &p) {
    if (p.batch < 0 || p.queries < 0 || p.keys < 0 || p.heads < 1 || !is_size(p.key_size) || !is_size(p.value_size))
        return FULMEN_BAD_SIZE;
    if (!is_dtype(p.q.dtype) || p.k.dtype != p.q.dtype || p.v.dtype != p.q.dtype || p.gate.dtype != p.q.dtype ||
        !(is_float32(p.qkv) || (p.qkv.dtype == FULMEN_BFLOAT16 && p.q.dtype == FULMEN_BFLOAT16)) || !is_float32(p.kv))
        return FULMEN_BAD_DTYPE;
    if (p.batch > 0 && ((p.queries > 0 && (!p.q.data || !p.gate.data)) || (p.keys > 0 && (!p.k.data || !p.v.data))))
        return FULMEN_MISSING_TENSOR;
    return FULMEN_OK;
}

}  // namespace

int64_t invalid(const fulmen_output_gate_forward_call &call) {
    const fulmen_output_gate_problem &p = call.problem;
    if (const int64_t status = invalid_gate(p)) return status;
    if (!fits(call.output, p.q.dtype)) return FULMEN_BAD_DTYPE;
    return call.output.data || p.batch == 0 || p.queries == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_output_gate_backward_call &call) {
    const fulmen_output_gate_problem &p = call.problem;
    if (const int64_t status = invalid_gate(p)) return status;
    for (const fulmen_tensor *x : {&call.grad_output, &call.dq, &call.dk, &call.dv, &call.dgate})
        if (!fits(*x, p.q.dtype)) return FULMEN_BAD_DTYPE;
    const bool queries = call.grad_output.data && call.dq.data && call.dgate.data;
    const bool keys = call.dk.data && call.dv.data;
    const bool complete = (queries || p.queries == 0) && (keys || p.keys == 0);
    return complete || p.batch == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

namespace {

template <class Call> int64_t invalid_convolution(const Call &c) {
    if (c.batch < 0 || c.channels < 1 || c.width < 1 || c.width > FULMEN_MAX_WIDTH || c.state_width < c.width - 1)
        return FULMEN_BAD_SIZE;
    if (!is_dtype(c.x.dtype) || !is_dtype(c.weight.dtype) || (c.bias.data && !is_dtype(c.bias.dtype)))
        return FULMEN_BAD_DTYPE;
    if (c.activation != FULMEN_IDENTITY && c.activation != FULMEN_SILU) return FULMEN_BAD_OPTION;
    return c.weight.data || c.batch == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid_convolution_of_sequences(const fulmen_causal_conv1d_problem &p) {
    if (const int64_t status = invalid_convolution(p)) return status;
    if (p.tokens < 0) return FULMEN_BAD_SIZE;
    if (!are_sequences(p)) return FULMEN_BAD_SEQUENCES;
    if (p.initial_state.data && p.initial_state.dtype != p.x.dtype) return FULMEN_BAD_DTYPE;
    return p.x.data || p.batch == 0 || p.tokens == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

}  // namespace

int64_t invalid(const fulmen_causal_conv1d_forward_call &call) {
    const fulmen_causal_conv1d_problem &p = call.problem;
    if (const int64_t status = invalid_convolution_of_sequences(p)) return status;
    if (!fits(call.output, p.x.dtype) || !fits(call.final_state, p.x.dtype)) return FULMEN_BAD_DTYPE;
    return call.output.data || p.batch == 0 || p.tokens == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_causal_conv1d_backward_call &call) {
    const fulmen_causal_conv1d_problem &p = call.problem;
    if (const int64_t status = invalid_convolution_of_sequences(p)) return status;
    for (const fulmen_tensor *x : {&call.grad_output, &call.grad_state, &call.dx, &call.dinitial})
        if (!fits(*x, p.x.dtype)) return FULMEN_BAD_DTYPE;
    return is_float32(call.dweight) && is_float32(call.dbias) ? FULMEN_OK : FULMEN_BAD_DTYPE;
}

int64_t invalid(const fulmen_causal_conv1d_step_call &call) {
    if (const int64_t status = invalid_convolution(call)) return status;
    if (!is_dtype(call.state.dtype) || !fits(call.output, call.x.dtype)) return FULMEN_BAD_DTYPE;
    const bool complete = call.x.data && call.output.data && (call.state.data || call.state_width == 0);
    return complete || call.batch == 0 ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_rms_norm_call &c) {
    if (const int64_t status = invalid_norm(c)) return status;
    if (c.output.dtype != c.x.dtype) return FULMEN_BAD_DTYPE;
    return is_empty(c) || (c.x.data && c.weight.data && c.output.data) ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_rms_norm_backward_call &c) {
    if (const int64_t status = invalid_norm(c)) return status;
    if (c.grad_output.dtype != c.x.dtype || c.dx.dtype != c.x.dtype || (c.gate.data && c.dgate.dtype != c.x.dtype))
        return FULMEN_BAD_DTYPE;
    if (c.weight_heads != 1 && c.weight_heads != c.heads) return FULMEN_BAD_HEADS;
    const bool complete = c.x.data && c.weight.data && c.grad_output.data && c.rates && c.dx.data;
    return is_empty(c) || (complete && (!c.gate.data || c.dgate.data)) ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_linear_call &c) {
    if (c.rows < 0 || c.inputs < 1 || c.outputs < 1) return FULMEN_BAD_SIZE;
    if (!is_dtype(c.x.dtype) || c.weight.dtype != c.x.dtype || (c.bias.data && c.bias.dtype != c.x.dtype) ||
        c.output.dtype != c.x.dtype)
        return FULMEN_BAD_DTYPE;
    return c.rows == 0 || (c.x.data && c.weight.data && c.output.data) ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_matmul_call &c) {
    if (c.rows < 0 || c.columns < 0 || c.depth < 0) return FULMEN_BAD_SIZE;
    if (!is_dtype(c.a.dtype) || c.b.dtype != c.a.dtype || (c.bias.data && c.bias.dtype != c.a.dtype) ||
        !fits(c.output, c.a.dtype))
        return FULMEN_BAD_DTYPE;
    for (const fulmen_tensor *x : {&c.a, &c.b})
        if (x->stride_token != 1 && x->stride_head != 1) return FULMEN_BAD_STATE;
    if (c.rows == 0 || c.columns == 0) return FULMEN_OK;
    const bool factors = c.depth == 0 || (c.a.data && c.b.data);
    return factors && c.output.data ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

int64_t invalid(const fulmen_elementwise_call &c) {
    if (c.batch < 0 || c.tokens < 0 || c.channels < 0) return FULMEN_BAD_SIZE;
    if (!is_dtype(c.a.dtype) || (c.b.data && !is_dtype(c.b.dtype)) || !is_dtype(c.output.dtype))
        return FULMEN_BAD_DTYPE;
    if (c.function < FULMEN_IDENTITY || c.function > FULMEN_SMALLER) return FULMEN_BAD_OPTION;
    const bool empty = c.batch == 0 || c.tokens == 0 || c.channels == 0;
    return empty || (c.a.data && c.output.data) ? FULMEN_OK : FULMEN_MISSING_TENSOR;
}

}  // namespace fulmen
