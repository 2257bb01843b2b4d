"""``fla.ops.kda``: Kimi Delta Attention, the delta rule with a decay g for each channel of the key axis::

    S'_t = diag(exp g_t) S_{t-1}
    S_t  = S'_t + k_t u_tᵀ,   u_t = β_t (v_t - S'_tᵀ k_t)

q and k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g ``[B, T, HV, K]``, beta ``[B, T, HV]``, A_log ``[HV]``, dt_bias
``[HV * K]``; states ``[N, HV, K, V]``, of as many sequences as cu_seqlens packs. The forms are one computation.
"""

from __future__ import annotations

from torch import Tensor

from fulmen.integrations.fla.delta_rule import correct
from fulmen.integrations.fla.gated_delta_rule import refuse_cp
from fulmen.integrations.fla.gates import beta_of, log_decay
from fulmen.integrations.fla.recurrence import Results, check_gate, checked, v_first

SAFE = (-5.0, 0.0)  # bounds of a decay that FLA's safe_gate takes


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> Results:
    """``safe_gate`` says which lower bounds are allowed. ``disable_recompute``, ``cu_seqlens_cpu``, ``use_graph``,
    ``max_num_seqs`` and ``chunk_size`` change nothing; there are no ``cp_context`` and no
    ``return_intermediate_states``."""
    refuse_cp(cp_context)
    if return_intermediate_states:
        raise NotImplementedError(
            "return_intermediate_states must be False: chunks here are not those of FLA's kernels"
        )
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not SAFE[0] <= lower_bound < SAFE[1]):
        raise ValueError(f"lower_bound must be in [-5, 0) with safe_gate and use_gate_in_kernel; got {lower_bound}")
    q, k, v = checked(q=q, k=k, v=v)
    check_gate("beta", beta, "[B, T, HV]", v.shape[:3])
    return fused_recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound,
        v_first(state_v_first, transpose_state_layout),
        cu_seqlens,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Results:
    """A_log, dt_bias and lower_bound belong to ``use_gate_in_kernel``. beta may be ``[B, T, HV, V]``, which makes a
    head of each channel of the values, which is slow."""
    q, k, v = checked(q=q, k=k, v=v)
    check_gate("g", g, "[B, T, HV, K]", (*v.shape[:3], *k.shape[3:]))
    return correct(
        q,
        k,
        v,
        beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        log_decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g,
        normalize_qk=use_qk_l2norm_in_kernel,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )
