"""The CPU core's tensor-product attention (csrc/tpa_decode.cpp): describes a call to it, and nothing else."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from fulmen.ops.tpa.problem import Decode
from fulmen.runtime import core as c
from fulmen.runtime.tensors import dense

_SPLITS = {"auto": 0, "batch": 1, "head": 2, "sequence": 3}
_DECODE = struct.Struct("=13qd" + 6 * c.TENSOR + "2q" + c.TENSOR)


def forward(p: Decode, output: Tensor) -> None:
    p = _readable(p)
    c.require().with_workspace("tpa_decode", _DECODE, _words(p), c.tensor(output))


def workspace_bytes(p: Decode) -> int:
    """The workspace of a call, in bytes; of its tensors only shapes, dtypes and lengths matter."""
    p = _readable(p)
    return c.require().workspace_bytes("tpa_decode", _DECODE, _words(p), c.tensor(p.aq))


def _readable(p: Decode) -> Decode:
    """The call with factors that are dense along their last dimension, and 64-bit lengths."""
    aq, ak, av, bq, bk, bv = (dense(x) for x in p[:6])
    seqlens = None if p.seqlens is None else p.seqlens.to(torch.int64).contiguous()
    return Decode(aq, ak, av, bq, bk, bv, p.scale, seqlens, p.split)


def _words(p: Decode) -> c.Words:
    batch, _, heads, rank = p.aq.shape
    words: tuple[float, ...] = (
        *(c.ABI_VERSION, batch, p.tokens, heads, rank, p.ak.shape[3], p.av.shape[3], p.bk.shape[3], p.bv.shape[3]),
        *(0 if p.seqlens is None else p.seqlens.data_ptr(), _SPLITS[p.split]),
        *(torch.get_float32_matmul_precision() == "medium", torch.get_num_threads(), p.scale),
        *(*c.tensor(p.aq), *c.tensor(p.ak), *c.tensor(p.av), *c.tensor(p.bq), *c.tensor(p.bk), *c.tensor(p.bv)),
    )
    # One of the words is the scale, a float.
    return words  # type: ignore[return-value]
