"""What ``use_gate_in_kernel`` and ``use_beta_sigmoid_in_kernel`` of the gated delta rules compute, in float32."""

from __future__ import annotations

from torch import Tensor

from fulmen.integrations.fla.recurrence import check_gate
from fulmen.nn.gates import decay_rate, step_size
from fulmen.runtime.tensors import at_least_float32


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """``-exp(A_log) · softplus(g + dt_bias)``; with a bound ``lower_bound · sigmoid(exp(A_log) · (g + dt_bias))``.

    g ``[B, T, HV]`` or ``[B, T, HV, K]``; A_log: one number for each head, dt_bias: one for each head or channel.
    """
    if dt_bias is not None:
        if dt_bias.numel() != g[0, 0].numel():
            of = "HV" if g.ndim == 3 else "HV * K"
            check_gate("dt_bias", dt_bias, f"[{of}]", (g.shape[2:].numel(),))
        dt_bias = dt_bias.reshape(g.shape[2:])
    if A_log is not None:
        if A_log.numel() != g.shape[2]:
            check_gate("A_log", A_log, "[HV]", g.shape[2:3])
        A_log = A_log.reshape(-1, *(1 for _ in g.shape[3:]))
    if lower_bound is not None:
        g = step_size(g, dt_bias, dt_softplus=False)
        return lower_bound * (g if A_log is None else -decay_rate(A_log) * g).sigmoid()
    if A_log is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True; got None")
    return step_size(g, dt_bias) * decay_rate(A_log)


def beta_of(beta: Tensor | None, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Tensor | None:
    """beta, or its sigmoid, twice that if eigenvalues may be negative. None stays None."""
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if beta is None or not use_beta_sigmoid_in_kernel:
        return beta
    written = at_least_float32(beta).sigmoid()
    return 2 * written if allow_neg_eigval else written
