#include "self_check.h"

#include <math.h>
#include <string.h>

#include <vector>

namespace fulmen {
namespace {

constexpr int64_t N = 37, D = 20, E = 24;  // ragged on purpose

// Numbers in [-1, 1) that are the same everywhere.
std::vector<float> numbers(int64_t count, uint32_t seed) {
    std::vector<float> x((size_t)count);
    for (float &value : x) {
        seed = seed * 1664525u + 1013904223u;
        value = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    return x;
}

// sum over t of o_t . g_t, by the recurrence in double.
double loss(const std::vector<float> &q, const std::vector<float> &k, const std::vector<float> &v,
            const std::vector<float> &log_decay, const std::vector<float> &g, std::vector<double> *output) {
    std::vector<double> state((size_t)(D * E), 0.0);
    double total = 0;
    for (int64_t t = 0; t < N; ++t)
        for (int64_t e = 0; e < E; ++e) {
            double o = 0;
            for (int64_t d = 0; d < D; ++d) {
                double &s = state[(size_t)(d * E + e)];
                s = s * exp((double)log_decay[(size_t)(t * D + d)]) +
                    (double)k[(size_t)(t * D + d)] * v[(size_t)(t * E + e)];
                o += q[(size_t)(t * D + d)] * s;
            }
            total += o * g[(size_t)(t * E + e)];
            if (output) (*output)[(size_t)(t * E + e)] = o;
        }
    return total;
}

fulmen_tensor tensor(std::vector<float> &x, int64_t size) { return {x.data(), FULMEN_FLOAT32, 0, size, 0}; }

// Every call of a check in turn has all of it.
void *allocate(int64_t bytes) {
    static thread_local std::vector<char> memory;
    memory.resize((size_t)bytes + 64);
    return (void *)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

template <class Call> fulmen_header header_of(const Call &) {
    return {sizeof(Call), FULMEN_VERSION, 1, nullptr, 0, allocate};
}

// Factors of bfloat16 products are rounded to 8 bits.
double tolerance(int64_t dtype) { return dtype == FULMEN_FLOAT32 ? 1e-4 : 3e-2; }
double larger_tolerance(int64_t dtype) { return fmax(5e-3, tolerance(dtype)); }  // of a quotient of differences
bool close(double a, double b, int64_t dtype = FULMEN_FLOAT32) {
    return fabs(a - b) <= tolerance(dtype) * (1 + fabs(b));
}

// Tensor-product attention with ragged sizes and ranks above one, against the plain formula.
bool tpa_decode_is_right(const Kernels &kernels) {
    constexpr int64_t M = 71, H = 5, R = 3, Rk = 2, Rv = 1;
    std::vector<float> aq = numbers(H * R, 7), ak = numbers(M * H * Rk, 8), av = numbers(M * H * Rv, 9);
    std::vector<float> bq = numbers(R * D, 10), bk = numbers(M * Rk * D, 11), bv = numbers(M * Rv * E, 12);
    std::vector<float> o((size_t)(H * E));
    auto factor = [](std::vector<float> &x, int64_t rows, int64_t columns) {
        return fulmen_tensor{x.data(), FULMEN_FLOAT32, 0, rows * columns, columns};
    };
    fulmen_tpa_decode_call call = {};
    call.header = header_of(call);
    call.batch = 1;
    call.tokens = M;
    call.heads = H;
    call.query_rank = R;
    call.key_rank = Rk;
    call.value_rank = Rv;
    call.key_size = D;
    call.value_size = E;
    call.scale = 2;
    call.aq = factor(aq, H, R);
    call.ak = factor(ak, H, Rk);
    call.av = factor(av, H, Rv);
    call.bq = factor(bq, R, D);
    call.bk = factor(bk, Rk, D);
    call.bv = factor(bv, Rv, E);
    call.output = factor(o, H, E);
    if (kernels.tpa_decode(call)) return false;

    for (int64_t h = 0; h < H; ++h) {
        double sum = 0, values[E] = {};
        for (int64_t m = 0; m < M; ++m) {
            double score = 0;
            for (int64_t d = 0; d < D; ++d) {
                double q = 0, k = 0;
                for (int64_t r = 0; r < R; ++r) q += (double)aq[(size_t)(h * R + r)] * bq[(size_t)(r * D + d)] / R;
                for (int64_t r = 0; r < Rk; ++r)
                    k += (double)ak[(size_t)((m * H + h) * Rk + r)] * bk[(size_t)((m * Rk + r) * D + d)] / Rk;
                score += call.scale * q * k;
            }
            sum += exp(score);
            for (int64_t e = 0; e < E; ++e) values[e] += exp(score) * av[(size_t)(m * H + h)] * bv[(size_t)(m * E + e)];
        }
        for (int64_t e = 0; e < E; ++e)
            if (!close(o[(size_t)(h * E + e)], values[e] / sum)) return false;
    }
    return true;
}

// A float32 input, or the same rounded to multiples of 1/64, which bfloat16 has, in both.
struct Input {
    std::vector<float> values;
    std::vector<uint16_t> halves;
    int64_t size, dtype;
    Input(int64_t size, uint32_t seed, int64_t dtype) : values(numbers(N * size, seed)), size(size), dtype(dtype) {
        if (dtype == FULMEN_FLOAT32) return;
        for (float &x : values) {
            x = rintf(x * 64) / 64;
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            halves.push_back((uint16_t)(bits >> 16));
        }
    }
    fulmen_tensor tensor() {
        return {dtype == FULMEN_FLOAT32 ? (void *)values.data() : (void *)halves.data(), dtype, 0, size, 0};
    }
};

// The output gate on the same numbers: q, k, v as they are, g as the gate and as the gradient of the output. Results
// are float32 for either dtype.
bool gate_is_right(const Kernels &kernels, int64_t dtype) {
    Input given[] = {{D, 1, dtype}, {D, 2, dtype}, {E, 3, dtype}, {E, 4, dtype}};
    const std::vector<float> &q = given[0].values, &k = given[1].values, &v = given[2].values, &g = given[3].values;
    std::vector<float> o(g.size()), dq(q.size()), dk(k.size()), dv(v.size()), dg(g.size());
    fulmen_output_gate_forward_call forward = {};
    fulmen_output_gate_problem &p = forward.problem;
    p.header = header_of(forward);
    p.batch = p.heads = 1;
    p.queries = p.keys = N;
    p.key_size = D;
    p.value_size = E;
    p.q = given[0].tensor(), p.k = given[1].tensor(), p.v = given[2].tensor(), p.gate = given[3].tensor();
    forward.output = tensor(o, E);
    fulmen_output_gate_backward_call backward = {p, p.gate, tensor(dq, D), tensor(dk, D), tensor(dv, E), tensor(dg, E)};
    if (kernels.output_gate_forward(forward) || kernels.output_gate_backward(backward)) return false;

    // With dkv = sum over n of q (g g)^T, all in double: o = g (q kv), dq = (g g) kv^T, dk = v dkv^T, dv = k dkv.
    std::vector<double> kv((size_t)(D * E), 0.0), dkv(kv);
    for (int64_t t = 0; t < N; ++t)
        for (int64_t d = 0; d < D; ++d)
            for (int64_t e = 0; e < E; ++e) {
                const double gate = g[(size_t)(t * E + e)];
                kv[(size_t)(d * E + e)] += (double)k[(size_t)(t * D + d)] * v[(size_t)(t * E + e)];
                dkv[(size_t)(d * E + e)] += q[(size_t)(t * D + d)] * gate * gate;
            }
    for (int64_t t = 0; t < N; ++t) {
        for (int64_t e = 0; e < E; ++e) {
            double qkv = 0, of_v = 0;
            for (int64_t d = 0; d < D; ++d) {
                qkv += q[(size_t)(t * D + d)] * kv[(size_t)(d * E + e)];
                of_v += k[(size_t)(t * D + d)] * dkv[(size_t)(d * E + e)];
            }
            const size_t i = (size_t)(t * E + e);
            if (!close(o[i], g[i] * qkv, dtype) || !close(dg[i], g[i] * qkv, dtype) || !close(dv[i], of_v, dtype))
                return false;
        }
        for (int64_t d = 0; d < D; ++d) {
            double of_q = 0, of_k = 0;
            for (int64_t e = 0; e < E; ++e) {
                const double gate = g[(size_t)(t * E + e)];
                of_q += gate * gate * kv[(size_t)(d * E + e)];
                of_k += v[(size_t)(t * E + e)] * dkv[(size_t)(d * E + e)];
            }
            if (!close(dq[(size_t)(t * D + d)], of_q, dtype) || !close(dk[(size_t)(t * D + d)], of_k, dtype))
                return false;
        }
    }
    return true;
}

// The convolution with SiLU, once with channels and once with tokens dense: the output, dx and dw, where the gradient
// of the output is x.
bool convolution_is_right(const Kernels &kernels, bool dense_tokens) {
    constexpr int64_t K = 4;
    std::vector<float> x = numbers(N * D, 13), w = numbers(K * D, 14), y(x.size()), dx(x.size()), dw(w.size());
    const int64_t token = dense_tokens ? 1 : D, channel = dense_tokens ? N : 1;
    auto of_tokens = [=](std::vector<float> &v) { return fulmen_tensor{v.data(), FULMEN_FLOAT32, 0, token, channel}; };
    auto of_taps = [](std::vector<float> &v) { return fulmen_tensor{v.data(), FULMEN_FLOAT32, 0, D, 1}; };
    fulmen_causal_conv1d_forward_call forward = {};
    fulmen_causal_conv1d_problem &p = forward.problem;
    p.header = header_of(forward);
    p.batch = 1;
    p.tokens = N;
    p.channels = D;
    p.width = K;
    p.state_width = K - 1;
    p.activation = FULMEN_SILU;
    p.x = of_tokens(x);
    p.weight = of_taps(w);
    forward.output = of_tokens(y);
    fulmen_causal_conv1d_backward_call backward = {};
    backward.problem = p;
    backward.grad_output = p.x;
    backward.dx = of_tokens(dx);
    backward.dweight = of_taps(dw);
    if (kernels.causal_conv1d_forward(forward) || kernels.causal_conv1d_backward(backward)) return false;

    for (int64_t c = 0; c < D; ++c) {
        auto at = [=](const std::vector<float> &v, int64_t t) { return (double)v[(size_t)(t * token + c * channel)]; };
        double expected_dx[N] = {}, expected_dw[K] = {};
        for (int64_t t = 0; t < N; ++t) {
            double z = 0;
            for (int64_t j = 0; j < K; ++j)
                if (t - j >= 0) z += w[(size_t)((K - 1 - j) * D + c)] * at(x, t - j);
            const double s = 1 / (1 + exp(-z)), dz = at(x, t) * s * (1 + z * (1 - s));
            if (!close(at(y, t), z * s)) return false;
            for (int64_t j = 0; j < K && t - j >= 0; ++j) {
                expected_dx[t - j] += w[(size_t)((K - 1 - j) * D + c)] * dz;
                expected_dw[K - 1 - j] += at(x, t - j) * dz;
            }
        }
        for (int64_t t = 0; t < N; ++t)
            if (!close(at(dx, t), expected_dx[t])) return false;
        for (int64_t j = 0; j < K; ++j)
            if (!close(dw[(size_t)(j * D + c)], expected_dw[j])) return false;
    }
    return true;
}

// With a decay per channel and its gradient in float32, and without one in bfloat16, so that all may be in pairs.
// Results are float32 for either dtype.
bool attention_is_right(const Kernels &kernels, int64_t dtype) {
    Input given[] = {{D, 1, dtype}, {D, 2, dtype}, {E, 3, dtype}, {E, 4, dtype}};
    std::vector<float> &q = given[0].values, &k = given[1].values, &v = given[2].values, &g = given[3].values;
    const bool decays = dtype == FULMEN_FLOAT32;
    std::vector<float> log_decay = numbers(N * D, 5);
    for (float &a : log_decay) a = decays ? (a - 1) * 0.5f : 0.0f;

    fulmen_attention_forward_call forward = {};
    fulmen_problem &p = forward.problem;
    p.header = header_of(forward);
    p.batch = p.heads = p.query_heads = p.key_heads = p.value_heads = 1;
    p.tokens = N;
    p.key_size = D;
    p.value_size = E;
    p.decay_form = decays ? FULMEN_DECAY_CHANNEL : FULMEN_DECAY_NONE;
    p.scale = 1;
    p.q = given[0].tensor(), p.k = given[1].tensor(), p.v = given[2].tensor();
    if (decays) p.log_decay = tensor(log_decay, D);
    std::vector<float> o((size_t)(N * E));
    forward.output = tensor(o, E);

    fulmen_attention_backward_call backward = {};
    backward.problem = p;
    backward.grad_output = given[3].tensor();
    std::vector<float> dq(q.size()), dk(k.size()), dv(v.size()), dlog_decay(log_decay.size());
    backward.dq = tensor(dq, D);
    backward.dk = tensor(dk, D);
    backward.dv = tensor(dv, E);
    if (decays) backward.dlog_decay = tensor(dlog_decay, D);

    if (kernels.attention_forward(forward) || kernels.attention_backward(backward)) return false;

    std::vector<double> expected(o.size());
    loss(q, k, v, log_decay, g, &expected);
    for (size_t i = 0; i < o.size(); ++i)
        if (!close(o[i], expected[i], dtype)) return false;

    // One directional derivative of the loss along all gradients at once, by central differences.
    struct Differentiated {
        std::vector<float> *x, *gradient;
    } inputs[] = {{&q, &dq}, {&k, &dk}, {&v, &dv}, {&log_decay, &dlog_decay}};
    for (const Differentiated &input : inputs) {
        if (input.x == &log_decay && !decays) continue;
        std::vector<float> original = *input.x, direction = numbers((int64_t)original.size(), 6);
        double predicted = 0, sides[2];
        for (int side = 0; side < 2; ++side) {
            for (size_t i = 0; i < original.size(); ++i)
                (*input.x)[i] = original[i] + (side ? 1 : -1) * 0.00390625f * direction[i];
            sides[side] = loss(q, k, v, log_decay, g, nullptr);
        }
        *input.x = original;
        for (size_t i = 0; i < original.size(); ++i) predicted += (double)(*input.gradient)[i] * direction[i];
        if (fabs((sides[1] - sides[0]) / 0.0078125 - predicted) > larger_tolerance(dtype) * (1 + fabs(predicted)))
            return false;
    }
    return true;
}

}  // namespace

bool self_check(const Kernels &kernels) {
    for (const int64_t dtype : {FULMEN_FLOAT32, FULMEN_BFLOAT16})
        if (!attention_is_right(kernels, dtype) || !gate_is_right(kernels, dtype)) return false;
    return tpa_decode_is_right(kernels) && convolution_is_right(kernels, false) && convolution_is_right(kernels, true);
}

}  // namespace fulmen
