"""The calls of the delta rule that dry runs make, with every decay, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fulmen.lab.inspect.dry_run import Launch, dry_run
from fulmen.lab.inspect.inspection import Shape, Workload
from fulmen.lab.operators.delta_rule.traffic import BYTES
from fulmen.ops.chunks.decay_form import Decays, tokens_of
from fulmen.ops.delta_rule import triton as _backend
from fulmen.ops.delta_rule.problem import DeltaRule, Gradients, Step
from fulmen.runtime.architectures import Architecture

__all__ = ["BYTES", "WORKLOADS"]


def call(
    decays: Decays, dtype: torch.dtype, key_size: int, value_size: int,
    batch: int = 4, length: int = 32768, heads: int = 32, normalize_qk: bool = True,
) -> DeltaRule:  # fmt: skip
    """A call at the size of the published tables, to be made in a dry run."""
    tokens = batch, length, heads
    shape = decays.key.shape(*tokens, key_size)
    return DeltaRule(
        q=torch.empty(*tokens, key_size, dtype=dtype),
        k=torch.empty(*tokens, key_size, dtype=dtype),
        v=torch.empty(*tokens, value_size, dtype=dtype),
        beta=torch.empty(*tokens),
        log_decay=None if shape is None else torch.empty(shape),
        normalize_qk=normalize_qk,
        scale=1.0,
        initial_state=None,
        cu_seqlens=None,
        schedule="auto",
    )


def gradients(p: DeltaRule, learnable: bool = True) -> Gradients:
    """Of q, k, v and β, and if it is learnable of the decay."""
    decay = torch.empty(p.log_decay.shape) if p.log_decay is not None and learnable else None
    q, k, v = (torch.empty_like(x) for x in (p.q, p.k, p.v))
    return Gradients(q, k, v, torch.empty(p.beta.shape), decay, None)


def delta_rule(launches: list[Launch], shape: Shape) -> Iterator[tuple[str, Launch]]:
    """One launch of each kernel for each of its uses."""

    def named(other: str = "") -> Iterator[tuple[str, Launch]]:
        for launch in launches:
            what = launch.kernel
            if what == "walk":
                what = "output" if launch.arguments["output"] is not None else "states"
            yield f"delta {what}{other}", launch
        launches.clear()

    p = call(shape.decays, shape.dtype, shape.D, shape.E, length=1024)
    output, state = torch.empty(p.output_shape, dtype=shape.dtype), torch.empty(p.state_shape)
    _backend.forward(p, output, None)
    yield from named()
    _backend.forward(p._replace(schedule="recurrent"), output, None)
    yield from named()
    _backend.backward(p, output, state, gradients(p, shape.learnable))
    yield from named(", backward")

    one = call(shape.decays, shape.dtype, shape.D, shape.E, batch=1, length=1024)
    packed = one._replace(cu_seqlens=torch.empty(9, dtype=torch.int32))
    output = torch.empty(packed.output_shape, dtype=shape.dtype)
    _backend.forward(packed, output, None)
    yield from named(", packed")
    _backend.backward(packed, output, None, gradients(packed, shape.learnable))
    yield from named(", packed backward")

    token = Step(p.q[:, 0], p.k[:, 0], p.v[:, 0], p.beta[:, 0], state, tokens_of(p.log_decay, 0), True, 1.0)
    _backend.step(token, torch.empty(token.output_shape, dtype=shape.dtype))
    yield from named(", step")


WORKLOADS = (Workload("delta_rule", "kernel", ("none", "head", "learnable head", "token", "channel"), delta_rule),)


def workspace(
    architecture: Architecture, decays: Decays, learnable: bool = True,
    batch: int = 4, length: int = 32768, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16,
) -> tuple[int, int]:  # fmt: skip
    """The most bytes that forward and backward allocate at once beyond what they are given and return."""
    with dry_run(architecture) as (_, memory):
        p = call(decays, dtype, dim, dim, batch, length, heads)
        output = torch.empty(p.output_shape, dtype=dtype)
        with memory.workspace() as forward:
            _backend.forward(p, output, None)
        grads = gradients(p, learnable)
        with memory.workspace() as backward:
            _backend.backward(p, output, None, grads)
    return forward[0], backward[0]
