"""The states at chunk boundaries, for channel decays (report "Lightning Attention State compute")."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

import fulmen
from fulmen.lab.baselines.gla import gla_states
from fulmen.lab.bench.peers import peer
from fulmen.lab.bench.suite import (
    ATTENTION_INPUTS,
    PUBLISHED_LENGTHS,
    Column,
    Preset,
    Sizes,
    Suite,
    batch_head_dim,
    few_heads,
)

CHUNK_SIZE = 128


def _states(schedule: str, backend: str = "auto") -> Callable[..., Tensor]:
    def run(k: Tensor, v: Tensor, log_decay: Tensor, log_decay_v: Tensor | None = None) -> Tensor:
        return fulmen.chunk_states(
            k, v, log_decay=log_decay, log_decay_v=log_decay_v,
            chunk_size=CHUNK_SIZE, schedule=schedule, backend=backend,
        )  # fmt: skip

    return run


def _entering(states: Tensor) -> Tensor:
    """As ``fla`` gives them: those that enter chunks, ``[B, chunks, H, D, E]``."""
    return states[:, :, :-1].transpose(1, 2)


def _gla(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if not k.is_cuda:
        return _entering(gla_states(k, v, decay, CHUNK_SIZE))
    sums = peer("fla.ops.utils.chunk_local_cumsum")(decay, CHUNK_SIZE, scale=1 / math.log(2))  # its kernel has exp2
    return peer("fla.ops.common.chunk_h.chunk_fwd_h")(k, v, gk=sums, chunk_size=CHUNK_SIZE, states_in_fp32=True)[0]


_EXACT = _states("auto", "reference")
_KEY, _KEY_VALUE = ("k", "v", "channel"), ("k", "v", "channel", "channel_v")

STATE = Suite(
    name="state",
    about="the states at the boundaries of chunks of 128 tokens, for channel decays",
    axis="n",
    baseline="GLA",
    modes=("fwd",),
    sections={
        "": (
            Column(
                "GLA",
                "fla's state kernel on CUDA; on CPU our torch form of its algorithm",
                _KEY,
                _gla,
                lambda k, v, decay: _entering(_EXACT(k, v, decay)),
                peer="fla",
            ),
            Column("LAVD_K", 'chunk_states, channel decay, schedule="loop"', _KEY, _states("loop"), _EXACT),
            Column(
                "LAVD_KV",
                'chunk_states, channel decay of keys and values, schedule="loop"',
                _KEY_VALUE,
                _states("loop"),
                _EXACT,
            ),
            Column("LAVD_K_P", 'chunk_states, channel decay, schedule="parallel"', _KEY, _states("parallel"), _EXACT),
            Column(
                "LAVD_KV_P",
                'chunk_states, channel decay of keys and values, schedule="parallel"',
                _KEY_VALUE,
                _states("parallel"),
                _EXACT,
            ),
        )
    },
    inputs=ATTENTION_INPUTS,
    presets={
        "published": Preset((Sizes(4, 32, 128), Sizes(1, 16, 128)), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(1, 16, 128),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(1, 4, 128),), (128, 512, 2048, 8192)),
    },
    check_sizes=few_heads,
    sizes_in_title=batch_head_dim,
    memory_columns=("GLA", "LAVD_K", "LAVD_KV"),
)
