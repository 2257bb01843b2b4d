#include "self_check.h"
#include "self_check_inputs.h"

namespace fulmen {
namespace {

// N tokens. Without beta it is linear attention, with it the delta rule.
struct Tokens {
    std::vector<float> q, k, v, g;  // g is the gradient of the output
    std::vector<float> log_decay;   // one for each channel
    std::vector<float> beta;
};

// sum over t of o_t . g_t, by the recurrence in double; all outputs, and the states after 0 to N tokens, if wanted.
double loss(const Tokens &x, std::vector<double> *outputs = nullptr, std::vector<double> *states = nullptr) {
    std::vector<double> state((size_t)(D * E), 0.0);
    if (states) *states = state;
    double total = 0;
    for (int64_t t = 0; t < N; ++t) {
        const float *q = &x.q[(size_t)(t * D)], *k = &x.k[(size_t)(t * D)], *a = &x.log_decay[(size_t)(t * D)];
        const float *v = &x.v[(size_t)(t * E)], *g = &x.g[(size_t)(t * E)];
        double recalled[E] = {}, output[E] = {};
        for (int64_t d = 0; d < D; ++d) {
            const double factor = exp((double)a[d]);
            double *const row = &state[(size_t)(d * E)];
            for (int64_t e = 0; e < E; ++e) recalled[e] += k[d] * (row[e] *= factor);
        }
        double written[E];
        for (int64_t e = 0; e < E; ++e) written[e] = x.beta.empty() ? v[e] : x.beta[(size_t)t] * (v[e] - recalled[e]);
        for (int64_t d = 0; d < D; ++d) {
            double *const row = &state[(size_t)(d * E)];
            for (int64_t e = 0; e < E; ++e) output[e] += q[d] * (row[e] += k[d] * written[e]);
        }
        for (int64_t e = 0; e < E; ++e) total += output[e] * g[e];
        if (outputs) outputs->insert(outputs->end(), output, output + E);
        if (states) states->insert(states->end(), state.begin(), state.end());
    }
    return total;
}

// A recurrence on the same numbers. The gradient of a decay is requested in float32 alone: without it, bfloat16 may be
// multiplied in pairs. Results are float32 for either dtype.
struct Recurrence {
    int64_t dtype, form;
    Input q, k, v, g;
    Tokens x;
    std::vector<float> dq, dk, dv, dlog_decay, dbeta;

    Recurrence(int64_t dtype, int64_t form, bool delta)
        : dtype(dtype),
          form(form),
          q(N, D, 1, dtype),
          k(N, D, 2, dtype, delta ? 0.25f : 1.0f),  // of longer ones, the delta rule's state grows without bound
          v(N, E, 3, dtype),
          g(N, E, 4, dtype),
          x{q.values, k.values, v.values, g.values, numbers(N * D, 5), delta ? numbers(N, 6) : std::vector<float>()},
          dq(x.q.size()),
          dk(x.k.size()),
          dv(x.v.size()),
          dlog_decay(x.log_decay.size()),
          dbeta(x.beta.size()) {
        for (float &b : x.beta) b = (b + 1) * 0.5f;
        for (int64_t i = 0; i < N * D; ++i) {
            const int64_t of_token = i / D * D;
            float &a = x.log_decay[(size_t)i];
            if (form == FULMEN_DECAY_CHANNEL || i == of_token) a = (a - 1) * 0.5f;
            if (form == FULMEN_DECAY_TOKEN) a = x.log_decay[(size_t)of_token];
        }
    }

    bool wants_decay() const { return dtype == FULMEN_FLOAT32 && form == FULMEN_DECAY_CHANNEL; }
    fulmen_tensor log_decay(int64_t t = 0) { return {x.log_decay.data() + t * D, FULMEN_FLOAT32, 0, D, 0}; }

    fulmen_problem problem(const fulmen_header &header) {
        fulmen_problem p = {};
        p.header = header;
        p.batch = p.heads = p.query_heads = p.key_heads = p.value_heads = 1;
        p.tokens = N;
        p.key_size = D;
        p.value_size = E;
        p.decay_form = form;
        p.scale = 1;
        p.q = q.tensor(), p.k = k.tensor(), p.v = v.tensor();
        p.log_decay = log_decay();
        return p;
    }
    template <class Call> void request_gradients(Call &call) {
        call.dk = tensor(dk, D);
        call.dv = tensor(dv, E);
        if (wants_decay()) call.dlog_decay = tensor(dlog_decay, D);
    }

    // One directional derivative along all inputs at once, by central differences; loss() is computed from x.
    template <class Loss> bool gradients_are_right(Loss loss) {
        struct Differentiated {
            std::vector<float> &x, &gradient;
        } inputs[] = {{x.q, dq}, {x.k, dk}, {x.v, dv}, {x.log_decay, dlog_decay}, {x.beta, dbeta}};
        const Tokens original = x;
        double predicted = 0, sides[2];
        for (int side = 0; side < 2; ++side) {
            uint32_t seed = 7;
            for (const Differentiated &input : inputs) {
                if (&input.x == &x.log_decay && !wants_decay()) continue;
                const std::vector<float> direction = numbers((int64_t)input.x.size(), seed++);
                for (size_t i = 0; i < direction.size(); ++i) {
                    input.x[i] += (side ? 1 : -1) * 0.00390625f * direction[i];
                    if (side) predicted += (double)input.gradient[i] * direction[i];
                }
            }
            sides[side] = loss();
            x = original;
        }
        return fabs((sides[1] - sides[0]) / 0.0078125 - predicted) <= larger_tolerance(dtype) * (1 + fabs(predicted));
    }
};

bool are_close(const std::vector<float> &found, const std::vector<double> &expected, int64_t dtype) {
    for (size_t i = 0; i < found.size(); ++i)
        if (!close(found[i], expected[i], dtype)) return false;
    return true;
}

bool attention_is_right(const Kernels &kernels, int64_t dtype, int64_t form) {
    Recurrence r(dtype, form, false);
    std::vector<float> o((size_t)(N * E));
    std::vector<double> outputs;
    fulmen_attention_forward_call forward = {};
    forward.problem = r.problem(header_of(forward));
    forward.output = tensor(o, E);
    fulmen_attention_backward_call backward = {};
    backward.problem = r.problem(header_of(backward));
    backward.grad_output = r.g.tensor();
    backward.dq = tensor(r.dq, D);
    r.request_gradients(backward);
    if (kernels.attention_forward(forward) || kernels.attention_backward(backward)) return false;
    loss(r.x, &outputs);
    return are_close(o, outputs, dtype) && r.gradients_are_right([&] { return loss(r.x); });
}

bool delta_rule_is_right(const Kernels &kernels, int64_t dtype, int64_t form) {
    Recurrence r(dtype, form, true);
    std::vector<float> o((size_t)(N * E));
    std::vector<double> outputs;
    fulmen_delta_rule_forward_call forward = {};
    forward.problem = {r.problem(header_of(forward)), tensor(r.x.beta, 1), 0};
    forward.output = tensor(o, E);
    fulmen_delta_rule_backward_call backward = {};
    backward.problem = {r.problem(header_of(backward)), tensor(r.x.beta, 1), 0};
    backward.grad_output = r.g.tensor();
    backward.dq = tensor(r.dq, D);
    backward.dbeta = tensor(r.dbeta, 1);
    r.request_gradients(backward);
    if (kernels.delta_rule_forward(forward) || kernels.delta_rule_backward(backward)) return false;
    loss(r.x, &outputs);
    return are_close(o, outputs, dtype) && r.gradients_are_right([&] { return loss(r.x); });
}

// The states at three boundaries, and the gradients of a sum of all their elements, each with a weight.
bool states_are_right(const Kernels &kernels, int64_t dtype, int64_t form) {
    constexpr int64_t kBoundaries[] = {0, 20, N};
    Recurrence r(dtype, form, false);
    std::vector<float> found((size_t)(3 * D * E)), weights = numbers(3 * D * E, 8);
    auto expected = [&] {
        std::vector<double> states, some;
        loss(r.x, nullptr, &states);
        for (const int64_t t : kBoundaries)
            some.insert(some.end(), &states[(size_t)(t * D * E)], &states[(size_t)(t * D * E)] + D * E);
        return some;
    };
    fulmen_states_forward_call forward = {};
    forward.problem = r.problem(header_of(forward));
    forward.chunk_size = kBoundaries[1];
    forward.states = found.data();
    forward.stride_chunk = D * E;
    fulmen_states_backward_call backward = {};
    backward.problem = r.problem(header_of(backward));
    backward.chunk_size = kBoundaries[1];
    backward.states = found.data();
    backward.grad_states = weights.data();
    backward.stride_chunk = backward.grad_stride_chunk = D * E;
    r.request_gradients(backward);
    if (kernels.states_forward(forward) || kernels.states_backward(backward)) return false;
    return are_close(found, expected(), dtype) && r.gradients_are_right([&] {
        double sum = 0;
        const std::vector<double> states = expected();
        for (size_t i = 0; i < states.size(); ++i) sum += weights[i] * states[i];
        return sum;
    });
}

// One token after the other. `step` is in `call`, which a kernel takes.
template <class Call>
bool steps_are_right(int64_t (*kernel)(const Call &), Call &call, fulmen_step_call &step, fulmen_tensor *beta,
                     Recurrence &r) {
    std::vector<float> o((size_t)(N * E)), state((size_t)(D * E));
    std::vector<double> outputs;
    step.header = header_of(call);
    step.batch = step.heads = step.query_heads = step.key_heads = step.value_heads = 1;
    step.key_size = D;
    step.value_size = E;
    step.decay_form = r.form;
    step.scale = 1;
    step.state = {state.data(), FULMEN_FLOAT32, 0, 0, E, 1};
    for (int64_t t = 0; t < N; ++t) {
        step.q = r.q.tensor(t), step.k = r.k.tensor(t), step.v = r.v.tensor(t);
        step.log_decay = r.log_decay(t);
        step.output = {o.data() + t * E, FULMEN_FLOAT32, 0, 0, 0};
        if (beta) *beta = {r.x.beta.data() + t, FULMEN_FLOAT32, 0, 0, 0};
        if (kernel(call)) return false;
    }
    loss(r.x, &outputs);
    return are_close(o, outputs, FULMEN_FLOAT32);  // also for bfloat16 inputs, which it converts
}

bool steps_are_right(const Kernels &kernels, int64_t dtype, int64_t form) {
    Recurrence attention(dtype, form, false), delta(dtype, form, true);
    fulmen_step_call step = {};
    fulmen_delta_rule_step_call delta_step = {};
    return steps_are_right(kernels.step, step, step, nullptr, attention) &&
           steps_are_right(kernels.delta_rule_step, delta_step, delta_step.attention, &delta_step.beta, delta);
}

}  // namespace

bool recurrences_are_right(const Kernels &kernels, int64_t dtype) {
    for (const int64_t form : {FULMEN_DECAY_TOKEN, FULMEN_DECAY_CHANNEL})
        if (!attention_is_right(kernels, dtype, form) || !delta_rule_is_right(kernels, dtype, form) ||
            !states_are_right(kernels, dtype, form) || !steps_are_right(kernels, dtype, form))
            return false;
    return true;
}

}  // namespace fulmen
