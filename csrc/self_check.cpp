#include "self_check.h"

#include "self_check_inputs.h"

namespace fulmen {
namespace {

// Tensor-product attention with ragged sizes and ranks above one, against the plain formula.
bool tpa_decode_is_right(const Kernels &kernels, int64_t dtype) {
    constexpr int64_t M = 71, H = 5, R = 3, Rk = 2, Rv = 1;
    Input aq(H, R, 7, dtype), ak(M * H, Rk, 8, dtype), av(M * H, Rv, 9, dtype);
    Input bq(R, D, 10, dtype), bk(M * Rk, D, 11, dtype), bv(M * Rv, E, 12, dtype);
    std::vector<float> o((size_t)(H * E));
    auto factor = [](Input &x, int64_t rows) {
        const fulmen_tensor dense = x.tensor();
        return fulmen_tensor{dense.data, dense.dtype, 0, rows * x.size, x.size};
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
    call.aq = factor(aq, H);
    call.ak = factor(ak, H);
    call.av = factor(av, H);
    call.bq = factor(bq, R);
    call.bk = factor(bk, Rk);
    call.bv = factor(bv, Rv);
    call.output = {o.data(), FULMEN_FLOAT32, 0, H * E, E};
    if (kernels.tpa_decode(call)) return false;

    for (int64_t h = 0; h < H; ++h) {
        double sum = 0, values[E] = {};
        for (int64_t m = 0; m < M; ++m) {
            double score = 0;
            for (int64_t d = 0; d < D; ++d) {
                double q = 0, k = 0;
                for (int64_t r = 0; r < R; ++r)
                    q += (double)aq.values[(size_t)(h * R + r)] * bq.values[(size_t)(r * D + d)] / R;
                for (int64_t r = 0; r < Rk; ++r)
                    k += (double)ak.values[(size_t)((m * H + h) * Rk + r)] * bk.values[(size_t)((m * Rk + r) * D + d)] /
                         Rk;
                score += call.scale * q * k;
            }
            sum += exp(score);
            for (int64_t e = 0; e < E; ++e)
                values[e] += exp(score) * av.values[(size_t)(m * H + h)] * bv.values[(size_t)(m * E + e)];
        }
        for (int64_t e = 0; e < E; ++e)
            if (!close(o[(size_t)(h * E + e)], values[e] / sum, dtype)) return false;
    }
    return true;
}

// The output gate on the same numbers: q, k, v as they are, g as the gate and as the gradient of the output. Results
// are float32 for either dtype.
bool gate_is_right(const Kernels &kernels, int64_t dtype) {
    Input given[] = {{N, D, 1, dtype}, {N, D, 2, dtype}, {N, E, 3, dtype}, {N, E, 4, dtype}};
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

// The gated norm, with the gate after it and before, and its gradients.
bool norm_is_right(const Kernels &kernels, int64_t dtype) {
    Input x(N, D, 15, dtype), gate(N, D, 16, dtype), weight(1, D, 17, FULMEN_FLOAT32), dy(N, D, 21, dtype);
    Input y = x, dx = x, dgate = x;
    float rates[N], dweight[D];
    fulmen_rms_norm_call call = {};
    call.header = header_of(call);
    call.batch = call.heads = 1;
    call.tokens = N;
    call.size = D;
    call.activation = FULMEN_SILU;
    call.epsilon = 1e-5;
    call.x = x.tensor(), call.gate = gate.tensor(), call.weight = weight.tensor(), call.output = y.tensor();
    call.rates = rates;
    fulmen_rms_norm_backward_call back = {};
    back.header = header_of(back);
    back.batch = back.heads = back.weight_heads = 1;
    back.tokens = N, back.size = D, back.activation = call.activation;
    back.x = call.x, back.gate = call.gate, back.weight = call.weight, back.grad_output = dy.tensor();
    back.dx = dx.tensor(), back.dgate = dgate.tensor(), back.rates = rates, back.dweight = dweight;
    for (call.gate_first = 0; call.gate_first < 2; ++call.gate_first) {
        const bool first = back.gate_first = call.gate_first;
        if (kernels.rms_norm(call) || kernels.rms_norm_backward(back)) return false;
        double expected_dweight[D] = {};
        for (int64_t t = 0; t < N; ++t) {
            double value[D], factor[D], slope[D], dn[D], mean = 0, mean_dn = 0;
            for (int64_t c = 0; c < D; ++c) {
                const double z = gate.values[(size_t)(t * D + c)], s = 1 / (1 + exp(-z));
                factor[c] = z * s;
                slope[c] = s * (1 + z * (1 - s));
                value[c] = x.values[(size_t)(t * D + c)] * (first ? factor[c] : 1);
                mean += value[c] * value[c] / D;
            }
            const double rate = 1 / sqrt(mean + call.epsilon);
            for (int64_t c = 0; c < D; ++c) {
                const double n = value[c] * rate, grad = dy.values[(size_t)(t * D + c)] * (first ? 1 : factor[c]);
                if (!close(y.at(t * D + c), n * weight.values[(size_t)c] * (first ? 1 : factor[c]), dtype))
                    return false;
                expected_dweight[c] += grad * n;
                dn[c] = grad * weight.values[(size_t)c];
                mean_dn += dn[c] * n / D;
            }
            for (int64_t c = 0; c < D; ++c) {
                const double n = value[c] * rate, du = rate * (dn[c] - n * mean_dn);
                const double own = first ? x.values[(size_t)(t * D + c)] * du
                                         : dy.values[(size_t)(t * D + c)] * weight.values[(size_t)c] * n;
                if (!close(dx.at(t * D + c), first ? du * factor[c] : du, dtype)) return false;
                if (!close(dgate.at(t * D + c), own * slope[c], dtype)) return false;
            }
        }
        for (int64_t c = 0; c < D; ++c)
            if (!close(dweight[c], expected_dweight[c])) return false;
    }
    return true;
}

// A product, and a function of what comes out of it.
bool decode_step_is_right(const Kernels &kernels, int64_t dtype) {
    Input x(N, D, 18, dtype), weight(D, D, 19, dtype), bias(D, 1, 20, dtype), y = x, z = x;
    fulmen_linear_call product = {};
    product.header = header_of(product);
    product.rows = N;
    product.inputs = product.outputs = D;
    product.x = x.tensor(), product.weight = weight.tensor(), product.bias = bias.tensor(), product.output = y.tensor();
    fulmen_elementwise_call function = {};
    function.header = header_of(function);
    function.batch = 1;
    function.tokens = N;
    function.channels = D;
    function.function = FULMEN_SOFTPLUS;
    function.a = y.tensor(), function.output = z.tensor();
    function.a.stride_head = function.output.stride_head = 1;
    if (kernels.linear(product) || kernels.elementwise(function)) return false;
    for (int64_t t = 0; t < N; ++t)
        for (int64_t o = 0; o < D; ++o) {
            double sum = bias.values[(size_t)o];
            for (int64_t i = 0; i < D; ++i) sum += (double)x.at(t * D + i) * weight.at(o * D + i);
            if (!close(y.at(t * D + o), sum, dtype) || !close(z.at(t * D + o), log1p(exp(sum)), dtype)) return false;
        }
    return true;
}

// A matrix as it stands and as the transpose of its memory, times another.
bool matmul_is_right(const Kernels &kernels, int64_t dtype) {
    Input a(N, N, 21, dtype), b(N, N, 22, dtype), bias(N, 1, 23, dtype), y = a;
    for (const int transposed : {0, 1, 2, 3}) {
        fulmen_matmul_call call = {};
        call.header = header_of(call);
        call.rows = call.columns = call.depth = N;
        call.a = a.tensor(), call.b = b.tensor(), call.bias = bias.tensor(), call.output = y.tensor();
        const bool of_a = transposed & 1, of_b = transposed & 2;
        call.a.stride_token = of_a ? 1 : N, call.a.stride_head = of_a ? N : 1;
        call.b.stride_token = of_b ? 1 : N, call.b.stride_head = of_b ? N : 1;
        if (kernels.matmul(call)) return false;
        for (int64_t r = 0; r < N; ++r)
            for (int64_t n = 0; n < N; ++n) {
                double sum = bias.values[(size_t)n];
                for (int64_t i = 0; i < N; ++i)
                    sum += (double)a.at(of_a ? i * N + r : r * N + i) * b.at(of_b ? i * N + n : n * N + i);
                if (!close(y.at(r * N + n), sum, dtype)) return false;
            }
    }
    return true;
}

}  // namespace

bool self_check(const Kernels &kernels) {
    for (const int64_t dtype : {FULMEN_FLOAT32, FULMEN_BFLOAT16})
        if (!recurrences_are_right(kernels, dtype) || !gate_is_right(kernels, dtype) ||
            !tpa_decode_is_right(kernels, dtype) || !norm_is_right(kernels, dtype) ||
            !decode_step_is_right(kernels, dtype) || !matmul_is_right(kernels, dtype))
            return false;
    return convolution_is_right(kernels, false) && convolution_is_right(kernels, true);
}

}  // namespace fulmen
