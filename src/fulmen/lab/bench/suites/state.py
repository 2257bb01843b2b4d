"""The states at chunk boundaries, for channel decays (report "Lightning Attention State compute")."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fulmen
from fulmen.lab.baselines.gla import gla_states
from fulmen.lab.bench.linear_attention import (
    BOTH_CHANNELS,
    CHANNEL,
    CORE,
    INPUTS,
    few_heads,
    log_decay_bytes,
    log_decays,
    walk_tiles,
)
from fulmen.lab.bench.owners import Owner, ours, rendered, theirs
from fulmen.lab.bench.peers import one_file, peer
from fulmen.lab.bench.suite import (
    PUBLISHED_LENGTHS,
    Column,
    Kernels,
    Preset,
    Sizes,
    Suite,
    Text,
    Work,
    product_flops,
    tensor_bytes,
)
from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import Architecture

if TYPE_CHECKING:
    from fulmen.lab.inspect.dry_run import Launch

CHUNK_SIZE = 128
NAIVE = "ops/gla/naive.py"  # of fla


def _states(schedule: str, backend: str = "auto") -> Callable[..., Tensor]:
    def run(k: Tensor, v: Tensor, log_decay: Tensor, log_decay_v: Tensor | None = None) -> Tensor:
        return fulmen.chunk_states(
            k, v, log_decay=log_decay, log_decay_v=log_decay_v,
            chunk_size=CHUNK_SIZE, schedule=schedule, backend=backend,
        )  # fmt: skip

    return run


_EXACT = _states("auto", "reference")


def _entering(states: Tensor) -> Tensor:
    """As ``fla`` gives them: those that enter chunks, ``[B, chunks, H, D, E]``."""
    return states[:, :, :-1].transpose(1, 2)


def _gla(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    if not k.is_cuda:
        return _entering(gla_states(k, v, decay, CHUNK_SIZE))
    sums = peer("fla.ops.utils.chunk_local_cumsum")(decay, CHUNK_SIZE, scale=1 / math.log(2))  # its kernel has exp2
    return peer("fla.ops.common.chunk_h.chunk_fwd_h")(k, v, gk=sums, chunk_size=CHUNK_SIZE, states_in_fp32=True)[0]


def _naive_gla(k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    recurrent = one_file("fla", NAIVE).naive_recurrent_gla  # type: ignore[union-attr]  # which the column needs
    state, states = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]), []
    for tokens in zip(*(x.split(CHUNK_SIZE, 1) for x in (k, k, v, decay)), strict=True):
        states.append(state)
        _, state = recurrent(*tokens, initial_state=state, output_final_state=True)
    return torch.stack(states, 1)


def _column(
    name: str, title: str, about: str, pros: str, cons: str, decays: Decays, function: Callable[..., Tensor],
    exact: Callable[..., Tensor] = _EXACT, owner: Callable[[str], Owner] = ours, peer: str = "", needs: str = "",
) -> Column:  # fmt: skip
    return Column(
        name, title, about, pros, cons, ("k", "v", *log_decays(decays)), function, exact,
        partial(_least, decays), partial(_launched, decays), owner, peer=peer, needs=needs,
    )  # fmt: skip


def _least(decays: Decays, sizes: Sizes, n: int) -> dict[str, Work]:
    given = 2 * tensor_bytes(sizes, n) + log_decay_bytes(decays, sizes, n)
    states = sizes.batch * sizes.heads * (n // CHUNK_SIZE + 1) * sizes.dim**2
    return {"fwd": Work(given + 2 * states, product_flops(sizes, n))}


@cache
def _launched(decays: Decays, architecture: Architecture, sizes: Sizes, n: int) -> Mapping[str, list[Launch]]:
    from fulmen.lab.operators.linear_attention.workloads import states_launched

    return {"fwd": states_launched(architecture, decays, sizes.batch, n, sizes.heads, sizes.dim)}


def _tiles(sizes: Sizes, dtype: torch.dtype) -> dict[str, Callable[[Architecture], Any]]:
    return {"Chunk states": walk_tiles(CHANNEL, sizes, dtype)}


SUITE = Suite(
    name="state",
    about="the states at the boundaries of chunks of 128 tokens, for channel decays",
    text=Text(
        title="Chunk States",
        subject="The states that enter every chunk of 128 tokens, with a decay for each channel: chunk after chunk, or "
        "all chunks at once.",
        algorithm="Chunk States",
        formula="S[c] = diag(e^a) S[c-1] diag(e^c) + K[c]^T @ V[c],  stored for every chunk",
        complexity=(
            "Loop: O(n), one program walks the chunks of a head",
            "Parallel: O(n), every chunk is summarised alone, then the summaries are folded: one more pass",
            "Memory: O(n / 128) states of D × E",
        ),
    ),
    axis="n",
    baseline="GLA",
    modes=("fwd",),
    sections={
        "": (
            _column(
                "GLA",
                "GLA's states",
                "fla's state kernel on CUDA; on CPU our torch form of its algorithm",
                pros="Peer",
                cons="Decay on keys only",
                decays=CHANNEL,
                function=_gla,
                exact=lambda k, v, decay: _entering(_EXACT(k, v, decay)),
                owner=rendered("fla", on_cpu_only=True),
                peer="fla",
            ),
            _column(
                "LAVD_K",
                "Fulmen, keys",
                'chunk_states, channel decay, schedule="loop"',
                pros="Reads k and v once",
                cons="Few programs where heads are few",
                decays=CHANNEL,
                function=_states("loop"),
            ),
            _column(
                "LAVD_KV",
                "Fulmen, keys and values",
                'chunk_states, channel decay of keys and values, schedule="loop"',
                pros="Reads k and v once",
                cons="Two decays to read",
                decays=BOTH_CHANNELS,
                function=_states("loop"),
            ),
            _column(
                "LAVD_K_P",
                "Fulmen, keys, parallel",
                'chunk_states, channel decay, schedule="parallel"',
                pros="Fills the machine",
                cons="One more pass over the states",
                decays=CHANNEL,
                function=_states("parallel"),
            ),
            _column(
                "LAVD_KV_P",
                "Fulmen, keys and values, parallel",
                'chunk_states, channel decay of keys and values, schedule="parallel"',
                pros="Fills the machine",
                cons="One more pass over the states",
                decays=BOTH_CHANNELS,
                function=_states("parallel"),
            ),
            # Not published: what else a user has.
            _column(
                "GLA naive",
                "GLA's recurrence, plain torch",
                "naive_recurrent_gla of fla, chunk after chunk",
                pros="What fla has for CPUs",
                cons="A loop over tokens",
                decays=CHANNEL,
                function=_naive_gla,
                exact=lambda k, v, decay: _entering(_EXACT(k, v, decay)),
                owner=theirs("fla"),
                needs=f"fla/{NAIVE}",
            ),
        )
    },
    inputs=INPUTS,
    presets={
        "published": Preset((Sizes(4, 32, 128), Sizes(1, 16, 128)), PUBLISHED_LENGTHS),
        "laptop": Preset((Sizes(1, 16, 128),), PUBLISHED_LENGTHS[:6]),
        "quick": Preset((Sizes(1, 4, 128),), (128, 512, 2048, 8192)),
    },
    kernels=Kernels("linear_attention", _tiles, CORE),
    check_sizes=few_heads,
    memory_columns=("GLA", "LAVD_K", "LAVD_KV"),
)
