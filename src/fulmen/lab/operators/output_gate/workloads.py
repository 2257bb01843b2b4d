"""The calls that dry runs make of the output gate, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fulmen.lab.inspect.dry_run import Launch, dry_run
from fulmen.lab.inspect.inspection import Shape, Workload
from fulmen.lab.operators.output_gate.traffic import BYTES
from fulmen.ops.output_gate import triton as _backend
from fulmen.ops.output_gate.problem import Gated, Kept
from fulmen.runtime.architectures import Architecture

__all__ = ["BYTES", "WORKLOADS"]


def call(
    dtype: torch.dtype, key_size: int, value_size: int, batch: int = 12, length: int = 32768, heads: int = 12
) -> Gated:
    """A call at the size of the published tables, to be made in a dry run."""
    q, k = (torch.empty(batch, length, heads, key_size, dtype=dtype) for _ in range(2))
    v, gate = (torch.empty(batch, length, heads, value_size, dtype=dtype) for _ in range(2))
    return Gated(q, k, v, gate)


def output_gated_attention(launches: list[Launch], shape: Shape) -> Iterator[tuple[str, Launch]]:
    """One launch of each kernel for each of its uses, with everything kept for the backward and with nothing."""
    p = call(shape.dtype, shape.D, shape.E)
    output, grads = torch.empty_like(p.gate), Gated(*map(torch.empty_like, p))
    kept = Kept(torch.empty(p.kv_shape), torch.empty(p.gate.shape))
    _backend.forward(p, output, kept)
    _backend.backward(p, kept, output, grads)
    _backend.forward(p, output, Kept(None, None))
    _backend.backward(p, Kept(None, None), output, grads)
    for launch in launches:
        kept_too = ", kept" if launch.arguments.get("ungated") is not None else ""
        yield f"gate {launch.arguments['RESULT']}{kept_too}", launch


WORKLOADS = (Workload("output_gated_attention", "kernel", ("none",), output_gated_attention),)


def launched(
    architecture: Architecture, batch: int, length: int, heads: int, dim: int, *, keep_kv: bool, keep_qkv: bool
) -> tuple[list[Launch], list[Launch]]:
    """What forward and backward launch, in bfloat16."""
    with dry_run(architecture) as (launches, _):
        p = call(torch.bfloat16, dim, dim, batch, length, heads)
        output = torch.empty_like(p.gate)
        kept = Kept(torch.empty(p.kv_shape) if keep_kv else None, torch.empty_like(p.gate) if keep_qkv else None)
        _backend.forward(p, output, kept)
        forward = launches.copy()
        launches.clear()
        _backend.backward(p, kept, output, Gated(*map(torch.empty_like, p)))
    return forward, launches
