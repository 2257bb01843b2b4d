"""The custom ops ``fulmen::delta_rule``, its gradient and its step: schema, results, and the way to a backend.

An op allocates its results with the same function that its fake uses, and hands them to the backend to fill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fulmen.ops.delta_rule.problem import DeltaRule, DeltaRuleBackend, Gradients, Step
from fulmen.runtime.gradients import allocated, by_input, requested, returned
from fulmen.runtime.library import define, define_gradient, without_gradient
from fulmen.runtime.operators import Operator
from fulmen.runtime.recording import note_update
from fulmen.runtime.tensors import state_dtype
from fulmen.runtime.warning import warn_if_growing

OPERATOR = Operator(
    name="delta_rule",
    protocol=DeltaRuleBackend,
    backends={
        "native": "fulmen.ops.delta_rule.native",
        "reference": "fulmen.ops.delta_rule.reference",
        "torch": "fulmen.ops.delta_rule.torch_chunked",
        "triton": "fulmen.ops.delta_rule.triton",
    },
    workloads="fulmen.lab.operators.delta_rule.workloads",
    checks="fulmen.lab.operators.delta_rule.checks",
    limits="fulmen.lab.operators.delta_rule.limits",
)
_backend: Callable[[str], DeltaRuleBackend] = OPERATOR.backend
_SHARED = {"log_decay": 1}  # one per head


# ---- delta_rule ------------------------------------------------------------------------------------------------------


def _results(p: DeltaRule, return_state: bool) -> tuple[Tensor, Tensor]:
    state = p.q.new_empty(p.state_shape if return_state else (0,), dtype=state_dtype(p.q.dtype))
    return p.v.new_empty(p.output_shape), state


def _new_gradients(p: DeltaRule, wanted: list[bool]) -> Gradients:
    def new(name: str, x: Tensor) -> Tensor:
        if name in ("q", "k", "v"):
            return x.new_empty(x.shape)
        allocate = x.new_zeros if name == "log_decay" else x.new_empty
        return allocate(x.shape, dtype=state_dtype(p.k.dtype))

    return allocated(Gradients, p, wanted, new)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, backend = args
    p = DeltaRule(*call)
    warn_if_growing(backend, p.log_decay)
    output, state = _results(p, return_state)
    _backend(backend).forward(p, output, state if return_state else None)
    return output, state


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, _ = args
    return _results(DeltaRule(*call), return_state)


def _backward(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, backend = args
    p = DeltaRule(*call)
    grads = _new_gradients(p, wanted)
    _backend(backend).backward(p, grad_output, grad_state, grads)
    return returned(p, grads, p.k)


def _backward_fake(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, _ = args
    p = DeltaRule(*call)
    return returned(p, _new_gradients(p, wanted), p.k)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *call, ctx.return_state, ctx.backend = inputs
    p = DeltaRule(*call)
    ctx.save_for_backward(p.q, p.k, p.v, p.beta, p.log_decay, p.initial_state, p.cu_seqlens)
    ctx.normalize_qk, ctx.scale, ctx.schedule = p.normalize_qk, p.scale, p.schedule
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, beta, log_decay, initial_state, cu_seqlens = ctx.saved_tensors
    options = ctx.normalize_qk, ctx.scale, initial_state, cu_seqlens, ctx.schedule
    p = DeltaRule(q, k, v, beta, log_decay, *options)
    grad_state = grad_state if ctx.return_state else None
    wanted = requested(Gradients, p, ctx.needs_input_grad)
    grads = _delta_rule_backward(grad_output, grad_state, *p, wanted, ctx.backend)
    return *by_input(Gradients, p, wanted, grads), None, None


_ARGS = """Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? log_decay, bool normalize_qk, float scale,
    Tensor? initial_state, Tensor? cu_seqlens, str schedule"""
define(
    f"delta_rule({_ARGS}, bool return_state, str backend) -> (Tensor, Tensor)", _forward, _forward_fake, shared=_SHARED
)
define(
    f"""delta_rule_backward(Tensor? grad_output, Tensor? grad_state, {_ARGS},
    bool[] wanted, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    _backward,
    _backward_fake,
    tensor=2,
    shared=_SHARED,
    gradients=Gradients._fields,
)
delta_rule = define_gradient("delta_rule", _gradient, _keep)
_delta_rule_backward = without_gradient("delta_rule_backward", "delta_rule")


# ---- delta_rule_step -------------------------------------------------------------------------------------------------


def _step(*args: Any) -> Tensor:
    p, backend = Step(*args[:-1]), args[-1]
    warn_if_growing(backend, p.log_decay)
    output = p.v.new_empty(p.output_shape)
    try:
        _backend(backend).step(p, output)
    finally:  # a warning that is an error comes when the state has been updated
        note_update(p.state)
    return output


def _step_fake(*args: Any) -> Tensor:
    p = Step(*args[:-1])
    return p.v.new_empty(p.output_shape)


delta_rule_step = define(
    """delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor(a!) state, Tensor? log_decay,
    bool normalize_qk, float scale, str backend) -> Tensor""",
    _step,
    _step_fake,
    shared=_SHARED,
)
