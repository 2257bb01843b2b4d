"""The custom ops ``fulmen::*``: schema, results, gradient, and the way to a backend.

An op allocates its results with the same function that its fake uses, and hands them to the backend to fill. The
gradient of an op is an op of its own, so that torch.compile sees one node for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.library import define, define_gradient, forbid_double_backward, imported_when_used
from fulmen.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.tensors import state_dtype

# A backend is a module with forward, backward, step, states_forward and states_backward, imported when first used.
_MODULES = {
    "native": "fulmen.linear_attention.native",
    "reference": "fulmen.linear_attention.reference",
    "torch": "fulmen.linear_attention.torch_chunked",
    "triton": "fulmen.linear_attention.triton",
}
_implementation = imported_when_used(_MODULES)


def _wanted(p: Attention | States, needs_input_grad: tuple[bool, ...]) -> list[bool]:
    """Which of the gradients somebody asks for."""
    needed = dict(zip(p._fields, needs_input_grad, strict=False))
    return [needed.get(name, False) for name in Gradients._fields]


def _new_gradients(p: Attention | States, wanted: list[bool]) -> Gradients:
    def new(name: str) -> Tensor:
        x: Tensor = getattr(p, name)
        is_decay = name in ("decay", "decay_v")
        return x.new_zeros(x.shape, dtype=state_dtype(p.k.dtype)) if is_decay else x.new_empty(x.shape)

    return Gradients(*(new(name) if wants else None for name, wants in zip(Gradients._fields, wanted, strict=True)))


def _returned(p: Attention | States, grads: Gradients) -> tuple[Tensor, ...]:
    """The gradients as an op returns them: decays in their own dtype, and an empty tensor for what is None."""
    if grads.decay is not None and p.decay is not None:
        grads = grads._replace(decay=grads.decay.to(p.decay.dtype))
    if grads.decay_v is not None and p.decay_v is not None:
        grads = grads._replace(decay_v=grads.decay_v.to(p.decay_v.dtype))
    return tuple(p.k.new_empty(0) if x is None else x for x in grads)


def _by_input(p: Attention | States, wanted: list[bool], grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """What an op returned, as autograd takes it: for each input its gradient, or None."""
    by_name = {name: x for name, x, wants in zip(Gradients._fields, grads, wanted, strict=True) if wants}
    return tuple(by_name.get(name) for name in p._fields)


# ---- linear_attention ------------------------------------------------------------------------------------------------


def _attention_results(p: Attention, return_state: bool) -> tuple[Tensor, Tensor]:
    state = p.q.new_empty(p.state_shape if return_state else (0,), dtype=state_dtype(p.q.dtype))
    return p.v.new_empty(p.output_shape), state


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, backend = args
    p = Attention(*call)
    output, state = _attention_results(p, return_state)
    _implementation(backend).forward(p, output, state if return_state else None)
    return output, state


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *call, return_state, _ = args
    return _attention_results(Attention(*call), return_state)


def _attention_backward(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, backend = args
    p = Attention(*call)
    grads = _new_gradients(p, wanted)
    _implementation(backend).backward(p, grad_output, grad_state, grads)
    return _returned(p, grads)


def _attention_backward_fake(grad_output: Tensor | None, grad_state: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, _ = args
    p = Attention(*call)
    return _returned(p, _new_gradients(p, wanted))


def _attention_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *call, ctx.return_state, ctx.backend = inputs
    p = Attention(*call)
    ctx.save_for_backward(p.q, p.k, p.v, p.decay, p.decay_v, p.initial_state, p.cu_seqlens)
    ctx.scale, ctx.schedule = p.scale, p.schedule
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, decay, decay_v, initial_state, cu_seqlens = ctx.saved_tensors
    p = Attention(q, k, v, decay, decay_v, ctx.scale, initial_state, cu_seqlens, ctx.schedule)
    grad_state = grad_state if ctx.return_state else None
    wanted = _wanted(p, ctx.needs_input_grad)
    grads = torch.ops.fulmen.linear_attention_backward(grad_output, grad_state, *p, wanted, ctx.backend)
    return *_by_input(p, wanted, grads), None, None


_ATTENTION_ARGS = """Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? decay_v, float scale,
    Tensor? initial_state, Tensor? cu_seqlens, str schedule"""
define(
    f"linear_attention({_ATTENTION_ARGS}, bool return_state, str backend) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
define(
    f"""linear_attention_backward(Tensor? grad_output, Tensor? grad_state, {_ATTENTION_ARGS},
    bool[] wanted, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    _attention_backward,
    _attention_backward_fake,
    tensor=2,
)
define_gradient("linear_attention", _attention_gradient, _attention_keep)
forbid_double_backward("linear_attention")


# ---- linear_attention_step -------------------------------------------------------------------------------------------


def _step(*args: Any) -> Tensor:
    p, backend = Step(*args[:-1]), args[-1]
    output = p.v.new_empty(p.output_shape)
    _implementation(backend).step(p, output)
    return output


def _step_fake(*args: Any) -> Tensor:
    *call, _ = args
    p = Step(*call)
    return p.v.new_empty(p.output_shape)


define(
    """linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? decay, Tensor? decay_v,
    float scale, str backend) -> Tensor""",
    _step,
    _step_fake,
)


# ---- chunk_states ----------------------------------------------------------------------------------------------------


def _states_result(p: States) -> Tensor:
    return p.k.new_empty(p.states_shape, dtype=state_dtype(p.k.dtype))


def _states(*args: Any) -> Tensor:
    *call, backend = args
    p = States(*call)
    states = _states_result(p)
    _implementation(backend).states_forward(p, states)
    return states


def _states_fake(*args: Any) -> Tensor:
    *call, _ = args
    return _states_result(States(*call))


def _states_backward(states: Tensor, grad_states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, backend = args
    p = States(*call)
    grads = _new_gradients(p, wanted)
    _implementation(backend).states_backward(p, states, grad_states, grads)
    return _returned(p, grads)


def _states_backward_fake(states: Tensor, grad_states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *call, wanted, _ = args
    p = States(*call)
    return _returned(p, _new_gradients(p, wanted))


def _states_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *call, ctx.backend = inputs
    p = States(*call)
    ctx.save_for_backward(output, p.k, p.v, p.decay, p.decay_v, p.initial_state)
    ctx.chunk_size, ctx.schedule = p.chunk_size, p.schedule


def _states_gradient(ctx: Any, grad_states: Tensor) -> tuple[Tensor | None, ...]:
    states, k, v, decay, decay_v, initial_state = ctx.saved_tensors
    p = States(k, v, decay, decay_v, initial_state, ctx.chunk_size, ctx.schedule)
    wanted = _wanted(p, ctx.needs_input_grad)
    grads = torch.ops.fulmen.chunk_states_backward(states, grad_states, *p, wanted, ctx.backend)
    return *_by_input(p, wanted, grads), None


_STATES_ARGS = """Tensor k, Tensor v, Tensor? decay, Tensor? decay_v, Tensor? initial_state, int chunk_size,
    str schedule"""
define(f"chunk_states({_STATES_ARGS}, str backend) -> Tensor", _states, _states_fake)
define(
    f"""chunk_states_backward(Tensor states, Tensor grad_states, {_STATES_ARGS},
    bool[] wanted, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    _states_backward,
    _states_backward_fake,
)
define_gradient("chunk_states", _states_gradient, _states_keep)
forbid_double_backward("chunk_states")
