"""The CPU core's tensor-product attention (csrc/tpa_decode.cpp): describes a call to it, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.tpa.problem import Decode
from fulmen.ops.tpa.validation import check_lengths
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import CODES, TPA_DECODE, Words
from fulmen.runtime.tensors import dense

_SPLITS = {split: CODES[f"SPLIT_{split.upper()}"] for split in ("auto", "batch", "head", "sequence")}


def forward(p: Decode, output: Tensor) -> None:
    p = _readable(p)
    try:
        c.require().run(TPA_DECODE, _packed(p, c.header(TPA_DECODE), output))
    except c.RefusedError as error:
        if error.status == CODES["BAD_SEQUENCES"] and p.seqlens is not None:
            check_lengths(p.seqlens, p.tokens)  # says what is wrong with seqlens
        raise


def workspace_bytes(p: Decode) -> int:
    """The workspace of a call, in bytes; of its tensors only shapes, dtypes and lengths matter."""
    p = _readable(p)
    return c.require().workspace_bytes(TPA_DECODE, _packed(p, c.measuring_header(TPA_DECODE), p.aq))


def _readable(p: Decode) -> Decode:
    """The call with factors that are dense along their last dimension, and 64-bit lengths."""
    aq, ak, av, bq, bk, bv = (dense(x) for x in p[:6])
    seqlens = None if p.seqlens is None else p.seqlens.to(torch.int64).contiguous()
    return Decode(aq, ak, av, bq, bk, bv, p.scale, seqlens, p.split)


def _packed(p: Decode, header: Words, output: Tensor) -> bytes:
    batch, _, heads, rank = p.aq.shape
    return TPA_DECODE.pack(
        header=header,
        batch=batch,
        tokens=p.tokens,
        heads=heads,
        query_rank=rank,
        key_rank=p.ak.shape[3],
        value_rank=p.av.shape[3],
        key_size=p.bk.shape[3],
        value_size=p.bv.shape[3],
        lengths=0 if p.seqlens is None else p.seqlens.data_ptr(),
        split=_SPLITS[p.split],
        scale=p.scale,
        aq=c.tensor(p.aq),
        ak=c.tensor(p.ak),
        av=c.tensor(p.av),
        bq=c.tensor(p.bq),
        bk=c.tensor(p.bk),
        bv=c.tensor(p.bv),
        output=c.tensor(output),
    )
