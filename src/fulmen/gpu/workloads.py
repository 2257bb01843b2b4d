"""The calls that dry runs make: every operator with every decay, on fake tensors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from fulmen.gpu.architectures import Architecture
from fulmen.gpu.dry_run import Launch, dry_run
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


def labelled_launches(
    launches: list[Launch], decay: str, dtype: torch.dtype, key_dim: int, value_dim: int
) -> dict[str, Launch]:
    """In a dry run, one launch of each kernel for each of its uses, by a name that says which."""
    p = attention(decay, dtype, key_dim, value_dim)
    found: dict[str, Launch] = {}

    def collect(walks: list[str], where: str = "") -> None:
        for launch in launches:
            name = walks.pop(0) if launch.kernel == "scan" else f"{launch.kernel}{where}"
            found.setdefault(name, launch)
        launches.clear()

    output = torch.empty(p.output_shape, dtype=dtype)
    walks = ["dq", "output for dc", "dk", "dv"] if p.decay_v is not None else ["dq", "dk", "dv"]
    _backend.forward(p._replace(schedule="loop"), output, None)
    collect(["output"])
    _backend.forward(p._replace(schedule="parallel"), output, None)
    collect(["output from edges"])
    _backend.backward(p._replace(schedule="loop"), output, None, gradients(p, decay))
    collect([*walks])
    _backend.backward(p._replace(schedule="recompute"), output, None, gradients(p, decay))
    collect([f"{walk}, recompute" for walk in walks], where=", backward")
    _backend.forward(p._replace(schedule="recurrent"), output, None)
    collect([])

    states = States(p.k, p.v, p.decay, p.decay_v, None, 128, "loop")
    edges = torch.empty(states.states_shape)
    _backend.states_forward(states, edges)
    collect([], where=", carried")
    _backend.states_backward(states, edges, torch.empty(states.states_shape), gradients(p, decay))
    collect(["dk of states", "dv of states"], where=", backward")

    batch, _, heads, _ = p.output_shape
    decay_now = p.decay if p.decay is None or p.decay.ndim == 1 else p.decay[:, 0]
    decay_v_now = None if p.decay_v is None else p.decay_v[:, 0]
    state = torch.empty(batch, heads, key_dim, value_dim)
    token = Step(p.q[:, 0], p.k[:, 0], p.v[:, 0], state, decay_now, decay_v_now, 1.0)
    _backend.step(token, torch.empty(token.output_shape, dtype=dtype))
    collect([], where=", step")
    return found


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
