"""Lightning Attention-2 with a fixed decay per head, in its two published forms: LP and LC of the lasd report.

    r_i = Σ_j λ^|i-j| (x_i · y_j) z_j       over j ≤ i, or backward in time over j ≥ i

is the output for (x, y, z) = (q, k, v), dq for (do, v, k), and backward in time dk for (v, do, q), dv for (k, q, do).
*Chunk loop* walks blocks of 64 tokens with the state Σ λ^… y_j z_jᵀ of all earlier ones. *Parallel* first finds the
states between blocks of 256 tokens, then works on all blocks at once, quadratic inside of a block. Products have
operands in the inputs' dtype, the states' too, as published; there is no gradient for the decay. Heads come before
tokens, as published too.

CUDA tensors run the kernels of :mod:`fulmen.lab.baselines.lightning2_triton`; CPU tensors the torch form below, in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen.runtime.architectures import kernels_run_on
from fulmen.runtime.tensors import state_dtype

LOOP_BLOCK = 64
PARALLEL_BLOCK = 256
Walk = Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]


def lightning2_parallel(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """q, k ``[B, H, N, D]``, v ``[B, H, N, E]`` of one dtype, decay ``[H]`` (natural logarithm, at most 0) ->
    ``[B, H, N, E]``. Differentiable in q, k and v."""
    return _Lightning2.apply(q, k, v, decay, "parallel_walk")


def lightning2_chunk_loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """The same as :func:`lightning2_parallel` by the other form."""
    return _Lightning2.apply(q, k, v, decay, "loop_walk")


class _Lightning2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, form: str) -> Tensor:
        ctx.save_for_backward(q, k, v, decay)
        ctx.walk = _walk(form, q.device)
        return ctx.walk(q, k, v, decay, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (q, k, v, decay), do = ctx.saved_tensors, grads[0]
        dq = ctx.walk(do, v, k, decay, False)
        dk = ctx.walk(v, do, q, decay, True)
        dv = ctx.walk(k, q, do, decay, True)
        return dq, dk, dv, None, None


def _walk(form: str, device: torch.device) -> Walk:
    if not kernels_run_on(device):
        return {"loop_walk": loop_walk, "parallel_walk": parallel_walk}[form]
    from fulmen.lab.baselines import lightning2_triton

    return getattr(lightning2_triton, form)


def loop_walk(x: Tensor, y: Tensor, z: Tensor, decay: Tensor, backward: bool) -> Tensor:
    result = torch.empty_like(z)
    state = z.new_zeros(*z.shape[:2], x.shape[3], z.shape[3], dtype=state_dtype(z.dtype))
    starts = range(0, z.shape[2], LOOP_BLOCK)
    for start in reversed(starts) if backward else starts:
        tokens = slice(start, start + LOOP_BLOCK)
        xs, ys, zs = (t[:, :, tokens].to(state.dtype) for t in (x, y, z))
        result[:, :, tokens] = _read(xs, ys, zs, state, decay, backward)
        remaining = _powers(decay, torch.tensor(xs.shape[2], device=decay.device))
        state = remaining[:, None, None] * state + _added(ys, zs, decay, backward)
    return result


def parallel_walk(x: Tensor, y: Tensor, z: Tensor, decay: Tensor, backward: bool) -> Tensor:
    length = z.shape[2]
    padding = (0, 0, 0, -length % PARALLEL_BLOCK)
    # [B, blocks, H, tokens, channels]; zeros after the end add nothing, and nothing is read there.
    xs, ys, zs = (
        torch.nn.functional.pad(t, padding).unflatten(2, (-1, PARALLEL_BLOCK)).transpose(1, 2).to(state_dtype(t.dtype))
        for t in (x, y, z)
    )
    added = _added(ys, zs, decay, backward)
    remaining = _powers(decay, torch.tensor(PARALLEL_BLOCK, device=decay.device))[:, None, None]
    states = torch.zeros_like(added)
    order = range(added.shape[1])
    state = torch.zeros_like(added[:, :1]).squeeze(1)
    for block in reversed(order) if backward else order:
        states[:, block] = state
        state = remaining * state + added[:, block]
    result = _read(xs, ys, zs, states, decay, backward)
    return result.transpose(1, 2).flatten(2, 3)[:, :, :length].to(z.dtype)


def _read(x: Tensor, y: Tensor, z: Tensor, state: Tensor, decay: Tensor, backward: bool) -> Tensor:
    """What the tokens of a block ``[.., H, tokens, channels]`` get from each other and from the state before it."""
    rows = torch.arange(x.shape[-2], device=x.device)
    apart = rows[None, :] - rows[:, None] if backward else rows[:, None] - rows[None, :]
    weights = _powers(decay, apart.clamp_min(0)).masked_fill(apart < 0, 0.0)
    distance = len(rows) - 1 - rows if backward else rows + 1
    return ((x @ y.mT) * weights) @ z + _powers(decay, distance)[..., None] * (x @ state)


def _added(y: Tensor, z: Tensor, decay: Tensor, backward: bool) -> Tensor:
    """What the tokens of a block add to the state after it."""
    rows = torch.arange(y.shape[-2], device=y.device)
    distance = rows + 1 if backward else len(rows) - 1 - rows
    return (y * _powers(decay, distance)[..., None]).mT @ z


def _powers(decay: Tensor, exponents: Tensor) -> Tensor:
    """``[H, *exponents]``: λ to these powers; λ^0 is 1 also where the logarithm is -inf."""
    logs = decay.to(torch.float32 if decay.dtype != torch.float64 else decay.dtype)
    exponents = exponents.to(logs.dtype)
    return torch.where(exponents > 0, logs.view(-1, *[1] * exponents.ndim) * exponents, 0.0).exp()
