"""The CPU core's output gate (csrc/output_gate.cpp): describes a call to it, and nothing else."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from fulmen.ops.output_gate.problem import Gated, Kept
from fulmen.runtime import core as c
from fulmen.runtime.tensors import dense

# The structs of csrc/fulmen.h. A problem ends with its workspace.
_PROBLEM = "9q" + 4 * c.TENSOR + c.STATE + c.TENSOR + "2q"
_FORWARD = struct.Struct("=" + _PROBLEM + c.TENSOR)
_BACKWARD = struct.Struct("=" + _PROBLEM + 5 * c.TENSOR)


def forward(p: Gated, output: Tensor, kept: Kept) -> None:
    p = Gated(*map(dense, p))
    c.require().with_workspace("output_gate_forward", _FORWARD, _problem(p, kept), c.tensor(output))


def backward(p: Gated, kept: Kept, grad: Tensor, grads: Gated) -> None:
    p, grad = Gated(*map(dense, p)), dense(grad)
    after = c.tensor(grad) + sum(map(c.tensor, grads), ())
    c.require().with_workspace("output_gate_backward", _BACKWARD, _problem(p, kept), after)


def workspace_bytes(p: Gated, backward: bool = False) -> int:
    """The workspace of a call that keeps nothing; of its tensors only shapes and dtypes matter."""
    before, x = _problem(p, Kept(None, None)), c.tensor(p.q)
    if backward:
        return c.require().workspace_bytes("output_gate_backward", _BACKWARD, before, 5 * x)
    return c.require().workspace_bytes("output_gate_forward", _FORWARD, before, x)


def _problem(p: Gated, kept: Kept) -> c.Words:
    batch, queries, heads, key_size = p.q.shape
    return (
        *(c.ABI_VERSION, batch, queries, p.k.shape[1], heads, key_size, p.v.shape[3]),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()),
        *sum(map(c.tensor, p), ()),
        *c.state(kept.kv),
        *c.tensor(kept.qkv),
    )
