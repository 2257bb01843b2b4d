"""``fla.ops.gla``: gated linear attention, ``S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_tᵀ``.

q, k and the key axis' log-decay g or gk ``[B, T, H, K]``, v and the value axis' gv ``[B, T, H, V]``; states
``[N, H, K, V]``, of as many sequences as cu_seqlens packs. The forms are one computation.
"""

from __future__ import annotations

from torch import Tensor

from fulmen.integrations.fla.recurrence import Results, attend, check_gate, checked, v_first


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Results:
    """``cu_seqlens_cpu`` changes nothing."""
    q, k, v = checked(q=q, k=k, v=v)
    check_gate("g", g, "[B, T, H, K]", (*v.shape[:3], *k.shape[3:]))
    return attend(
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


fused_chunk_gla = chunk_gla  # whose own only says that it has been replaced by the other


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Results:
    """``reverse``: from the last token of each sequence to its first."""
    q, k, v = checked(q=q, k=k, v=v)
    if gk is not None:
        check_gate("gk", gk, "[B, T, H, K]", (*v.shape[:3], *k.shape[3:]))
    if gv is not None:
        check_gate("gv", gv, "[B, T, H, V]", v.shape)
    return attend(
        q,
        k,
        v,
        gk,
        gv,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )
