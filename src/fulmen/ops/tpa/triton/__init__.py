"""The Triton backend, for NVIDIA and AMD GPUs: how a call is partitioned into programs, and their launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fulmen.ops.tpa.problem import Decode
from fulmen.ops.tpa.triton.kernels import decode, merge
from fulmen.ops.tpa.triton.tiles import decode_ranks, decode_tile
from fulmen.runtime.architectures import Architecture, architecture_of
from fulmen.runtime.tensors import dense
from fulmen.triton_common.launching import on_its_device
from fulmen.triton_common.operands import Tokens
from fulmen.triton_common.tiles import Tile, launch_options, padded

SHORTEST_SLICE = 256  # tokens
GROUP = 16  # heads of a program with split="head", the fewest that tensor cores take
MOST_TOKENS = 64  # of a chunk


@on_its_device
def forward(p: Decode, output: Tensor) -> None:
    batch, _, heads, value_size = output.shape
    if batch == 0:
        return
    architecture = architecture_of(p.aq.device)
    tile = decode_tile(architecture, p.bk.shape[3], value_size, p.aq.dtype, heads)
    if p.split == "head":
        tile = tile._replace(width=GROUP)
    tokens = slice_tokens(p, architecture, tile)
    slices = max(triton.cdiv(p.tokens, tokens), 1)
    if slices == 1:
        launch_decode(p, output, None, None, tokens, tile, architecture)
        return
    partial = output.new_empty(batch, slices, heads, value_size, dtype=torch.float32)
    maxima, sums = (output.new_empty(batch, slices, heads, dtype=torch.float32) for _ in range(2))
    launch_decode(p, partial, maxima, sums, tokens, tile, architecture)
    merge[(batch * heads,)](
        operand(partial), maxima, sums, operand(output), _lengths(p), p.tokens, slices, heads, p.av.shape[3],
        E=padded(value_size), **launch_options(warps=1),
    )  # fmt: skip


def slice_tokens(p: Decode, architecture: Architecture, tile: Tile) -> int:
    """Tokens of a slice. "sequence" has as few slices as fill the card twice, "auto" only where samples do not."""
    programs = p.aq.shape[0] * triton.cdiv(p.aq.shape[2], tile.width)
    if p.split in ("batch", "head") or (p.split == "auto" and programs >= architecture.multiprocessors):
        return max(p.tokens, 1)
    wanted = triton.cdiv(2 * architecture.multiprocessors, programs)
    return triton.cdiv(max(triton.cdiv(p.tokens, wanted), SHORTEST_SLICE), tile.chunk) * tile.chunk


def launch_decode(
    p: Decode,
    output: Tensor,
    maxima: Tensor | None,
    sums: Tensor | None,
    tokens: int,
    tile: Tile,
    architecture: Architecture,
) -> None:
    batch, slices, heads, value_size = output.shape
    rank, key_rank, value_rank = p.ranks
    factors = (operand(x) for x in p[:6])
    ranks = decode_ranks(p.bk.shape[3], p.aq.dtype)
    decode[(batch * slices * triton.cdiv(heads, tile.width),)](
        *factors, operand(output), maxima, sums, _lengths(p),
        p.tokens, slices, tokens, heads, rank, key_rank, value_rank, p.scale / (rank * key_rank),
        H=tile.width, R=min(padded(rank), ranks),
        D=padded(p.bk.shape[3]), E=padded(value_size), C=tile.chunk, FORMS_Q=rank > ranks,
        SINGLE=architecture.single if p.aq.dtype == torch.float32 else None,
        **tile.options,
    )  # fmt: skip


def _lengths(p: Decode) -> Tensor | None:
    return None if p.seqlens is None else p.seqlens.contiguous()


def operand(x: Tensor) -> Tokens:
    """``[B, M, rows, size]``, copied where kernels cannot read it: the last dimension must be dense, and distances
    within a chunk of tokens must fit 32 bits."""
    x = dense(x)
    if x.shape[2] * x.stride(2) + MOST_TOKENS * x.stride(1) >= 1 << 31:
        x = x.contiguous()
    batch, token, row, _ = x.stride()
    return Tokens(x, batch, token, row, 1, x.shape[3])
