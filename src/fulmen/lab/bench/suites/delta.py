"""The gated delta rule of Qwen3-Next and its kin, and Kimi Delta Attention, against what runs without fulmen.

A section is a gate, or a step of decoding with it after n cached tokens. q and k have R heads of D channels, v has H,
as in the models. transformers' functions take q and k with as many heads as v, so repeating them is part of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

import fulmen
from fulmen.lab.bench.delta_rule import KERNELS
from fulmen.lab.bench.owners import theirs
from fulmen.lab.bench.peers import one_file, peer
from fulmen.lab.bench.prepared import Prepared
from fulmen.lab.bench.suite import Column, Input, Preset, Sizes, Suite, Text, Work

MODELS = "transformers.models"
# Of each gate: transformers' functions (of chunks and of single tokens), and fla's.
PEERS = {
    "token": (
        f"{MODELS}.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule",
        f"{MODELS}.qwen3_next.modeling_qwen3_next.torch_recurrent_gated_delta_rule",
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
    ),
    "channel": (
        f"{MODELS}.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention",
        f"{MODELS}.kimi_linear.modeling_kimi_linear.recurrent_kimi_delta_attention",
        "fla.ops.kda.chunk_kda",
    ),
}
# Of each gate: fla's file of plain torch, and the functions in it.
NAIVE = {
    "token": ("ops/gated_delta_rule/naive.py", "naive_chunk_gated_delta_rule", "naive_recurrent_gated_delta_rule"),
    "channel": ("ops/kda/naive.py", "naive_chunk_kda", "naive_recurrent_kda"),
}
NAIVE_CHUNK = 64


def _ours(backend: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        return fulmen.delta_rule(q, k, v, beta, log_decay=log_decay, normalize_qk=True, backend=backend)

    return run


def _of_transformers(function: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return peer(function)(q, k, v, log_decay, beta, use_qk_l2norm_in_kernel=True)[0]

    return run


def _of_fla(function: str) -> Callable[..., Tensor]:
    return lambda q, k, v, beta, g: peer(function)(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def _of_naive_fla(gate: str) -> Callable[..., Tensor]:
    file, chunked, _ = NAIVE[gate]

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        """One of the two functions takes whole chunks only; zeros write nothing."""
        n, dtype = q.shape[1], q.dtype
        tensors = _as_naive_fla_takes(q, k, v, beta, log_decay)
        filled = {name: _filled(x, -n % NAIVE_CHUNK) for name, x in tensors.items()}
        output, _ = getattr(one_file("fla", file), chunked)(**filled, chunk_size=NAIVE_CHUNK)
        return output[:, :n].to(dtype)

    return run


def _as_naive_fla_takes(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> dict[str, Tensor]:
    """By name, q and k normalised and repeated: neither is done in fla's plain torch."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return {"q": q, "k": k, "v": v, "g": log_decay, "beta": beta}


def _filled(x: Tensor, tokens: int) -> Tensor:
    return pad(x, (0, 0) * (x.ndim - 2) + (0, tokens))


def _gate(gate: str) -> tuple[Column, ...]:
    chunked, _, kernel = PEERS[gate]
    common: dict[str, Any] = {
        "takes": ("q", "k", "v", "beta", gate),
        "exact": _ours("reference"),
        "least": partial(_least, gate == "channel"),
    }
    return (
        Column(
            "Fulmen",
            "Fulmen",
            f"delta_rule, {gate} decay",
            pros="Forward and backward, chunks of 16 in registers and L1",
            cons="A kernel to maintain",
            function=_ours("auto"),
            **common,
        ),
        Column(
            "Fulmen torch",
            "Fulmen, torch backend",
            f'delta_rule, {gate} decay, backend="torch"',
            pros="Any device",
            cons="Many small matrix products",
            function=_ours("torch"),
            **common,
        ),
        Column(
            "transformers",
            "transformers, chunked",
            f"{chunked.rpartition('.')[2]}, which its models run where no kernel is installed",
            pros="What runs today",
            cons="A loop over the rows of every triangle",
            function=_of_transformers(chunked),
            owner=theirs("transformers"),
            needs="transformers",
            **common,
        ),
        Column(
            "FLA",
            "flash-linear-attention",
            f"{kernel.rpartition('.')[2]} of fla",
            pros="The kernels most people train with",
            cons="GPUs only",
            function=_of_fla(kernel),
            owner=theirs("fla"),
            peer="fla",
            cuda_only=True,
            **common,
        ),
        Column(
            "FLA naive",
            "flash-linear-attention, plain torch",
            f"{NAIVE[gate][1]} of fla, with q and k normalised before",
            pros="What fla has for CPUs",
            cons="A loop over the rows of every triangle",
            function=_of_naive_fla(gate),
            owner=theirs("fla"),
            needs=f"fla/{NAIVE[gate][0]}",
            **common,
        ),
    )


def _decode(gate: str) -> tuple[Column, ...]:
    recurrent = PEERS[gate][1]
    file, _, naive = NAIVE[gate]

    def before(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The state after all tokens but the last, and that one."""
        tensors = tuple(x.detach() for x in (q, k, v, beta, log_decay))
        options: dict[str, Any] = {"log_decay": tensors[4][:, :-1], "normalize_qk": True, "return_state": True}
        _, state = fulmen.delta_rule(*(x[:, :-1] for x in tensors[:4]), **options)
        return state, tuple(x[:, -1:] for x in tensors)

    def ours(*tensors: Tensor) -> Callable[[], Tensor]:
        state, token = before(*tensors)
        q, k, v, beta, log_decay = (x[:, 0] for x in token)

        @torch.no_grad()
        def run() -> Tensor:
            return fulmen.delta_rule_step(q, k, v, beta, state, log_decay=log_decay, normalize_qk=True)[:, None]

        return run

    def of_transformers(*tensors: Tensor) -> Callable[[], Tensor]:
        state, (q, k, v, beta, log_decay) = before(*tensors)
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

        @torch.no_grad()
        def run() -> Tensor:
            return peer(recurrent)(q, k, v, log_decay, beta, initial_state=state, **options)[0]

        return run

    def of_naive_fla(*tensors: Tensor) -> Callable[[], Tensor]:
        state, (q, k, v, beta, log_decay) = before(*tensors)

        @torch.no_grad()
        def run() -> Tensor:
            given = _as_naive_fla_takes(q, k, v, beta, log_decay)
            return getattr(one_file("fla", file), naive)(**given, initial_state=state, output_final_state=True)[0]

        return run

    common: dict[str, Any] = {
        "takes": ("q", "k", "v", "beta", gate),
        "exact": lambda *tensors: _ours("reference")(*tensors)[:, -1:],
        "least": _no_roofline,
    }
    return (
        Column(
            "Fulmen",
            "Fulmen",
            f"delta_rule_step, {gate} decay",
            pros="The state is updated where it is",
            cons="A kernel to maintain",
            function=Prepared(ours),
            **common,
        ),
        Column(
            "transformers",
            "transformers",
            recurrent.rpartition(".")[2],
            pros="What runs today",
            cons="Copies the state several times",
            function=Prepared(of_transformers),
            owner=theirs("transformers"),
            needs="transformers",
            **common,
        ),
        Column(
            "FLA naive",
            "flash-linear-attention, plain torch",
            f"{naive} of fla, with q and k normalised before",
            pros="What fla has for CPUs",
            cons="Copies the state several times",
            function=Prepared(of_naive_fla),
            owner=theirs("fla"),
            needs=f"fla/{file}",
            **common,
        ),
    )


def _least(by_channel: bool, sizes: Sizes, n: int) -> Mapping[str, Work]:
    """Three products of a row with the state: what it knows of a key, the write, and the read."""
    key_heads = sizes.rank or sizes.heads
    rows = 2 * sizes.batch * n * sizes.dim  # bytes of a row of one head for each token, in bfloat16
    keys, values = 2 * key_heads * rows, sizes.heads * rows
    gates = (sizes.heads * rows if by_channel else rows * sizes.heads // sizes.dim) + rows * sizes.heads // sizes.dim
    product = 2 * sizes.batch * n * sizes.heads * sizes.dim**2
    return {
        "fwd": Work(keys + 2 * values + gates, 3 * product),
        "bwd": Work(2 * keys + 3 * values + 2 * gates, 8 * product),
    }


def _no_roofline(sizes: Sizes, n: int) -> Mapping[str, Work]:
    return {}


SUITE = Suite(
    name="delta",
    about="the gated delta rule (Qwen3-Next, Qwen3.5) and Kimi Delta Attention, against transformers and fla",
    text=Text(
        title="The Gated Delta Rule",
        subject="The delta rule with a decay for each token (Gated DeltaNet) or each channel (Kimi Delta Attention): "
        "whole sequences, their gradients, and one token of decoding.",
        algorithm="Delta Rule",
        formula="S' = diag(e^a_t) S_{t-1};  u_t = β_t (v_t - S'ᵀ k_t);  S_t = S' + k_t u_tᵀ;  o_t = scale · S_tᵀ q_t",
        complexity=(
            "Chunked: O(n), a triangular solve for each chunk and three products with the state for each token",
            "Decoding: O(1), two passes over the state",
        ),
    ),
    axis="n",
    baseline="transformers",
    modes=("fwd", "bwd"),
    sections={"token gate": _gate("token"), "channel gate": _gate("channel")}
    | {"decode, token gate": _decode("token"), "decode, channel gate": _decode("channel")},
    forward_only=("decode, token gate", "decode, channel gate"),
    one_token=lambda section: section.startswith("decode"),
    inputs={
        "q": Input("B N R D"),
        "k": Input("B N R D"),
        "v": Input("B N H D"),
        "beta": Input("B N H", torch.sigmoid),
        "token": Input("B N H", lambda x: logsigmoid(x + 2)),
        "channel": Input("B N H D", lambda x: logsigmoid(x + 2)),
    },
    presets={
        "published": Preset((Sizes(4, 32, 128, 16),), (1024, 2048, 4096, 8192)),
        "laptop": Preset((Sizes(1, 32, 128, 16),), (512, 2048, 8192)),
        "quick": Preset((Sizes(1, 8, 128, 4),), (256, 1024)),
    },
    kernels=KERNELS,
    check_sizes=lambda sizes: Sizes(batch=2, heads=4, dim=32, rank=2),
    sizes_in_title=lambda sizes: f"batch{sizes.batch}-head{sizes.heads}-keyhead{sizes.rank}-dim{sizes.dim}",
)
