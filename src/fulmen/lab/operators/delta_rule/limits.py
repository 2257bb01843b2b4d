"""The native delta rule against linear attention with the same decay, and against transformers' torch functions where
transformers is installed. These get q and k with as many heads as v, as their model hands them over."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import fulmen
from fulmen.lab.bench.figures import Call, Figure
from fulmen.lab.bench.measure import interleaved
from fulmen.lab.bench.peers import peer, why_missing
from fulmen.ops.delta_rule.native import workspace_bytes
from fulmen.ops.delta_rule.problem import DeltaRule

KEY_HEADS, HEADS, DIM, LENGTH = 16, 32, 128, 2048
SIZE = f"B1 H{HEADS} (q, k: {KEY_HEADS}) D{DIM} n{LENGTH}"
PEERS = "transformers.models.qwen3_next.modeling_qwen3_next"
CHUNKED = f"{PEERS}.torch_chunk_gated_delta_rule"
KIMI = "transformers.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention"


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor  # [B, N, H]
    by_channel: Tensor  # [B, N, H, D]

    def call(self, log_decay: Tensor) -> Call:
        return lambda: fulmen.delta_rule(
            self.q, self.k, self.v, self.beta, log_decay=log_decay, normalize_qk=True, backend="native"
        )

    def plain(self, log_decay: Tensor) -> Call:
        return lambda: fulmen.linear_attention(self.q, self.k, self.v, log_decay=log_decay, backend="native")

    def of_peer(self) -> dict[str, Any]:
        q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (self.q, self.k))
        shared = {"g": self.log_decay, "beta": self.beta, "use_qk_l2norm_in_kernel": True}
        return {"query": q, "key": k, "value": self.v} | shared


def inputs(batch: int = 1, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> Inputs:
    torch.manual_seed(0)
    q, k = (torch.randn(batch, length, KEY_HEADS, DIM).to(dtype) for _ in range(2))
    v, beta = torch.randn(batch, length, HEADS, DIM).to(dtype), torch.rand(batch, length, HEADS)
    decays = (logsigmoid(torch.randn(shape) + 2) for shape in ((batch, length, HEADS), (batch, length, HEADS, DIM)))
    return Inputs(q, k, v, beta, *decays)


def forward() -> list[Figure]:
    x, long = inputs(), inputs(length=4 * LENGTH)
    calls = {
        "token": x.call(x.log_decay),
        "token, plain": x.plain(x.log_decay),
        "channel": x.call(x.by_channel),
        "channel, plain": x.plain(x.by_channel),
        "long": long.call(long.log_decay),
        "long, plain": long.plain(long.log_decay),
    }
    t = {name: timing.median for name, timing in interleaved(calls, seconds=12.0, repeats=7).items()}
    token, channel, of_long = (t[name] / t[f"{name}, plain"] for name in ("token", "channel", "long"))
    return [
        Figure(f"delta rule, {SIZE}, time over linear attention, token decay", token, 1.5, 1.35, "x", True),
        Figure(f"delta rule, n{4 * LENGTH}, time over linear attention, token decay", of_long, 1.5, 1.35, "x", True),
        Figure("delta rule, time over linear attention, channel decay", channel, 1.7, 1.5, "x", True),
    ]


def training() -> list[Figure]:
    x = inputs()
    leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.beta, x.log_decay)]
    grad = torch.randn_like(x.v)
    with torch.enable_grad():
        q, k, v, beta, log_decay = leaves
        output = fulmen.delta_rule(q, k, v, beta, log_decay=log_decay, normalize_qk=True, backend="native")
    calls: dict[str, Call] = {
        "forward": x.call(x.log_decay),
        "backward": lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True),
    }
    t = interleaved(calls, seconds=5.0, repeats=5)
    ratio = t["backward"].median / t["forward"].median
    return [Figure("delta rule, backward over forward, token decay", ratio, 4.0, 3.5, "x", True)]


def growth() -> list[Figure]:
    short, long = (inputs(length=length) for length in (LENGTH, 4 * LENGTH))
    t = interleaved({"short": short.call(short.log_decay), "long": long.call(long.log_decay)}, seconds=4.0, repeats=5)
    ratio = t["long"].median / t["short"].median
    return [Figure("delta rule, four times the tokens, time", ratio, 4.4, 4.1, "x", True)]


def against_transformers() -> list[Figure]:
    if why_missing("transformers"):
        return []

    def ratio(dtype: torch.dtype, function: str = CHUNKED, by_channel: bool = False) -> float:
        x, chunked = inputs(dtype=dtype), peer(function)
        log_decay = x.by_channel if by_channel else x.log_decay
        given = x.of_peer() | {"g": log_decay}
        t = interleaved({"native": x.call(log_decay), "peer": lambda: chunked(**given)}, seconds=6.0, repeats=3)
        return t["peer"].median / t["native"].median

    kimi = ratio(torch.float32, KIMI, by_channel=True)
    return [
        Figure("delta rule against transformers' chunked one, fp32", ratio(torch.float32), 8, 10, "x"),
        Figure("delta rule against transformers' chunked one, bf16", ratio(torch.bfloat16), 7, 12, "x"),
        Figure("delta rule against transformers' Kimi delta attention, channel decay, fp32", kimi, 40, 70, "x"),
    ]


def training_against_transformers() -> list[Figure]:
    if why_missing("transformers"):
        return []
    chunked = peer(CHUNKED)
    x = inputs()
    given = {name: y.clone().requires_grad_() if isinstance(y, Tensor) else y for name, y in x.of_peer().items()}
    ours, theirs = (
        [y.detach().clone().requires_grad_() for y in (x.q, x.k, x.v, x.beta, x.log_decay)],
        [y for y in given.values() if isinstance(y, Tensor)],
    )
    grad = torch.randn_like(x.v)

    @torch.enable_grad()
    def native() -> object:
        q, k, v, beta, log_decay = ours
        output = fulmen.delta_rule(q, k, v, beta, log_decay=log_decay, normalize_qk=True, backend="native")
        return torch.autograd.grad(output, ours, grad)

    @torch.enable_grad()
    def autograd() -> object:
        return torch.autograd.grad(chunked(**given)[0], theirs, grad)

    t = interleaved({"native": native, "peer": autograd}, seconds=6.0, repeats=3)
    ratio = t["peer"].median / t["native"].median
    return [Figure("delta rule, forward + backward against transformers' with autograd", ratio, 6, 8, "x")]


def decoding() -> list[Figure]:
    if why_missing("transformers"):
        return []
    recurrent = peer(f"{PEERS}.torch_recurrent_gated_delta_rule")

    def ratio(batch: int) -> float:
        x = inputs(batch, 1)
        given: dict[str, Any] = x.of_peer() | {"output_final_state": True}
        state, other = (torch.randn(batch, HEADS, DIM, DIM) for _ in range(2))
        q, k, v, beta, log_decay = (y[:, 0] for y in x[:5])
        calls: dict[str, Call] = {
            "native": lambda: fulmen.delta_rule_step(
                q, k, v, beta, state, log_decay=log_decay, normalize_qk=True, backend="native"
            ),
            "peer": lambda: recurrent(**given, initial_state=other),
        }
        t = interleaved(calls, seconds=2.0, repeats=30)
        return t["peer"].median / t["native"].median

    return [
        Figure("delta rule, decode step of B1 against transformers'", ratio(1), 12, 25, "x"),
        Figure("delta rule, decode step of B8 against transformers'", ratio(8), 25, 40, "x"),
    ]


def workspaces() -> list[Figure]:
    """Asked of the core."""
    threads = torch.get_num_threads()

    def mebibytes(length: int, backward: bool) -> float:
        row = torch.empty(1, 1, 1, DIM)
        k, v = (row.expand(1, length, heads, DIM) for heads in (KEY_HEADS, HEADS))
        beta = torch.empty(1).expand(1, length, HEADS)
        p = DeltaRule(k, k, v, beta, beta, True, 1.0, None, None, "auto")
        return workspace_bytes(p, backward) / threads / 2**20

    return [
        Figure("delta rule, workspace per thread, forward", mebibytes(131072, False), 1, 0.3, "MiB", True),
        Figure("delta rule, workspace per thread, backward, n = 32768", mebibytes(32768, True), 8, 6, "MiB", True),
    ]


LIMITS = (forward, training, growth, against_transformers, training_against_transformers, decoding, workspaces)
