"""The calls of tpa_decode that dry runs make, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fulmen.lab.inspect.dry_run import Launch, dry_run
from fulmen.lab.inspect.inspection import Shape, Workload
from fulmen.lab.operators.tpa.traffic import BYTES
from fulmen.ops.tpa import triton as _backend
from fulmen.ops.tpa.problem import Decode, decode_of
from fulmen.runtime.architectures import Architecture

__all__ = ["BYTES", "WORKLOADS"]


def call(
    dtype: torch.dtype, key_size: int, value_size: int, key_rank: int = 1,
    tokens: int = 32768, batch: int = 8, heads: int = 32, rank: int = 16,
) -> Decode:  # fmt: skip
    """At the size of the published tables, to be made in a dry run."""

    def factor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    aq, bq = factor(batch, 1, heads, rank), factor(batch, 1, rank, key_size)
    ak, bk = factor(batch, tokens, heads, key_rank), factor(batch, tokens, key_rank, key_size)
    av, bv = factor(batch, tokens, heads, key_rank), factor(batch, tokens, key_rank, value_size)
    return decode_of(aq, ak, av, bq, bk, bv)


def tpa_decode(launches: list[Launch], shape: Shape) -> Iterator[tuple[str, Launch]]:
    """One launch of each kernel for each split, with keys and values of rank one and above, and with queries of many
    ranks: as many as are multiplied at once in 16 bits, and more."""
    for ranks, name in ((1, ""), (2, ", rank 2")):
        p = call(shape.dtype, shape.D, shape.E, ranks)
        for split in ("batch", "head", "sequence"):
            seqlens = torch.empty(p.aq.shape[0], dtype=torch.int32) if split == "sequence" else None
            _backend.forward(p._replace(split=split, seqlens=seqlens), torch.empty(p.output_shape, dtype=shape.dtype))
            for launch in launches:
                yield "tpa merge" if launch.kernel == "merge" else f"tpa {split}{name}", launch
            launches.clear()
    for rank in (64, 128):
        p = call(shape.dtype, shape.D, shape.E, rank=rank)
        _backend.forward(p._replace(split="batch"), torch.empty(p.output_shape, dtype=shape.dtype))
        yield f"tpa batch, {rank} ranks of q", launches.pop()


WORKLOADS = (Workload("tpa_decode", "kernel", ("none",), tpa_decode),)


def workspace(architecture: Architecture, tokens: int, dtype: torch.dtype = torch.bfloat16, dim: int = 128) -> int:
    """Bytes that a call allocates beyond factors and output, at batch 8 and 32 heads."""
    with dry_run(architecture) as (_, memory):
        p = call(dtype, dim, dim, tokens=tokens)
        output = torch.empty(p.output_shape, dtype=dtype)
        with memory.workspace() as found:
            _backend.forward(p, output)
    return found[0]


def launched(architecture: Architecture, batch: int, tokens: int, heads: int, dim: int, rank: int) -> list[Launch]:
    """What a call with split="auto" launches, in bfloat16."""
    with dry_run(architecture) as (launches, _):
        p = call(torch.bfloat16, dim, dim, tokens=tokens, batch=batch, heads=heads, rank=rank)
        _backend.forward(p, torch.empty(p.output_shape, dtype=torch.bfloat16))
    return launches
