"""The calls of linear attention that dry runs make, with every decay, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fulmen.lab.inspect.dry_run import Launch, dry_run
from fulmen.lab.inspect.inspection import DECAYS, Shape, Workload
from fulmen.lab.inspect.traffic import requested_bytes
from fulmen.lab.operators.linear_attention.traffic import BYTES
from fulmen.ops.chunks.decay_form import Decays, tokens_of
from fulmen.ops.linear_attention import triton as _backend
from fulmen.ops.linear_attention.problem import Attention, Gradients, States, Step
from fulmen.runtime.architectures import Architecture

__all__ = ["BYTES", "WORKLOADS"]


def attention(
    decays: Decays, dtype: torch.dtype, key_size: int, value_size: int,
    batch: int = 4, length: int = 32768, heads: int = 32,
) -> Attention:  # fmt: skip
    """A call at the size of the published tables, to be made in a dry run."""
    tokens = batch, length, heads
    logs = {name: torch.empty(shape) for name, shape in decays.shapes(*tokens, key_size, value_size).items()}
    return Attention(
        q=torch.empty(*tokens, key_size, dtype=dtype),
        k=torch.empty(*tokens, key_size, dtype=dtype),
        v=torch.empty(*tokens, value_size, dtype=dtype),
        log_decay=logs.get("log_decay"),
        log_decay_v=logs.get("log_decay_v"),
        scale=1.0,
        initial_state=None,
        cu_seqlens=None,
        schedule="auto",
    )


def gradients(p: Attention, learnable: bool = True) -> Gradients:
    """Of q, k and v, and if they are learnable of the decays."""
    key, value = (torch.empty(x.shape) if x is not None and learnable else None for x in (p.log_decay, p.log_decay_v))
    return Gradients(torch.empty_like(p.q), torch.empty_like(p.k), torch.empty_like(p.v), key, value, None)


def linear_attention(launches: list[Launch], shape: Shape) -> Iterator[tuple[str, Launch]]:
    """One launch of each kernel of the three functions for each of its uses."""
    p = attention(shape.decays, shape.dtype, shape.D, shape.E)

    def named(walk: str = "", other: str = "") -> Iterator[tuple[str, Launch]]:
        """Walks by what they compute, other kernels by their names, either followed by what is special here."""
        for launch in launches:
            if launch.kernel == "walk":
                of_dc = launch.arguments["WALK"] == "output" and launch.arguments["result"] is None
                yield f"{'output for dc' if of_dc else launch.arguments['WALK']}{walk}", launch
            else:
                yield f"{launch.kernel}{other}", launch
        launches.clear()

    output = torch.empty(p.output_shape, dtype=shape.dtype)
    _backend.forward(p._replace(schedule="loop"), output, None)
    yield from named()
    _backend.forward(p._replace(schedule="parallel"), output, None)
    yield from named(walk=" from boundaries")
    _backend.backward(p._replace(schedule="loop"), output, None, gradients(p, shape.learnable))
    yield from named()
    _backend.backward(p._replace(schedule="recompute"), output, None, gradients(p, shape.learnable))
    yield from named(walk=", recompute", other=", backward")
    _backend.forward(p._replace(schedule="recurrent"), output, None)
    yield from named()

    one = attention(shape.decays, shape.dtype, shape.D, shape.E, batch=1)
    packed = one._replace(schedule="loop", cu_seqlens=torch.empty(9, dtype=torch.int32))
    output = torch.empty(packed.output_shape, dtype=shape.dtype)
    _backend.forward(packed, output, None)
    _backend.backward(packed, output, None, gradients(packed, shape.learnable))
    yield from named(walk=", packed")

    states = States(p.k, p.v, p.log_decay, p.log_decay_v, None, 128, "loop")
    boundaries = torch.empty(states.states_shape)
    _backend.states_forward(states, boundaries)
    yield from named(walk=", carried")
    _backend.states_backward(states, boundaries, torch.empty(states.states_shape), gradients(p, shape.learnable))
    yield from named(walk=" of states", other=", backward")

    batch, _, heads, _ = p.output_shape
    state = torch.empty(batch, heads, shape.D, shape.E)
    logs = tokens_of(p.log_decay, 0), tokens_of(p.log_decay_v, 0)
    token = Step(p.q[:, 0], p.k[:, 0], p.v[:, 0], state, *logs, 1.0)
    _backend.step(token, torch.empty(token.output_shape, dtype=shape.dtype))
    yield from named(other=", step")


WORKLOADS = (Workload("linear_attention", "kernel", tuple(DECAYS), linear_attention),)


class Bytes(NamedTuple):
    """Of one pass: what it is given, what it returns, and what else it allocates at most at once."""

    inputs: int
    outputs: int
    workspace: int


def attention_memory(
    architecture: Architecture, decays: Decays, schedule: str, learnable: bool = True,
    batch: int = 4, length: int = 32768, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Bytes, Bytes]:  # fmt: skip
    """Of linear_attention, forward and backward. The backward is also given the output's gradient."""
    with dry_run(architecture) as (_, memory):
        p = attention(decays, dtype, dim, dim, batch, length, heads)._replace(schedule=schedule)
        given = memory.allocated
        output = torch.empty(p.output_shape, dtype=dtype)
        returned = memory.allocated - given
        with memory.workspace() as forward:
            _backend.forward(p, output, None)
        before = memory.allocated
        grads = gradients(p, learnable)
        gradient = memory.allocated - before
        with memory.workspace() as backward:
            _backend.backward(p, output, None, grads)
    return Bytes(given, returned, forward[0]), Bytes(given + returned, gradient, backward[0])


def states_memory(
    architecture: Architecture, decays: Decays, schedule: str,
    batch: int = 4, length: int = 32768, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16,
) -> Bytes:  # fmt: skip
    """Of chunk_states, forward, with chunks of 128 tokens."""
    with dry_run(architecture) as (_, memory):
        p = _states(decays, schedule, batch, length, heads, dim, dtype)
        given = memory.allocated
        states = torch.empty(p.states_shape)
        returned = memory.allocated - given
        with memory.workspace() as forward:
            _backend.states_forward(p, states)
    return Bytes(given, returned, forward[0])


def attention_traffic(
    architecture: Architecture, decays: Decays, schedule: str, learnable: bool = True
) -> tuple[int, int]:
    """Bytes that forward and backward of linear_attention request (:mod:`fulmen.lab.inspect.traffic`), at the size of
    the published tables."""
    forward, backward = attention_launched(architecture, decays, schedule, learnable)
    return requested_bytes(forward), requested_bytes(backward)


def attention_launched(
    architecture: Architecture, decays: Decays, schedule: str, learnable: bool = True,
    batch: int = 4, length: int = 32768, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Launch], list[Launch]]:  # fmt: skip
    """What forward and backward of linear_attention launch."""
    with dry_run(architecture) as (launches, _):
        p = attention(decays, dtype, dim, dim, batch, length, heads)._replace(schedule=schedule)
        output = torch.empty(p.output_shape, dtype=dtype)
        _backend.forward(p, output, None)
        forward = launches.copy()
        launches.clear()
        _backend.backward(p, output, None, gradients(p, learnable))
    return forward, launches


def states_launched(
    architecture: Architecture, decays: Decays,
    batch: int, length: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16,
) -> list[Launch]:  # fmt: skip
    """The same for the forward of chunk_states."""
    with dry_run(architecture) as (launches, _):
        p = _states(decays, "auto", batch, length, heads, dim, dtype)
        _backend.states_forward(p, torch.empty(p.states_shape))
    return launches


def _states(decays: Decays, schedule: str, batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> States:
    p = attention(decays, dtype, dim, dim, batch, length, heads)
    return States(p.k, p.v, p.log_decay, p.log_decay_v, None, 128, schedule)
