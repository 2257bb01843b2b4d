"""The native delta rule against linear attention with the same decay, and where transformers is installed against its
torch functions, and a model of it patched against itself. These functions get q and k with as many heads as v, as their
model hands them over."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import fulmen
from fulmen.lab.bench.families import LAYERS, model
from fulmen.lab.bench.figures import Call, Figure, multiplies_bfloat16
from fulmen.lab.bench.measure import interleaved
from fulmen.lab.bench.peers import peer, why_missing
from fulmen.ops.delta_rule.native import workspace_bytes
from fulmen.ops.delta_rule.problem import DeltaRule

KEY_HEADS, HEADS, DIM, LENGTH = 16, 32, 128, 2048
LONG = 4 * LENGTH
HIDDEN = 1024  # of the model
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


def named(what: str, length: int | None = LENGTH, batch: int = 1) -> str:
    """A figure, with the shape that it is of."""
    tokens = "" if length is None else f" n{length}"
    return f"delta rule, B{batch} H{HEADS} (q, k: {KEY_HEADS}) D{DIM}{tokens}: {what}"


def forward() -> list[Figure]:
    x, long = inputs(), inputs(length=LONG)
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
    over, growth = "time over linear attention", t["long"] / t["token"]
    return [
        Figure(named(f"{over}, token decay"), token, 1.5, 1.35, "x", True),
        Figure(named(f"{over}, token decay", LONG), of_long, 1.5, 1.35, "x", True),
        Figure(named(f"{over}, channel decay"), channel, 1.7, 1.5, "x", True),
        Figure(named(f"time of n{LONG} over it, token decay"), growth, 4.4, 4.1, "x", True),
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
    return [Figure(named("backward over forward, token decay"), ratio, 4.0, 3.5, "x", True)]


def over_chunked(dtype: torch.dtype, function: str = CHUNKED, by_channel: bool = False) -> float:
    x, chunked = inputs(dtype=dtype), peer(function)
    log_decay = x.by_channel if by_channel else x.log_decay
    given = x.of_peer() | {"g": log_decay}
    # One call of the slowest peer takes longer than these seconds.
    t = interleaved({"native": x.call(log_decay), "peer": lambda: chunked(**given)}, seconds=6.0, repeats=1)
    return t["peer"].median / t["native"].median


def against_transformers() -> list[Figure]:
    if why_missing("transformers"):
        return []
    kimi = over_chunked(torch.float32, KIMI, by_channel=True)
    return [
        Figure(named("against transformers' chunked one, fp32"), over_chunked(torch.float32), 8, 10, "x"),
        Figure(named("against transformers' Kimi delta attention, channel decay, fp32"), kimi, 40, 70, "x"),
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
    return [Figure(named("forward + backward against transformers' with autograd, fp32"), ratio, 6, 8, "x")]


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
        Figure(named("decode step against transformers'", None), ratio(1), 12, 25, "x"),
        Figure(named("decode step against transformers'", None, batch=8), ratio(8), 25, 40, "x"),
    ]


PREFILL = f"Qwen3.5, {LAYERS} layers of {HIDDEN}, prefill of B1 n{LENGTH}, patched against itself"


@torch.no_grad()
def over_unpatched(dtype: torch.dtype) -> float:
    from fulmen.integrations.transformers import patch

    tokens = torch.randn(1, LENGTH, HIDDEN).to(dtype)
    models = {name: model("Qwen3.5", HIDDEN, dtype) for name in ("as it is", "patched")}
    patch(models["patched"])

    def call(of: Any) -> Call:
        return lambda: of(inputs_embeds=tokens, use_cache=True, logits_to_keep=1)

    t = interleaved({name: call(of) for name, of in models.items()}, seconds=6.0, repeats=3)
    return t["as it is"].median / t["patched"].median


def prefill() -> list[Figure]:
    if why_missing("transformers"):
        return []
    return [Figure(f"{PREFILL}, fp32", over_unpatched(torch.float32), 1.25, 1.35, "x")]


def in_bfloat16() -> list[Figure]:
    """A model's products alone take minutes where the CPU does not multiply bfloat16."""
    if why_missing("transformers") or not multiplies_bfloat16("delta_rule"):
        return []
    return [
        Figure(named("against transformers' chunked one, bf16"), over_chunked(torch.bfloat16), 7, 12, "x"),
        Figure(f"{PREFILL}, bf16", over_unpatched(torch.bfloat16), 1.5, 1.7, "x"),
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
        Figure(named("workspace per thread, forward", 131072), mebibytes(131072, False), 1, 0.3, "MiB", True),
        Figure(named("workspace per thread, backward", 32768), mebibytes(32768, True), 8, 6, "MiB", True),
    ]


LIMITS = (
    workspaces,
    forward,
    training,
    against_transformers,
    training_against_transformers,
    decoding,
    prefill,
    in_bfloat16,
)
