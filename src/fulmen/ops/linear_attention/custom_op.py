"""The custom ops ``fulmen::*``: schema, results, gradient, and the way to a backend.

An op allocates its results with the same function that its fake uses, and hands them to the backend to fill. The
gradient of an op is an op of its own, so that torch.compile sees one node for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fulmen.ops.linear_attention.problem import Attention, AttentionBackend, Gradients, States, Step
from fulmen.runtime.gradients import allocated, by_input, requested, returned
from fulmen.runtime.library import define, define_gradient, without_gradient
from fulmen.runtime.operators import Operator
from fulmen.runtime.recording import note_update
from fulmen.runtime.tensors import state_dtype
from fulmen.runtime.warning import warn_if_growing

OPERATOR = Operator(
    name="linear_attention",
    protocol=AttentionBackend,
    backends={
        "native": "fulmen.ops.linear_attention.native",
        "reference": "fulmen.ops.linear_attention.reference",
        "torch": "fulmen.ops.linear_attention.torch_chunked",
        "triton": "fulmen.ops.linear_attention.triton",
    },
    workloads="fulmen.lab.operators.linear_attention.workloads",
    checks="fulmen.lab.operators.linear_attention.checks",
    limits="fulmen.lab.operators.linear_attention.limits",
)
_backend: Callable[[str], AttentionBackend] = OPERATOR.backend
_SHARED = {"log_decay": 1}  # one per head


def _new_gradients(p: Attention | States, wanted: list[bool]) -> Gradients:
    """Of decays and states in the state's dtype; decays start as zeros, to be added to."""

    def new(name: str, x: Tensor) -> Tensor:
        if name in ("q", "k", "v"):
            return x.new_empty(x.shape)
        allocate = x.new_empty if name == "initial_state" else x.new_zeros
        return allocate(x.shape, dtype=state_dtype(p.k.dtype))

    return allocated(Gradients, p, wanted, new)


# ---- linear_attention ------------------------------------------------------------------------------------------------


def _attention_results(p: Attention, return_state: bool) -> tuple[Tensor, Tensor]:
    state = p.q.new_empty(p.state_shape if return_state else (0,), dtype=state_dtype(p.q.dtype))
    return p.v.new_empty(p.output_shape), state


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, backend = args
    p = Attention(*call)
    warn_if_growing(backend, p.log_decay, p.log_decay_v)
    output, state = _attention_results(p, return_state)
    _backend(backend).forward(p, output, state if return_state else None)
    return output, state


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, _ = args
    return _attention_results(Attention(*call), return_state)


def _attention_backward(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, backend = args
    p = Attention(*call)
    grads = _new_gradients(p, wanted)
    _backend(backend).backward(p, grad_output, grad_state, grads)
    return returned(p, grads, p.k)


def _attention_backward_fake(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, _ = args
    p = Attention(*call)
    return returned(p, _new_gradients(p, wanted), p.k)


def _attention_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *call, ctx.return_state, ctx.backend = inputs
    p = Attention(*call)
    ctx.save_for_backward(p.q, p.k, p.v, p.log_decay, p.log_decay_v, p.initial_state, p.cu_seqlens)
    ctx.scale, ctx.schedule = p.scale, p.schedule
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, log_decay_v, initial_state, cu_seqlens = ctx.saved_tensors
    p = Attention(q, k, v, log_decay, log_decay_v, ctx.scale, initial_state, cu_seqlens, ctx.schedule)
    grad_state = grad_state if ctx.return_state else None
    wanted = requested(Gradients, p, ctx.needs_input_grad)
    grads = _linear_attention_backward(grad_output, grad_state, *p, wanted, ctx.backend)
    return *by_input(Gradients, p, wanted, grads), None, None


_ATTENTION_ARGS = """Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? log_decay_v, float scale,
    Tensor? initial_state, Tensor? cu_seqlens, str schedule"""
define(
    f"linear_attention({_ATTENTION_ARGS}, bool return_state, str backend) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    shared=_SHARED,
)
define(
    f"""linear_attention_backward(Tensor? grad_output, Tensor? grad_state, {_ATTENTION_ARGS},
    bool[] wanted, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    _attention_backward,
    _attention_backward_fake,
    tensor=2,
    shared=_SHARED,
    gradients=Gradients._fields,
)
linear_attention = define_gradient("linear_attention", _attention_gradient, _attention_keep)
_linear_attention_backward = without_gradient("linear_attention_backward", "linear_attention")


# ---- linear_attention_step -------------------------------------------------------------------------------------------


def _step(*args: Any) -> Tensor:
    p, backend = Step(*args[:-1]), args[-1]
    warn_if_growing(backend, p.log_decay, p.log_decay_v)
    output = p.v.new_empty(p.output_shape)
    try:
        _backend(backend).step(p, output)
    finally:  # a warning that is an error comes when the state has been updated
        note_update(p.state)
    return output


def _step_fake(*args: Any) -> Tensor:
    *call, _ = args
    p = Step(*call)
    return p.v.new_empty(p.output_shape)


linear_attention_step = define(
    """linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? log_decay, Tensor? log_decay_v,
    float scale, str backend) -> Tensor""",
    _step,
    _step_fake,
    shared=_SHARED,
)


# ---- chunk_states ----------------------------------------------------------------------------------------------------


def _states_result(p: States) -> Tensor:
    return p.k.new_empty(p.states_shape, dtype=state_dtype(p.k.dtype))


def _states(*args: Any) -> Tensor:
    *call, backend = args
    p = States(*call)
    warn_if_growing(backend, p.log_decay, p.log_decay_v)
    states = _states_result(p)
    _backend(backend).states_forward(p, states)
    return states


def _states_fake(*args: Any) -> Tensor:
    *call, _ = args
    return _states_result(States(*call))


def _states_backward(states: Tensor, grad_states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, backend = args
    p = States(*call)
    grads = _new_gradients(p, wanted)
    _backend(backend).states_backward(p, states, grad_states, grads)
    return returned(p, grads, p.k)


def _states_backward_fake(states: Tensor, grad_states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, _ = args
    p = States(*call)
    return returned(p, _new_gradients(p, wanted), p.k)


def _states_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *call, ctx.backend = inputs
    p = States(*call)
    ctx.save_for_backward(output, p.k, p.v, p.log_decay, p.log_decay_v, p.initial_state)
    ctx.chunk_size, ctx.schedule = p.chunk_size, p.schedule


def _states_gradient(ctx: Any, grad_states: Tensor) -> tuple[Tensor | None, ...]:
    states, k, v, log_decay, log_decay_v, initial_state = ctx.saved_tensors
    p = States(k, v, log_decay, log_decay_v, initial_state, ctx.chunk_size, ctx.schedule)
    wanted = requested(Gradients, p, ctx.needs_input_grad)
    grads = _chunk_states_backward(states, grad_states, *p, wanted, ctx.backend)
    return *by_input(Gradients, p, wanted, grads), None


_STATES_ARGS = """Tensor k, Tensor v, Tensor? log_decay, Tensor? log_decay_v, Tensor? initial_state, int chunk_size,
    str schedule"""
define(f"chunk_states({_STATES_ARGS}, str backend) -> Tensor", _states, _states_fake, shared=_SHARED)
define(
    f"""chunk_states_backward(Tensor states, Tensor grad_states, {_STATES_ARGS},
    bool[] wanted, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    _states_backward,
    _states_backward_fake,
    shared=_SHARED,
    gradients=Gradients._fields,
)
chunk_states = define_gradient("chunk_states", _states_gradient, _states_keep)
_chunk_states_backward = without_gradient("chunk_states_backward", "chunk_states")
