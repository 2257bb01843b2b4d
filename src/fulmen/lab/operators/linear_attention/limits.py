"""How much of the machine the native linear attention reaches.

What is compared is measured in one run, call after call in turn, so that ratios hold on a noisy machine too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import fulmen
from fulmen.lab.bench.figures import GEMM, Call, Figure, multiplies_bfloat16, threads_over_one
from fulmen.lab.bench.measure import interleaved
from fulmen.ops.chunks.decay_form import Decays
from fulmen.ops.linear_attention.native import workspace_bytes
from fulmen.ops.linear_attention.problem import Attention

HEADS, DIM, LENGTH = 16, 128, 8192
DECAYS = ("none", "head", "token", "channel", "channel+value")


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decays: dict[str, dict[str, Tensor]]  # the arguments log_decay and log_decay_v, by the name of the decays

    def call(self, decays: str, backend: str = "native", dtype: torch.dtype = torch.float32) -> Call:
        q, k, v = self.q.to(dtype), self.k.to(dtype), self.v.to(dtype)
        logs: dict[str, Any] = self.log_decays[decays]
        return lambda: fulmen.linear_attention(q, k, v, **logs, scale=1.0, backend=backend)

    def differentiated(self, decays: str, dtype: torch.dtype) -> Call:
        """Forward and backward; the decay is not learned."""
        q, k, v = (x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v))
        logs: dict[str, Any] = self.log_decays[decays]
        grad = torch.randn_like(self.v).to(dtype)

        @torch.enable_grad()
        def call() -> object:
            output = fulmen.linear_attention(q, k, v, **logs, scale=1.0, backend="native")
            return torch.autograd.grad(output, (q, k, v), grad)

        return call

    def softmax(self, dtype: torch.dtype = torch.float32) -> Call:
        q, k, v = (x.to(dtype).transpose(1, 2).contiguous() for x in (self.q, self.k, self.v))
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)


def inputs(length: int, heads: int, dim: int = DIM) -> Inputs:
    """As in the published lasd report: q and k normalised, log-decays logsigmoid(randn)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = (1, length, heads, dim)
    logs = {
        decays: {name: logsigmoid(normal(*s)) for name, s in Decays.named(decays).shapes(*shape, dim).items()}
        for decays in DECAYS
    }
    return Inputs(normalize(normal(*shape), dim=-1), normalize(normal(*shape), dim=-1), normal(*shape), logs)


def nominal_flops(length: int, heads: int) -> int:
    """State update and read-out, and what a chunk of about 32 tokens needs inside."""
    return length * heads * (4 * DIM * DIM + 65 * (DIM + DIM))


def forward() -> list[Figure]:
    x = inputs(LENGTH, HEADS)
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    calls: dict[str, Call] = {decays: x.call(decays) for decays in DECAYS}
    calls |= {"fp16": x.call("head", dtype=torch.float16)}
    calls |= {"gemm": lambda: a @ b, "torch": x.call("head", "torch"), "softmax": x.softmax()}
    t = {name: timing.median for name, timing in interleaved(calls, seconds=15.0, repeats=5).items()}
    head = t["head"]
    of_gemm = nominal_flops(LENGTH, HEADS) / head / (2 * GEMM**3 / t["gemm"])
    return [
        Figure("fp32 forward, head decay, as a fraction of sgemm", of_gemm, 0.70, 0.85, ""),
        Figure(f"against torch SDPA causal, n = {LENGTH}", t["softmax"] / head, 20, 28, "x"),
        Figure("against our torch backend", t["torch"] / head, 4, 7, "x"),
        Figure("fp16 time over fp32 time", t["fp16"] / head, 1.15, 1.0, "x", True),
        Figure("no decay, time over head decay", t["none"] / head, 1.05, 1.0, "x", True),
        Figure("token decay, time over head decay", t["token"] / head, 1.2, 1.1, "x", True),
        Figure("channel decay, time over head decay", t["channel"] / head, 1.7, 1.4, "x", True),
        Figure("channel decay of both axes, time over head decay", t["channel+value"] / head, 2.0, 1.6, "x", True),
    ]


def bfloat16() -> list[Figure]:
    """Where the CPU multiplies pairs of bfloat16 (AVX512-BF16). float16 stands for the core without them: it is
    converted to float32, as bfloat16 is by the other builds."""
    if not multiplies_bfloat16("linear_attention"):
        return []
    figures = []
    a, b = (torch.randn(GEMM, GEMM).bfloat16() for _ in range(2))
    for dim, must, aim in ((64, 0.45, 0.55), (128, 0.55, 0.68), (256, 0.70, 0.80)):
        x = inputs(LENGTH // 2, HEADS // 2, dim)
        calls: dict[str, Call] = {"bf16": x.call("head", dtype=torch.bfloat16), "gemm": lambda: a @ b}
        t = {name: timing.median for name, timing in interleaved(calls, seconds=3.0, repeats=5).items()}
        rate = 4 * dim * dim * x.q[..., 0].numel() / t["bf16"] / (2 * GEMM**3 / t["gemm"])
        figures.append(Figure(f"bf16 forward, head decay, D{dim}, as a fraction of bf16 gemm", rate, must, aim, ""))
    for length, must, aim in ((2048, 13, 17), (LENGTH, 40, 55)):
        x = inputs(length, HEADS)
        calls = {"bf16": x.call("head", dtype=torch.bfloat16), "softmax": x.softmax(torch.bfloat16)}
        t = {name: timing.median for name, timing in interleaved(calls, seconds=3.0, repeats=3).items()}
        ratio = t["softmax"] / t["bf16"]
        figures.append(Figure(f"bf16 against torch SDPA bf16 causal, n = {length}", ratio, must, aim, "x"))
    x = inputs(LENGTH, HEADS)
    calls = {"fp32": x.call("head")}
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        calls |= {name: x.call("head", dtype=dtype), f"channel {name}": x.call("channel", dtype=dtype)}
        calls[f"both {name}"] = x.differentiated("head", dtype)
    t = {name: timing.median for name, timing in interleaved(calls, seconds=15.0, repeats=5).items()}
    backward = (t["both fp16"] - t["fp16"]) / (t["both bf16"] - t["bf16"])
    channel = t["channel fp16"] / t["channel bf16"]
    return [
        *figures,
        Figure("bf16 time over fp32 time, head decay", t["bf16"] / t["fp32"], 0.55, 0.42, "x", True),
        Figure("bf16 backward without decay gradient, over fp16", backward, 1.5, 1.8, "x"),
        Figure("bf16 forward, channel decay, over fp16", channel, 1.25, 1.45, "x"),
    ]


def training() -> list[Figure]:
    x = inputs(LENGTH, HEADS)
    leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.log_decays["head"]["log_decay"])]
    grad = torch.randn_like(x.v)

    @torch.enable_grad()
    def both() -> object:
        q, k, v, log_decay = leaves
        output = fulmen.linear_attention(q, k, v, log_decay=log_decay, scale=1.0, backend="native")
        return torch.autograd.grad(output, leaves, grad)

    t = interleaved({"forward": x.call("head"), "both": both}, seconds=4.0, repeats=5)
    ratio = t["both"].median / t["forward"].median
    return [Figure("forward + backward over forward, learnable head decay", ratio, 4.2, 3.5, "x", True)]


def long_sequences() -> list[Figure]:
    x = inputs(32768, 4)
    t = interleaved({"native": x.call("head"), "softmax": x.softmax()}, seconds=0.0, repeats=3)
    ratio = t["softmax"].median / t["native"].median
    return [Figure("against torch SDPA causal, n = 32768, H4", ratio, 70, 100, "x")]


def one_head() -> list[Figure]:
    ratio = threads_over_one(inputs(16384, 1).call("head"))
    return [Figure(f"one head, n = 16384, {torch.get_num_threads()} threads over one", ratio, 1.7, 1.9, "x")]


def growth() -> list[Figure]:
    calls = {str(length): inputs(length, 2).call("head") for length in (8192, 32768, 131072)}
    t = {name: timing.median for name, timing in interleaved(calls, seconds=3.0, repeats=5).items()}
    worst = max(t["32768"] / t["8192"], t["131072"] / t["32768"])
    return [Figure("four times the tokens, time (up to n = 131072)", worst, 4.4, 4.0, "x", True)]


def decoding() -> list[Figure]:
    batch = 8
    q, k, v = (torch.randn(batch, HEADS, DIM) for _ in range(3))
    state, other = torch.randn(batch, HEADS, DIM, DIM), torch.randn(batch, HEADS, DIM, DIM)
    log_decay = logsigmoid(torch.randn(HEADS))
    calls: dict[str, Call] = {
        "step": lambda: fulmen.linear_attention_step(q, k, v, state, log_decay=log_decay, backend="native"),
        "mul_": lambda: other.mul_(0.999),
    }
    t = interleaved(calls, seconds=2.0, repeats=50)
    ratio = t["step"].median / t["mul_"].median
    return [Figure(f"decode step (B{batch} H{HEADS} D{DIM}) over mul_ of the state", ratio, 1.6, 1.3, "x", True)]


def small_call() -> list[Figure]:
    q, k, v = (torch.randn(1, 16, 4, 64) for _ in range(3))
    log_decay = logsigmoid(torch.randn(4))
    t = interleaved({"small": lambda: fulmen.linear_attention(q, k, v, log_decay=log_decay)}, seconds=1.0, repeats=100)
    return [Figure("a small call (B1 H4 n16 D64), end to end", t["small"].median * 1e6, 50, 35, "us", True)]


def states() -> list[Figure]:
    x = inputs(LENGTH, HEADS)

    def call(backend: str) -> Call:
        logs: dict[str, Any] = x.log_decays["channel"]
        return lambda: fulmen.chunk_states(x.k, x.v, **logs, backend=backend)

    t = interleaved({name: call(name) for name in ("native", "torch")}, seconds=3.0, repeats=5)
    return [
        Figure(
            "chunk_states, channel decay, against our torch backend", t["torch"].median / t["native"].median, 4, 7, "x"
        )
    ]


def workspaces() -> list[Figure]:
    """Asked of the core, for the most demanding decay."""
    threads = torch.get_num_threads()

    def mebibytes(length: int, backward: bool) -> float:
        x = torch.empty(1).expand(1, length, HEADS, DIM)
        return workspace_bytes(Attention(x, x, x, x, x, 1.0, None, None, "auto"), backward) / threads / 2**20

    return [
        Figure("workspace per thread, forward, n = 131072", mebibytes(131072, False), 2, 1, "MiB", True),
        Figure("workspace per thread, backward, n = 32768", mebibytes(32768, True), 16, 4, "MiB", True),
    ]


LIMITS = (forward, bfloat16, training, long_sequences, one_head, growth, decoding, small_call, states, workspaces)
