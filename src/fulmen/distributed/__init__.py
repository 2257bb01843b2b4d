"""Sequence parallelism: one sequence over the ranks of a torch.distributed group; docs/distributed.md."""

from fulmen.distributed.agreement import Agreement, Call, announcing
from fulmen.distributed.api import causal_conv1d, delta_rule, linear_attention
from fulmen.distributed.causal_conv1d import ConvolutionShard
from fulmen.distributed.delta_rule import DeltaRuleShard
from fulmen.distributed.exchange import Exchange, Gathering, Ranks, recorded
from fulmen.distributed.fold import (
    Diagonal,
    Matrix,
    Shift,
    Summary,
    Transition,
    end_of_reach,
    entering_state,
    leaving_gradient,
)
from fulmen.distributed.linear_attention import AttentionShard
from fulmen.distributed.places import Place, packed_places, whole_place
from fulmen.distributed.recurrence import Shard, walk
from fulmen.distributed.sharding import gather, gather_cu_seqlens, shard, shard_cu_seqlens, shard_lengths

__all__ = [
    "Agreement", "AttentionShard", "Call", "ConvolutionShard", "DeltaRuleShard", "Diagonal", "Exchange", "Gathering",
    "Matrix", "Place", "Ranks", "Shard", "Shift", "Summary", "Transition", "announcing", "causal_conv1d", "delta_rule",
    "end_of_reach", "entering_state", "gather", "gather_cu_seqlens", "leaving_gradient", "linear_attention",
    "packed_places", "recorded", "shard", "shard_cu_seqlens", "shard_lengths", "walk", "whole_place",
]  # fmt: skip
