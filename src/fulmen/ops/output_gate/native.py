"""The CPU core's output gate (csrc/output_gate.cpp): describes a call to it, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.output_gate.problem import Gated, Kept
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import OUTPUT_GATE_BACKWARD, OUTPUT_GATE_FORWARD, OUTPUT_GATE_PROBLEM, Words
from fulmen.runtime.tensors import dense


def forward(p: Gated, output: Tensor, kept: Kept) -> None:
    p = Gated(*map(dense, p))
    c.require().run(OUTPUT_GATE_FORWARD, _forward(p, kept, c.header(OUTPUT_GATE_FORWARD), output))


def backward(p: Gated, kept: Kept, grad: Tensor, grads: Gated) -> None:
    p, grad = Gated(*map(dense, p)), dense(grad)
    c.require().run(OUTPUT_GATE_BACKWARD, _backward(p, kept, c.header(OUTPUT_GATE_BACKWARD), grad, grads))


def workspace_bytes(p: Gated, backward: bool = False) -> int:
    """The workspace of a call that keeps nothing; of its tensors only shapes and dtypes matter."""
    nothing, call = Kept(None, None), OUTPUT_GATE_BACKWARD if backward else OUTPUT_GATE_FORWARD
    header = c.measuring_header(call)
    packed = _backward(p, nothing, header, p.q, p) if backward else _forward(p, nothing, header, p.q)
    return c.require().workspace_bytes(call, packed)


def _forward(p: Gated, kept: Kept, header: Words, output: Tensor) -> bytes:
    return OUTPUT_GATE_FORWARD.pack(problem=_problem(p, kept, header), output=c.tensor(output))


def _backward(p: Gated, kept: Kept, header: Words, grad: Tensor, grads: Gated) -> bytes:
    dq, dk, dv, dgate = map(c.tensor, grads)
    return OUTPUT_GATE_BACKWARD.pack(
        problem=_problem(p, kept, header), grad_output=c.tensor(grad), dq=dq, dk=dk, dv=dv, dgate=dgate
    )


def _problem(p: Gated, kept: Kept, header: Words) -> Words:
    batch, queries, heads, key_size = p.q.shape
    q, k, v, gate = map(c.tensor, p)
    return OUTPUT_GATE_PROBLEM.words(
        header=header,
        batch=batch,
        queries=queries,
        keys=p.k.shape[1],
        heads=heads,
        key_size=key_size,
        value_size=p.v.shape[3],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        q=q,
        k=k,
        v=v,
        gate=gate,
        kv=c.state(kept.kv),
        qkv=c.tensor(kept.qkv),
    )
