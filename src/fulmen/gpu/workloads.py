"""The calls that dry runs make: every operator with every decay, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from fulmen.gpu.architectures import DECAYS, Architecture
from fulmen.gpu.dry_run import Launch, dry_run
from fulmen.gpu.inspection import Shape, Workload
from fulmen.linear_attention.problem import Attention, Gradients, States, Step

_backend: Any = import_module("fulmen.linear_attention.triton")


def attention(
    decay: str, dtype: torch.dtype, key_dim: int, value_dim: int, batch: int = 4, length: int = 32768, heads: int = 32
) -> Attention:
    """A call at the size of the published tables, to be made in a dry run."""
    tokens = batch, length, heads
    shapes = {"constant": (heads,), "learnable": (heads,), "token": tokens, "key": (*tokens, key_dim)}
    key, _, value = decay.partition("+")
    return Attention(
        q=torch.empty(*tokens, key_dim, dtype=dtype),
        k=torch.empty(*tokens, key_dim, dtype=dtype),
        v=torch.empty(*tokens, value_dim, dtype=dtype),
        decay=torch.empty(shapes[key]) if key in shapes else None,
        decay_v=torch.empty(*tokens, value_dim) if value else None,
        scale=1.0,
        initial_state=None,
        cu_seqlens=None,
        schedule="auto",
    )


def gradients(p: Attention, decay: str) -> Gradients:
    wanted = p.decay is not None and decay != "constant"
    return Gradients(
        torch.empty_like(p.q),
        torch.empty_like(p.k),
        torch.empty_like(p.v),
        torch.empty(p.decay.shape) if p.decay is not None and wanted else None,
        None if p.decay_v is None else torch.empty(p.decay_v.shape),
        None,
    )


def linear_attention(launches: list[Launch], shape: Shape) -> Iterator[tuple[str, Launch]]:
    """One launch of each kernel of the three functions for each of its uses."""
    p = attention(shape.decay, shape.dtype, shape.D, shape.E)

    def named(walks: list[str], where: str = "") -> Iterator[tuple[str, Launch]]:
        for launch in launches:
            yield walks.pop(0) if launch.kernel == "scan" else f"{launch.kernel}{where}", launch
        launches.clear()

    output = torch.empty(p.output_shape, dtype=shape.dtype)
    walks = ["dq", "output for dc", "dk", "dv"] if p.decay_v is not None else ["dq", "dk", "dv"]
    _backend.forward(p._replace(schedule="loop"), output, None)
    yield from named(["output"])
    _backend.forward(p._replace(schedule="parallel"), output, None)
    yield from named(["output from edges"])
    _backend.backward(p._replace(schedule="loop"), output, None, gradients(p, shape.decay))
    yield from named([*walks])
    _backend.backward(p._replace(schedule="recompute"), output, None, gradients(p, shape.decay))
    yield from named([f"{walk}, recompute" for walk in walks], where=", backward")
    _backend.forward(p._replace(schedule="recurrent"), output, None)
    yield from named([])

    states = States(p.k, p.v, p.decay, p.decay_v, None, 128, "loop")
    edges = torch.empty(states.states_shape)
    _backend.states_forward(states, edges)
    yield from named([], where=", carried")
    _backend.states_backward(states, edges, torch.empty(states.states_shape), gradients(p, shape.decay))
    yield from named(["dk of states", "dv of states"], where=", backward")

    batch, _, heads, _ = p.output_shape
    decay = p.decay if p.decay is None or p.decay.ndim == 1 else p.decay[:, 0]
    decay_v = None if p.decay_v is None else p.decay_v[:, 0]
    token = Step(p.q[:, 0], p.k[:, 0], p.v[:, 0], torch.empty(batch, heads, shape.D, shape.E), decay, decay_v, 1.0)
    _backend.step(token, torch.empty(token.output_shape, dtype=shape.dtype))
    yield from named([], where=", step")


WORKLOADS = (Workload("linear_attention", "kernel", DECAYS, linear_attention),)


def workspace(
    architecture: Architecture, decay: str, dtype: torch.dtype = torch.bfloat16, dim: int = 128, length: int = 32768
) -> tuple[int, int]:
    """Bytes that forward and backward allocate beyond inputs and results, at batch 4 and 32 heads."""
    with dry_run(architecture) as (_, memory):
        p = attention(decay, dtype, dim, dim, length=length)
        output, grads = torch.empty(p.output_shape, dtype=dtype), gradients(p, decay)
        with memory.workspace() as forward:
            _backend.forward(p, output, None)
        with memory.workspace() as backward:
            _backend.backward(p, output, None, grads)
    return forward[0], backward[0]
