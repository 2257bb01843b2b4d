"""``fla.ops.gated_delta_rule``: the delta rule with a decay g, one for each token::

    S'_t = exp(g_t) S_{t-1}
    S_t  = S'_t + k_t u_tᵀ,   u_t = β_t (v_t - S'_tᵀ k_t)

q and k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g and beta ``[B, T, HV]``, A_log and dt_bias ``[HV]``; states
``[N, HV, K, V]``, of as many sequences as cu_seqlens packs. The forms are one computation.
"""

from __future__ import annotations

from torch import Tensor

from fulmen.integrations.fla.delta_rule import correct
from fulmen.integrations.fla.gates import beta_of, log_decay
from fulmen.integrations.fla.recurrence import Results, check_gate, checked, v_first


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> Results:
    """``cu_seqlens_cpu``, ``chunk_indices`` and ``chunk_size`` change nothing; there is no ``cp_context``."""
    refuse_cp(cp_context)
    q, k, v = checked(q=q, k=k, v=v)
    check_gate("g", g, "[B, T, HV]", v.shape[:3])
    check_gate("beta", beta, "[B, T, HV]", v.shape[:3])
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Results:
    """The decays g, gk ``[B, T, HV, K]`` of the key axis and gv ``[B, T, HV, V]`` of the value axis act together. beta
    may be ``[B, T, HV, V]``; without it, it is 1. gv and such a beta make a head of each channel of the values, which
    is slow."""
    q, k, v = checked(q=q, k=k, v=v)
    if g is None and use_gate_in_kernel:
        raise TypeError("g must be a torch.Tensor [B, T, HV] with use_gate_in_kernel=True; got None")
    if g is not None:
        check_gate("g", g, "[B, T, HV]", v.shape[:3])
        g = log_decay(g, A_log, dt_bias) if use_gate_in_kernel else g
    if gk is not None:
        check_gate("gk", gk, "[B, T, HV, K]", (*v.shape[:3], *k.shape[3:]))
        gk = gk if g is None else gk + g.unsqueeze(3)
    if gv is not None:
        check_gate("gv", gv, "[B, T, HV, V]", v.shape)
    return correct(
        q,
        k,
        v,
        beta_of(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        g if gk is None else gk,
        gv,
        normalize_qk=use_qk_l2norm_in_kernel,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def refuse_cp(cp_context: object | None) -> None:
    if cp_context is not None:
        raise NotImplementedError("cp_context must be None: a sequence is not split over processes here")
