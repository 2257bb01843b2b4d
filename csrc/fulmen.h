/* Fulmen's CPU core: linear attention under a plain C interface.
 *
 *     S_t = diag(exp(a_t)) S_{t-1} diag(exp(c_t)) + k_t v_t^T        S is D x E, per sample and head
 *     o_t = scale * q_t^T S_t
 *
 * One struct describes one call. Every field is 8 bytes wide, so that a struct is a plain sequence of 64-bit words
 * (pointers, int64, one double) and a caller without a C compiler can pack it directly. Strides count elements, not
 * bytes. A tensor whose data is NULL is absent. The channel dimension of every tensor is dense.
 *
 * Every call returns FULMEN_OK or a code that fulmen_error_text explains; what is refused (a positive code) has written
 * nothing. Calls are thread-safe as long as they do not share a workspace or an output.
 */
#ifndef FULMEN_H
#define FULMEN_H

#include <stdint.h>

#if defined(__GNUC__)
#define FULMEN_API __attribute__((visibility("default")))
#else
#define FULMEN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FULMEN_VERSION 10
#define FULMEN_MAX_SIZE 512 /* D and E run from 1 to this */
#define FULMEN_MAX_WIDTH 64 /* as does K, the width of a convolution, to this */
#define FULMEN_EPSILON 1e-6f

enum fulmen_dtype { FULMEN_FLOAT32 = 0, FULMEN_BFLOAT16 = 1, FULMEN_FLOAT16 = 2 };

/* What the key-axis decay varies over. The value-axis decay is NONE or CHANNEL. */
enum fulmen_decay_form {
    FULMEN_DECAY_NONE = 0,
    FULMEN_DECAY_HEAD = 1,   /* [H]          only stride_head is read */
    FULMEN_DECAY_TOKEN = 2,  /* [B, N, H]    */
    FULMEN_DECAY_CHANNEL = 3 /* [B, N, H, D] */
};

enum fulmen_schedule {
    FULMEN_AUTO = 0,
    FULMEN_RECURRENT = 1, /* token by token */
    FULMEN_LOOP = 2,      /* chunk by chunk, N is never partitioned */
    FULMEN_PARALLEL = 3,  /* N partitioned into segments: summarise, fold, run (unless deterministic) */
    FULMEN_RECOMPUTE = 4  /* as AUTO: the backward never keeps states of the forward */
};

enum fulmen_status {
    FULMEN_OK = 0,
    FULMEN_BAD_VERSION = 1,
    FULMEN_BAD_SIZE = 2,
    FULMEN_BAD_HEADS = 3,
    FULMEN_BAD_DTYPE = 4,
    FULMEN_BAD_DECAY = 5,
    FULMEN_BAD_SEQUENCES = 6,
    FULMEN_BAD_OPTION = 7,
    FULMEN_MISSING_TENSOR = 8,
    FULMEN_BAD_STATE = 9,
    FULMEN_NO_WORKSPACE = 10,
    FULMEN_BAD_STRUCT = 11,
    FULMEN_GROWS = -1 /* the call was carried out, and has met a log-decay above 0 */
};

/* The first words of every call. */
typedef struct {
    int64_t bytes;           /* sizeof the call's struct */
    int64_t version;         /* FULMEN_VERSION */
    int64_t threads;         /* at least 1 */
    void *workspace;         /* 64-byte aligned; its contents before and after the call do not matter */
    int64_t workspace_bytes; /* may be 0 */
    /* Called at most once, by the caller's thread and before anything is written, when a call needs more workspace than
     * it was given: memory like it that lasts until the call returns, or NULL, and the call returns
     * FULMEN_NO_WORKSPACE. May be NULL. */
    void *(*allocate)(int64_t bytes);
} fulmen_header;

/* [B, N, heads, channels]; an absent dimension has stride 0. */
typedef struct {
    void *data;
    int64_t dtype;
    int64_t stride_batch;
    int64_t stride_token;
    int64_t stride_head;
} fulmen_tensor;

/* [B or S, H, D, E], any strides; float32 everywhere but in the step. */
typedef struct {
    void *data;
    int64_t dtype;
    int64_t stride_batch;
    int64_t stride_head;
    int64_t stride_row;    /* from d to d + 1 */
    int64_t stride_column; /* from e to e + 1 */
} fulmen_state;

/* The part that every call on whole sequences has in common. */
typedef struct {
    fulmen_header header;
    int64_t batch;  /* B; 1 when sequences are packed */
    int64_t tokens; /* N */
    int64_t heads;  /* H; each of the next three divides it, head h reads head h / (H / Hx) */
    int64_t query_heads;
    int64_t key_heads;
    int64_t value_heads;
    int64_t key_size;          /* D */
    int64_t value_size;        /* E */
    int64_t sequences;         /* S, or 0 when not packed */
    const int64_t *cu_seqlens; /* S + 1 offsets from 0 to N, non-decreasing; NULL when not packed */
    int64_t schedule;
    int64_t deterministic; /* nonzero: N is never partitioned, so bits do not depend on the number of threads */
    int64_t decay_form;
    int64_t decay_v_form;
    double scale;
    fulmen_tensor q, k, v;   /* one dtype */
    fulmen_tensor log_decay; /* natural logarithms; each of the two has its own dtype */
    fulmen_tensor log_decay_v;
    fulmen_state initial_state; /* optional */
} fulmen_problem;

typedef struct {
    fulmen_problem problem;
    fulmen_tensor output;     /* [B, N, H, E], q's dtype or float32 */
    fulmen_state final_state; /* optional; must not overlap initial_state */
    /* Both optional, of any dtype, and not with decays per channel nor token by token. The operator is that of values
     * times their weights, and to its output the values are added as they are, times skip: Mamba-2's dt and D. */
    fulmen_tensor value_weights; /* [B, N, H] */
    fulmen_tensor skip;          /* [1, 1, H] */
} fulmen_attention_forward_call;

typedef struct {
    fulmen_problem problem;
    fulmen_tensor grad_output;  /* optional; q's dtype or float32 */
    fulmen_state grad_state;    /* optional: the gradient of the final state */
    fulmen_tensor dq, dk, dv;   /* shaped as q, k, v; q's dtype or float32; any of them may be absent */
    fulmen_tensor dlog_decay;   /* optional, float32, shaped as log_decay ([H]: summed over B and N) */
    fulmen_tensor dlog_decay_v; /* optional, float32, shaped as log_decay_v */
    fulmen_state dinitial;      /* optional */
} fulmen_attention_backward_call;

/* chunk_states: problem.q is ignored (query_heads = heads), scale too. `states` is [B, H, chunks + 1, D, E] float32
 * with dense D x E matrices: the state that enters each chunk, and the final one last; chunks = ceil(N / chunk_size).
 * Not for packed sequences. */
typedef struct {
    fulmen_problem problem;
    int64_t chunk_size;
    float *states;
    int64_t stride_batch;
    int64_t stride_head;
    int64_t stride_chunk;
} fulmen_states_forward_call;

typedef struct {
    fulmen_problem problem;
    int64_t chunk_size;
    const float *states; /* what the forward call returned */
    int64_t stride_batch;
    int64_t stride_head;
    int64_t stride_chunk;
    const float *grad_states; /* same shape, own strides, dense matrices */
    int64_t grad_stride_batch;
    int64_t grad_stride_head;
    int64_t grad_stride_chunk;
    fulmen_tensor dk, dv, dlog_decay, dlog_decay_v; /* as in the attention backward */
    fulmen_state dinitial;
} fulmen_states_backward_call;

/* One token: tensors are [B, heads, channels] (stride_token is ignored), log_decay is [H], [B, H] or [B, H, D].
 * The state, of any dtype, is computed in float32 and written in place, rounded once; it must have D or E dense. Needs
 * no workspace. */
typedef struct {
    fulmen_header header;
    int64_t batch;
    int64_t heads;
    int64_t query_heads;
    int64_t key_heads;
    int64_t value_heads;
    int64_t key_size;
    int64_t value_size;
    int64_t decay_form; /* HEAD and TOKEN both mean one value per head; stride_batch = 0 when it is [H] */
    int64_t decay_v_form;
    double scale;
    fulmen_tensor q, k, v, log_decay, log_decay_v;
    fulmen_state state;
    fulmen_tensor output; /* [B, H, E], q's dtype or float32 */
} fulmen_step_call;

/* The delta rule, linear attention that writes what the state does not know yet:
 *
 *     S_t = diag(exp(a_t)) S_{t-1} + k_t u_t^T        u_t = beta_t (v_t - (diag(exp(a_t)) S_{t-1})^T k_t)
 *
 * With normalize_qk, q / sqrt(sum of q^2 + FULMEN_EPSILON) stands for q, and k alike. */
typedef struct {
    fulmen_problem attention; /* without a decay of the value axis */
    fulmen_tensor beta;       /* [B, N, H], any dtype */
    int64_t normalize_qk;
} fulmen_delta_rule_problem;

typedef struct {
    fulmen_delta_rule_problem problem;
    fulmen_tensor output;     /* [B, N, H, E], q's dtype or float32 */
    fulmen_state final_state; /* optional; must not overlap initial_state */
} fulmen_delta_rule_forward_call;

typedef struct {
    fulmen_delta_rule_problem problem;
    fulmen_tensor grad_output; /* optional; q's dtype or float32 */
    fulmen_state grad_state;   /* optional: the gradient of the final state */
    fulmen_tensor dq, dk, dv;  /* shaped as q, k, v; q's dtype or float32; any of them may be absent */
    fulmen_tensor dbeta;       /* optional, float32 */
    fulmen_tensor dlog_decay;  /* optional, float32, shaped as log_decay ([H]: summed over B and N) */
    fulmen_state dinitial;     /* optional */
} fulmen_delta_rule_backward_call;

typedef struct {
    fulmen_step_call attention; /* without a decay of the value axis */
    fulmen_tensor beta;         /* [B, H], any dtype */
    int64_t normalize_qk;
} fulmen_delta_rule_step_call;

/* Tensor-product attention of one token over M keys and values that are given as factors:
 *
 *     q = sum_r aq_r bq_r^T / R      k_m = sum_r ak_mr bk_mr^T / Rk      v_m = sum_r av_mr bv_mr^T / Rv
 *     o_h = sum_m softmax_m(scale * q_h . k_mh) v_mh
 *
 * Every split, and every number of threads, gives the same bits. */
enum fulmen_split {
    FULMEN_SPLIT_AUTO = 0,
    FULMEN_SPLIT_BATCH = 1,   /* one task for each sample */
    FULMEN_SPLIT_HEAD = 2,    /* for each sample and 16 heads */
    FULMEN_SPLIT_SEQUENCE = 3 /* for each sample and slice of M */
};

typedef struct {
    fulmen_header header;
    int64_t batch;
    int64_t tokens; /* M */
    int64_t heads;
    int64_t query_rank; /* the ranks R, Rk and Rv run from 1 to FULMEN_MAX_SIZE, as do D and E */
    int64_t key_rank;
    int64_t value_rank;
    int64_t key_size;
    int64_t value_size;
    const int64_t *lengths; /* [B], each 0 to M, or NULL: all M; tokens after the end are not read */
    int64_t split;
    double scale;
    fulmen_tensor aq, ak, av; /* [B, M or 1, H, rank], one dtype for all six factors */
    fulmen_tensor bq, bk, bv; /* [B, M or 1, rank, channels]: stride_head leads to the next rank */
    fulmen_tensor output;     /* [B, 1, H, E], the factors' dtype or float32 */
} fulmen_tpa_decode_call;
/* The output gate: o = gate (q kv), kv = sum over the M keys of k v^T; nothing is causal, and all have H heads.
 * kv and qkv = q kv are written by the forward where they are present. The backward reads those that are present, and
 * recomputes the others. */
typedef struct {
    fulmen_header header;
    int64_t batch;
    int64_t queries; /* N */
    int64_t keys;    /* M */
    int64_t heads;
    int64_t key_size;
    int64_t value_size;
    int64_t deterministic; /* nonzero: N and M are never partitioned, so bits do not depend on B and H */
    fulmen_tensor q;       /* [B, N, H, D]; q, k, v, gate share one dtype */
    fulmen_tensor k;       /* [B, M, H, D] */
    fulmen_tensor v;       /* [B, M, H, E] */
    fulmen_tensor gate;    /* [B, N, H, E] */
    fulmen_state kv;       /* optional */
    fulmen_tensor qkv;     /* optional, [B, N, H, E], float32, or beside bfloat16 that */
} fulmen_output_gate_problem;

typedef struct {
    fulmen_output_gate_problem problem;
    fulmen_tensor output; /* [B, N, H, E], q's dtype or float32 */
} fulmen_output_gate_forward_call;

typedef struct {
    fulmen_output_gate_problem problem;
    fulmen_tensor grad_output;       /* q's dtype or float32 */
    fulmen_tensor dq, dk, dv, dgate; /* shaped as q, k, v, gate; q's dtype or float32 */
} fulmen_output_gate_backward_call;

/* The causal convolution of each channel with K weights of its own,
 *
 *     y_t = activation(bias + sum over j of weight_j u_{t-K+1+j})        u: the initial state, then x
 *
 * All tensors are [B, tokens, C] of any strides, where stride_head leads to the next channel; those with tokens or with
 * channels dense are fast. A state is the last W inputs, oldest first, so a tensor with W tokens. The activation is
 * IDENTITY or SILU. */
enum fulmen_function {
    FULMEN_IDENTITY = 0,
    FULMEN_SILU = 1,
    FULMEN_SIGMOID = 2,
    FULMEN_EXP = 3,
    FULMEN_SOFTPLUS = 4, /* of x above 20: x itself */
    FULMEN_LOG_SIGMOID = 5,
    FULMEN_ADD = 6, /* this and the next are of two numbers */
    FULMEN_MULTIPLY = 7,
    FULMEN_DIVIDE = 8,
    FULMEN_LARGER = 9,
    FULMEN_SMALLER = 10
};

typedef struct {
    fulmen_header header;
    int64_t batch;             /* B; 1 when sequences are packed */
    int64_t tokens;            /* N */
    int64_t channels;          /* C */
    int64_t width;             /* K */
    int64_t state_width;       /* W, at least K - 1 */
    int64_t sequences;         /* S, or 0 when not packed */
    const int64_t *cu_seqlens; /* S + 1 offsets from 0 to N, non-decreasing; NULL when not packed */
    int64_t activation;
    fulmen_tensor x;
    fulmen_tensor weight;        /* [1, K, C], any dtype */
    fulmen_tensor bias;          /* optional, [1, 1, C], any dtype */
    fulmen_tensor initial_state; /* optional, [B or S, W, C], x's dtype */
} fulmen_causal_conv1d_problem;

typedef struct {
    fulmen_causal_conv1d_problem problem;
    fulmen_tensor output;      /* [B, N, C], x's dtype or float32 */
    fulmen_tensor final_state; /* optional, [B or S, W, C], x's dtype or float32 */
} fulmen_causal_conv1d_forward_call;

typedef struct {
    fulmen_causal_conv1d_problem problem;
    fulmen_tensor grad_output;    /* optional; this and the next three are of x's dtype or float32 */
    fulmen_tensor grad_state;     /* optional: the gradient of the final state */
    fulmen_tensor dx;             /* all four optional */
    fulmen_tensor dinitial;       /* [B or S, W, C] */
    fulmen_tensor dweight, dbias; /* float32, shaped as weight and bias */
} fulmen_causal_conv1d_backward_call;

/* One token: x and output are [B, 1, C]. The state, of any dtype, is rolled in place: x is its last token afterwards.
 * Needs no workspace. */
typedef struct {
    fulmen_header header;
    int64_t batch;
    int64_t channels;
    int64_t width;
    int64_t state_width;
    int64_t activation;
    fulmen_tensor x, state, weight, bias;
    fulmen_tensor output; /* x's dtype or float32 */
} fulmen_causal_conv1d_step_call;

/* RMSNorm of each row, with the weights of its head:
 *
 *     y = weight n act(gate)      n = x / sqrt(mean of x^2 + epsilon)      or n of x act(gate), without the last factor
 *
 * Needs no workspace. */
typedef struct {
    fulmen_header header;
    int64_t batch;
    int64_t tokens;
    int64_t heads;
    int64_t size;       /* of a row, at least 1 */
    int64_t activation; /* of the gate: SILU or SIGMOID */
    int64_t gate_first; /* nonzero: what is normalised is x act(gate) */
    double epsilon;
    fulmen_tensor x;      /* [B, N, H, size] */
    fulmen_tensor gate;   /* optional, x's dtype */
    fulmen_tensor weight; /* [1, 1, H, size], x's dtype or float32 */
    fulmen_tensor output; /* x's dtype */
    float *rates;         /* optional, [B, N, H], dense: what each row was multiplied by */
} fulmen_rms_norm_call;

/* Its gradients, given that of the output. dweight is summed over rows in an order that does not depend on threads. */
typedef struct {
    fulmen_header header;
    int64_t batch;
    int64_t tokens;
    int64_t heads;
    int64_t size;
    int64_t activation;
    int64_t gate_first;
    int64_t weight_heads; /* H, or 1 where all have the same weights */
    fulmen_tensor x, gate, weight;
    fulmen_tensor grad_output; /* x's dtype, as are the next two */
    fulmen_tensor dx;
    fulmen_tensor dgate; /* where there is a gate */
    const float *rates;  /* [B, N, H], dense: what each row was multiplied by */
    float *dweight;      /* optional, [weight_heads, size], dense */
} fulmen_rms_norm_backward_call;

/* The product of a decode step: y = weight x + bias for each of a few rows x, from one pass over the weights. Every
 * number of rows and of threads gives a row the same bits. Needs no workspace. */
typedef struct {
    fulmen_header header;
    int64_t rows;
    int64_t inputs;       /* at least 1 */
    int64_t outputs;      /* at least 1 */
    fulmen_tensor x;      /* [1, rows, 1, inputs] */
    fulmen_tensor weight; /* [1, outputs, 1, inputs]; all four are of one dtype */
    fulmen_tensor bias;   /* optional, [1, outputs, 1, 1] */
    fulmen_tensor output; /* [1, rows, 1, outputs] */
} fulmen_linear_call;

/* c = a b^T + bias, of any size, in float32 and rounded once. The strides of a and b are stride_token from row to row
 * and stride_head along the depth, and one of the two is 1. Bits do not depend on the number of threads. */
typedef struct {
    fulmen_header header;
    int64_t rows;
    int64_t columns;
    int64_t depth;
    fulmen_tensor a;      /* [rows, depth] */
    fulmen_tensor b;      /* [columns, depth], a's dtype */
    fulmen_tensor bias;   /* optional, [1, columns, 1, 1], a's dtype */
    fulmen_tensor output; /* [1, rows, 1, columns], a's dtype or float32 */
} fulmen_matmul_call;

/* y = f(a, b), number by number, of three axes with any strides (0 repeats), where stride_head leads along the last; b
 * is the number `scalar` where it is absent, and functions of one number ignore it. Each tensor has its own dtype.
 * Computed in float32. Needs no workspace. */
typedef struct {
    fulmen_header header;
    int64_t batch;
    int64_t tokens;
    int64_t channels;
    int64_t function;
    double scalar;
    fulmen_tensor a;
    fulmen_tensor b; /* optional */
    fulmen_tensor output;
} fulmen_elementwise_call;

/* Every call: fulmen_<name> takes a fulmen_<name>_call. */
#define FULMEN_CALLS(CALL)       \
    CALL(attention_forward)      \
    CALL(attention_backward)     \
    CALL(states_forward)         \
    CALL(states_backward)        \
    CALL(step)                   \
    CALL(delta_rule_forward)     \
    CALL(delta_rule_backward)    \
    CALL(delta_rule_step)        \
    CALL(tpa_decode)             \
    CALL(output_gate_forward)    \
    CALL(output_gate_backward)   \
    CALL(causal_conv1d_forward)  \
    CALL(causal_conv1d_backward) \
    CALL(causal_conv1d_step)     \
    CALL(rms_norm)               \
    CALL(rms_norm_backward)      \
    CALL(linear)                 \
    CALL(matmul)                 \
    CALL(elementwise)

#define FULMEN_DECLARE(name) FULMEN_API int64_t fulmen_##name(const fulmen_##name##_call *call);
FULMEN_CALLS(FULMEN_DECLARE)
#undef FULMEN_DECLARE

/* Calls that are made one after another, as often as one likes, on tensors that may be elsewhere each time. */
typedef struct {
    int64_t call; /* which of them */
    int64_t word; /* of its struct: an address */
    int64_t tensor;
    int64_t offset; /* in bytes, from where the tensor begins */
} fulmen_patch;

typedef struct {
    int64_t bytes; /* sizeof this struct */
    int64_t calls;
    const int64_t *words; /* of each call its number, and its struct, of whose header only the size is read */
    int64_t patches;
    const fulmen_patch *patch; /* in the order of calls */
} fulmen_program;

/* The number of the call of this name in a program, or -1. */
FULMEN_API int64_t fulmen_call_number(const char *name);

/* Every call gets `header`, but for its size. Stops at a call that is refused; what was done before it stays. */
FULMEN_API int64_t fulmen_run_program(const fulmen_program *program, const fulmen_header *header, void *const *tensors);

FULMEN_API int64_t fulmen_version(void);
FULMEN_API const char *fulmen_error_text(int64_t status);

/* ISA builds inside this library, best first: fulmen_isa_name(0 .. fulmen_isa_count() - 1). At load the first that
 * this machine supports is chosen, unless it multiplies pairs of bfloat16 and the machine multiplies floats faster; or
 * the one named by the environment variable FULMEN_ISA. */
FULMEN_API int64_t fulmen_isa_count(void);
FULMEN_API const char *fulmen_isa_name(int64_t index);
FULMEN_API int64_t fulmen_isa_supported(int64_t index);  /* 1 when this machine has the instructions */
FULMEN_API int64_t fulmen_isa_current(void);             /* index of the build in use */
FULMEN_API int64_t fulmen_isa_select(int64_t index);     /* returns 1, or 0 when the machine lacks the instructions */
FULMEN_API int64_t fulmen_isa_self_check(int64_t index); /* 1 when a small forward and backward come out right */
FULMEN_API int64_t fulmen_isa_multiplies_pairs(int64_t index); /* 1 when bfloat16 inputs are multiplied in pairs */
FULMEN_API int64_t fulmen_isa_multiplies_tiles(int64_t index); /* 1 when they are multiplied in AMX's tiles */
FULMEN_API int64_t fulmen_has_openmp(void);

/* Multiply-adds in registers on every thread, to be timed: the peak of the build in use. Returns how many
 * floating-point operations were done. */
FULMEN_API int64_t fulmen_fma_burst(int64_t rounds, int64_t threads);

#ifdef __cplusplus
}
#endif

#endif
