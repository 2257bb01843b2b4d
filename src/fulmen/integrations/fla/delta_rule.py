"""``fla.ops.delta_rule``: ``S_t = S_{t-1} + k_t u_tᵀ`` with ``u_t = β_t (v_t - S_{t-1}ᵀ k_t)``.

q and k ``[B, T, H, K]``, v ``[B, T, HV, V]``, beta ``[B, T, HV]``, of fused_recurrent_delta_rule also
``[B, T, HV, V]``; states ``[N, HV, K, V]``, of as many sequences as cu_seqlens packs. The forms are one computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fulmen
from fulmen.integrations.fla.recurrence import Results, check_gate, checked, run


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> Results:
    """``cu_seqlens_cpu`` and ``chunk_size`` change nothing."""
    q, k, v = checked(q=q, k=k, v=v)
    check_gate("beta", beta, "[B, T, HV]", v.shape[:3])
    return fused_recurrent_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


fused_chunk_delta_rule = chunk_delta_rule  # whose own only says that it has been replaced by the other


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """Without beta it is 1."""
    q, k, v = checked(q=q, k=k, v=v)
    return correct(
        q,
        k,
        v,
        beta,
        normalize_qk=use_qk_l2norm_in_kernel,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def correct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None = None,
    log_decay_v: Tensor | None = None,
    **options: Any,
) -> Results:
    """:func:`fulmen.delta_rule`, whose beta may be ``[B, T, HV, V]``, and which may have a decay of the value axis,
    ``[B, T, HV, V]``. ``options``: the states' and the operator's."""
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    if beta.ndim == 4 or log_decay_v is not None:
        return _by_channel(q, k, v, beta, log_decay, log_decay_v, **options)
    check_gate("beta", beta, "[B, T, HV]", v.shape[:3])
    return run(fulmen.delta_rule, q, k, v, beta, log_decay=log_decay, **options)


def _by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    log_decay_v: Tensor | None,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool = False,
    **options: Any,
) -> Results:
    """What a channel of the values writes depends on no other channel: each is a head of its own, with one channel."""
    if beta.ndim == 3:
        beta = beta.unsqueeze(3).expand(v.shape)
    check_gate("beta", beta, "[B, T, HV, V]", v.shape)
    if log_decay is not None and log_decay_v is None:
        log_decay_v = torch.zeros_like(v)
    if log_decay is not None and log_decay_v is not None:
        deeper = log_decay.ndim == 4  # [B, T, HV, V, K]
        log_decay_v = log_decay.unsqueeze(3) + (log_decay_v.unsqueeze(4) if deeper else log_decay_v)
    if initial_state is not None:
        initial_state = (initial_state if state_v_first else initial_state.mT).flatten(1, 2).unsqueeze(3)
    output, state = run(
        fulmen.delta_rule,
        q,
        k,
        v.flatten(2).unsqueeze(3),
        beta.flatten(2),
        log_decay=None if log_decay_v is None else log_decay_v.flatten(2, 3),
        initial_state=initial_state,
        output_final_state=output_final_state,
        **options,
    )
    if state is not None:
        state = state.squeeze(3).unflatten(1, v.shape[2:])
        state = state if state_v_first else state.mT.contiguous()
    return output.view(v.shape), state
