"""The functions that transformers' Mamba-2 mixers call, under their names and with their arguments.

How that is linear attention: fulmen.nn.mamba2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import silu

import fulmen
from fulmen.integrations.transformers.recurrence import over_rows
from fulmen.nn.gates import step_size
from fulmen.nn.mamba2 import UNLIMITED, scan, weighed, with_skip


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = UNLIMITED,
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """All tokens: hidden_states ``[B, N, H, P]``, dt ``[B, N, H]``, A ``[H]``, B and C ``[B, N, G, S]``, D and dt_bias
    ``[H]``, states ``[B, H, P, S]``. ``chunk_size`` is transformers' own; the operator has its own chunks."""
    if kwargs.get("z") is not None:
        raise ValueError("z is not supported")
    dt = step_size(dt, dt_bias, dt_softplus=dt_softplus)
    if not dt_softplus or tuple(dt_limit) != UNLIMITED:
        dt = dt.clamp(*dt_limit)
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    output, state = over_rows(scan, C, B, hidden_states, dt, log_decay=dt * A, state=state, packed=kwargs, D=D)
    return (output, state.transpose(-1, -2)) if return_final_states else output


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """One token: state ``[B, H, P, S]``, updated in place, hidden_states and z ``[B, H, P]``, B and C ``[B, G, S]``.
    dt ``[B, H, P]``, A ``[H, P, S]`` and dt_bias ``[H, P]`` are one number for each head, expanded."""
    dt, A = _of_head("dt", dt, 1), _of_head("A", A, 2)
    dt_bias = None if dt_bias is None else _of_head("dt_bias", dt_bias, 1)
    dt = step_size(dt, dt_bias, dt_softplus=dt_softplus)
    output = fulmen.linear_attention_step(
        C,
        B,
        weighed(hidden_states, dt),
        state.transpose(-1, -2),
        log_decay=dt * A,
        scale=1.0,
    )
    if D is not None:
        output = with_skip(output, hidden_states, D)
    return output if z is None else output * silu(z)


def mamba2_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    dt_limit: Sequence[float] = UNLIMITED,
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **kwargs: Any,
) -> None:
    """No fused kernel: the mixer goes on to the functions above. (transformers' own also answers None on a CPU, but
    refuses packed sequences before it does.)"""
    return


def _of_head(name: str, x: Tensor, expanded: int) -> Tensor:
    """Without its last ``expanded`` dimensions, along which it is the same number."""
    for _ in range(expanded):
        if x.stride(-1) != 0 and x.shape[-1] != 1:
            raise ValueError(f"{name} must be one number for each head, expanded; got strides {list(x.stride())}")
        x = x.select(-1, 0)
    return x
