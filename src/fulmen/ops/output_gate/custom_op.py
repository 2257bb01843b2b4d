"""The custom ops ``fulmen::output_gated_attention`` and its gradient: schema, results, and the way to a backend.

An op allocates its results with the same function that its fake uses, and hands them to the backend to fill. What is
kept for the backward are further results of the forward op, empty where they are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen.ops.output_gate.problem import GateBackend, Gated, Kept
from fulmen.runtime.gradients import by_input, requested
from fulmen.runtime.library import define, define_gradient, without_gradient
from fulmen.runtime.operators import Operator
from fulmen.runtime.tensors import state_dtype

# The reference is no op: it leaves its gradient to autograd.
OPERATOR = Operator(
    name="output_gate",
    protocol=GateBackend,
    backends={
        "native": "fulmen.ops.output_gate.native",
        "torch": "fulmen.ops.output_gate.torch_matmul",
        "triton": "fulmen.ops.output_gate.triton",
    },
    workloads="fulmen.lab.operators.output_gate.workloads",
    checks="fulmen.lab.operators.output_gate.checks",
    limits="fulmen.lab.operators.output_gate.limits",
)
_backend: Callable[[str], GateBackend] = OPERATOR.backend


def _result_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, in the order of strides that ``x`` has, and dense along the last dimension."""
    result = torch.empty_like(x, dtype=dtype)  # of overlapping views, in any order
    return result if result.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


def _results(p: Gated, keep_kv: bool, keep_qkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    single = state_dtype(p.q.dtype)
    kv = p.q.new_empty(p.kv_shape if keep_kv else (0,), dtype=single)
    ungated = p.q.dtype if p.q.dtype == torch.bfloat16 else single  # float16 could overflow
    qkv = _result_like(p.gate, ungated) if keep_qkv else p.q.new_empty(0, dtype=ungated)
    return _result_like(p.gate), kv, qkv


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, keep_kv: bool, keep_qkv: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    p = Gated(q, k, v, gate)
    output, kv, qkv = _results(p, keep_kv, keep_qkv)
    _backend(backend).forward(p, output, Kept(kv if keep_kv else None, qkv if keep_qkv else None))
    return output, kv, qkv


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, keep_kv: bool, keep_qkv: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(Gated(q, k, v, gate), keep_kv, keep_qkv)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, kv: Tensor | None, qkv: Tensor | None, backend: str
) -> tuple[Tensor, ...]:
    p = Gated(q, k, v, gate)
    grads = Gated(*map(_result_like, p))
    _backend(backend).backward(p, Kept(kv, qkv), grad, grads)
    return tuple(grads)


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, kv: Tensor | None, qkv: Tensor | None, backend: str
) -> tuple[Tensor, ...]:
    return tuple(map(_result_like, (q, k, v, gate)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *p, keep_kv, keep_qkv, ctx.backend = inputs
    _, kv, qkv = output
    ctx.mark_non_differentiable(kv, qkv)
    ctx.set_materialize_grads(False)  # torch would make zeros for what is kept
    ctx.save_for_backward(*p, kv if keep_kv else None, qkv if keep_qkv else None)


def _gradient(ctx: Any, grad: Tensor | None, *of_kept: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    *inputs, kv, qkv = ctx.saved_tensors
    p = Gated(*inputs)
    grads = _output_gated_attention_backward(grad, *p, kv, qkv, ctx.backend)
    return *by_input(Gated, p, requested(Gated, p, ctx.needs_input_grad), grads), None, None, None


define(
    """output_gated_attention(Tensor q, Tensor k, Tensor v, Tensor gate, bool keep_kv, bool keep_qkv,
    str backend) -> (Tensor, Tensor, Tensor)""",
    _forward,
    _forward_fake,
)
define(
    """output_gated_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? kv, Tensor? qkv,
    str backend) -> (Tensor, Tensor, Tensor, Tensor)""",
    _backward,
    _backward_fake,
)
output_gated_attention = define_gradient("output_gated_attention", _gradient, _keep)
_output_gated_attention_backward = without_gradient("output_gated_attention_backward", "output_gated_attention")
