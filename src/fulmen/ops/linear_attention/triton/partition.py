"""Into how many segments a schedule partitions a call, by what the card holds at once."""

from __future__ import annotations

import torch
import triton

from fulmen.ops.linear_attention.problem import Attention
from fulmen.ops.linear_attention.triton.launch import precision_of
from fulmen.ops.linear_attention.triton.tiles import walk_tile
from fulmen.runtime.architectures import Architecture, architecture_of
from fulmen.triton_common.operands import UNIT, Partition

# Below this many tokens a segment does not pay for the extra pass over k and v that finds the states between segments.
SHORTEST_SEGMENT = 256


def partition_attention(
    p: Attention, schedule: str, longest: int | None = None, learned: bool = False
) -> tuple[Partition, int]:
    """How a schedule partitions the sequences into segments, of ``longest`` tokens at most (packed sequences: in the
    mean), and how many sequences there are. ``learned``: a backward with the gradient of a decay, which wants segments
    anyway."""
    length, sequences = p.q.shape[1], p.state_shape[0]
    if schedule in ("parallel", "recompute"):
        tokens = UNIT.value
    elif schedule == "auto" and not torch.are_deterministic_algorithms_enabled():
        architecture = architecture_of(p.q.device)
        programs, resident = programs_of(p, architecture, precise=longest is not None)
        wanted = max(resident * architecture.multiprocessors // max(programs, 1), 1)
        if wanted == 2 and not learned and fills(programs, architecture.multiprocessors):
            wanted = 1
        tokens = max(
            triton.cdiv(triton.cdiv(length, sequences if p.cu_seqlens is not None else 1), wanted), SHORTEST_SEGMENT
        )
    else:
        tokens = length
    tokens = tokens if longest is None else min(tokens, longest)
    tokens = max(triton.cdiv(tokens, UNIT.value), 1) * UNIT.value
    if p.cu_seqlens is None:
        return Partition(None, length, max(triton.cdiv(length, tokens), 1), tokens), sequences
    return Partition(
        p.cu_seqlens.contiguous(), length, max(triton.cdiv(length, tokens * sequences), 1), tokens
    ), sequences


def fills(programs: int, multiprocessors: int) -> bool:
    """Whether nearly every multiprocessor has one program. A second one beside it then hides less latency than the
    extra pass over k and v takes."""
    return multiprocessors * 3 // 4 < programs <= multiprocessors


def programs_of(p: Attention, architecture: Architecture, precise: bool) -> tuple[int, int]:
    """Of a walk with one segment: how many there are, and how many a multiprocessor holds at once."""
    sizes, heads = (p.q.shape[3], p.v.shape[3]), p.state_shape[0] * p.heads
    precision = precision_of(p.q.dtype, architecture, p.decays, sizes, precise)
    tile = walk_tile(architecture, *sizes, precision, p.q.dtype, p.decays, small=False)
    return heads * triton.cdiv(sizes[1], tile.width), tile.resident
