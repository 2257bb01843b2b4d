"""The custom ops ``fulmen::output_gated_attention`` and its gradient: schema, results, and the way to a backend.

An op allocates its results with the same function that its fake uses, and hands them to the backend to fill. What is
kept for the backward are further results of the forward op, empty where they are not kept.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fulmen.library import define, define_gradient, forbid_double_backward
from fulmen.output_gate.problem import Gated, Kept
from fulmen.tensors import state_dtype

# A backend is a module with forward and backward, imported when first used. (The reference is no op: it leaves its
# gradient to autograd.)
_MODULES = {
    "native": "fulmen.output_gate.native",
    "torch": "fulmen.output_gate.torch_matmul",
    "triton": "fulmen.output_gate.triton",
}


def _implementation(backend: str) -> ModuleType:
    return import_module(_MODULES[backend])


def _result_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, in the order of strides that ``x`` has, and dense along the last dimension."""
    result = torch.empty_like(x, dtype=dtype)  # of overlapping views, in any order
    return result if result.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


def _results(p: Gated, keep_kv: bool, keep_qkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    single = state_dtype(p.q.dtype)
    kv = p.q.new_empty(p.kv_shape if keep_kv else (0,), dtype=single)
    qkv = _result_like(p.g, single) if keep_qkv else p.q.new_empty(0, dtype=single)
    return _result_like(p.g), kv, qkv


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, keep_kv: bool, keep_qkv: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    p = Gated(q, k, v, g)
    output, kv, qkv = _results(p, keep_kv, keep_qkv)
    _implementation(backend).forward(p, output, Kept(kv if keep_kv else None, qkv if keep_qkv else None))
    return output, kv, qkv


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, keep_kv: bool, keep_qkv: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(Gated(q, k, v, g), keep_kv, keep_qkv)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, kv: Tensor | None, qkv: Tensor | None, backend: str
) -> tuple[Tensor, ...]:
    p = Gated(q, k, v, g)
    grads = Gated(*map(_result_like, p))
    _implementation(backend).backward(p, Kept(kv, qkv), grad, grads)
    return tuple(grads)


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, kv: Tensor | None, qkv: Tensor | None, backend: str
) -> tuple[Tensor, ...]:
    return tuple(map(_result_like, (q, k, v, g)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *p, keep_kv, keep_qkv, ctx.backend = inputs
    _, kv, qkv = output
    ctx.mark_non_differentiable(kv, qkv)
    ctx.save_for_backward(*p, kv if keep_kv else None, qkv if keep_qkv else None)


def _gradient(ctx: Any, grad: Tensor, *of_kept: Any) -> tuple[Tensor | None, ...]:
    grads = torch.ops.fulmen.output_gated_attention_backward(grad, *ctx.saved_tensors, ctx.backend)
    wanted = zip(grads, ctx.needs_input_grad[:4], strict=True)
    return *(x if needed else None for x, needed in wanted), None, None, None


define(
    """output_gated_attention(Tensor q, Tensor k, Tensor v, Tensor g, bool keep_kv, bool keep_qkv,
    str backend) -> (Tensor, Tensor, Tensor)""",
    _forward,
    _forward_fake,
)
define(
    """output_gated_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor g, Tensor? kv, Tensor? qkv,
    str backend) -> (Tensor, Tensor, Tensor, Tensor)""",
    _backward,
    _backward_fake,
)
define_gradient("output_gated_attention", _gradient, _keep)
forbid_double_backward("output_gated_attention")
