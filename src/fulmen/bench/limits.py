"""What the machine can do at all, and how much of it the native kernels reach.

What is compared is measured in one run, call after call in turn, so that ratios hold on a noisy machine too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import fulmen
from fulmen import core
from fulmen.bench.figures import GEMM, Call, Figure, threads_over_one
from fulmen.bench.limits_gate import output_gate
from fulmen.bench.limits_tpa import PARTS as TPA
from fulmen.bench.measure import interleaved
from fulmen.environment import describe, environment
from fulmen.linear_attention.native import workspace_bytes
from fulmen.linear_attention.problem import Attention
from fulmen.progress import Steps

HEADS, DIM, LENGTH = 16, 128, 8192
SWEEP_BYTES = (256 << 10, 4 << 20, 256 << 20)  # within L2, within L3, from memory


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decays: dict[str, tuple[Tensor | None, Tensor | None]]  # on the key axis, on the value axis

    def call(self, form: str, backend: str = "native", dtype: torch.dtype = torch.float32) -> Call:
        q, k, v = self.q.to(dtype), self.k.to(dtype), self.v.to(dtype)
        decay, decay_v = self.decays[form]
        return lambda: fulmen.linear_attention(q, k, v, decay=decay, decay_v=decay_v, backend=backend)

    def softmax(self) -> Call:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v))
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)


def inputs(length: int, heads: int) -> Inputs:
    """As in the published lasd report: q and k normalised, log-decays logsigmoid(randn)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shape = (1, length, heads, DIM)
    key, value = logsigmoid(normal(*shape)), logsigmoid(normal(*shape))
    decays: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "none": (None, None),
        "constant": (logsigmoid(normal(heads)), None),
        "per token": (logsigmoid(normal(*shape[:3])), None),
        "per key": (key, None),
        "per key and value": (key, value),
    }
    return Inputs(normalize(normal(*shape), dim=-1), normalize(normal(*shape), dim=-1), normal(*shape), decays)


def nominal_flops(length: int, heads: int) -> int:
    """State update and read-out, and what a chunk of about 32 tokens needs inside."""
    return length * heads * (4 * DIM * DIM + 65 * (DIM + DIM))


def run(json_path: Path | None) -> None:
    if core.core is None:
        raise RuntimeError(core.why_unavailable)
    facts = environment()
    print(describe(facts))
    parts = (forward, training, long_sequences, one_head, growth, decoding, small_call, states, *TPA, output_gate)
    figures: list[Figure] = []
    with Steps(1 + len(parts)) as steps, torch.no_grad():
        steps.begin("the machine")
        machine = measure_machine()
        for part in parts:
            steps.begin(part.__name__.replace("_", " "))
            figures += part()
    figures += workspaces()
    print("\nthe machine:")
    for what, value in machine.items():
        print(f"  {what:<58}{value:>10.2f}")
    print("\nthe native kernels:")
    print(f"  {'':<58}{'measured':>10}{'must':>8}{'aim':>8}")
    for figure in figures:
        numbers = f"{figure.value:>10.2f}{figure.must:>8g}{figure.aim:>8g}"
        print(f"  {figure.what:<58}{numbers}  {figure.unit:<4} {figure.verdict}")
    if json_path is not None:
        rows = [figure._asdict() | {"verdict": figure.verdict} for figure in figures]
        json_path.write_text(json.dumps({"environment": facts, "machine": machine, "figures": rows}, indent=2) + "\n")


def measure_machine() -> dict[str, float]:
    """FMA peak and sgemm in GFLOP/s, and the bandwidth of scaling an array in place, in GB/s."""
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    arrays = {size: torch.ones(size // 4) for size in SWEEP_BYTES}
    repeats = {size: max(1, (8 << 20) // size) for size in SWEEP_BYTES}

    def sweep(size: int) -> Call:
        return lambda: [arrays[size].mul_(1.0) for _ in range(repeats[size])]

    calls: dict[str, Call] = {"fma": core.require().fma_burst, "gemm": lambda: a @ b}
    times = interleaved(calls | {str(size): sweep(size) for size in SWEEP_BYTES}, seconds=2.0, repeats=5)
    machine = {
        "FMA peak, GFLOP/s": core.require().fma_burst() / times["fma"].median / 1e9,
        f"torch sgemm {GEMM}³, GFLOP/s": 2 * GEMM**3 / times["gemm"].median / 1e9,
    }
    machine[f"the same, {torch.get_num_threads()} threads over one"] = threads_over_one(calls["gemm"])
    for size in SWEEP_BYTES:
        moved = 2 * size * repeats[size]
        machine[f"mul_ over {size >> 10} KiB, GB/s read and written"] = moved / times[str(size)].median / 1e9
    return machine


def forward() -> list[Figure]:
    x = inputs(LENGTH, HEADS)
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    calls: dict[str, Call] = {form: x.call(form) for form in x.decays}
    calls |= {"bf16": x.call("constant", dtype=torch.bfloat16), "fp16": x.call("constant", dtype=torch.float16)}
    calls |= {"gemm": lambda: a @ b, "torch": x.call("constant", "torch"), "softmax": x.softmax()}
    t = {name: timing.median for name, timing in interleaved(calls, seconds=15.0, repeats=5).items()}
    constant = t["constant"]
    of_gemm = nominal_flops(LENGTH, HEADS) / constant / (2 * GEMM**3 / t["gemm"])
    return [
        Figure("fp32 forward, constant decay, as a fraction of sgemm", of_gemm, 0.70, 0.85, ""),
        Figure(f"against torch SDPA causal, n = {LENGTH}", t["softmax"] / constant, 20, 28, "x"),
        Figure("against our torch backend", t["torch"] / constant, 4, 7, "x"),
        Figure("bf16 time over fp32 time", t["bf16"] / constant, 1.15, 1.0, "x", True),
        Figure("fp16 time over fp32 time", t["fp16"] / constant, 1.15, 1.0, "x", True),
        Figure("no decay, time over constant decay", t["none"] / constant, 1.05, 1.0, "x", True),
        Figure("per token, time over constant decay", t["per token"] / constant, 1.2, 1.1, "x", True),
        Figure("per key, time over constant decay", t["per key"] / constant, 1.7, 1.4, "x", True),
        Figure("per key and value, time over constant decay", t["per key and value"] / constant, 2.0, 1.6, "x", True),
    ]


def training() -> list[Figure]:
    x = inputs(LENGTH, HEADS)
    decay = x.decays["constant"][0]
    assert decay is not None
    leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, decay)]
    grad = torch.randn_like(x.v)

    @torch.enable_grad()
    def both() -> object:
        q, k, v, decay = leaves
        output = fulmen.linear_attention(q, k, v, decay=decay, backend="native")
        return torch.autograd.grad(output, leaves, grad)

    t = interleaved({"forward": x.call("constant"), "both": both}, seconds=4.0, repeats=5)
    ratio = t["both"].median / t["forward"].median
    return [Figure("forward + backward over forward, learnable constant decay", ratio, 4.2, 3.5, "x", True)]


def long_sequences() -> list[Figure]:
    x = inputs(32768, 4)
    t = interleaved({"native": x.call("constant"), "softmax": x.softmax()}, seconds=0.0, repeats=3)
    ratio = t["softmax"].median / t["native"].median
    return [Figure("against torch SDPA causal, n = 32768, H4", ratio, 70, 100, "x")]


def one_head() -> list[Figure]:
    ratio = threads_over_one(inputs(16384, 1).call("constant"))
    return [Figure(f"one head, n = 16384, {torch.get_num_threads()} threads over one", ratio, 1.7, 1.9, "x")]


def growth() -> list[Figure]:
    calls = {str(length): inputs(length, 2).call("constant") for length in (8192, 32768, 131072)}
    t = {name: timing.median for name, timing in interleaved(calls, seconds=3.0, repeats=5).items()}
    worst = max(t["32768"] / t["8192"], t["131072"] / t["32768"])
    return [Figure("four times the tokens, time (up to n = 131072)", worst, 4.4, 4.0, "x", True)]


def decoding() -> list[Figure]:
    batch = 8
    q, k, v = (torch.randn(batch, HEADS, DIM) for _ in range(3))
    state, other = torch.randn(batch, HEADS, DIM, DIM), torch.randn(batch, HEADS, DIM, DIM)
    decay = logsigmoid(torch.randn(HEADS))
    calls: dict[str, Call] = {
        "step": lambda: fulmen.linear_attention_step(q, k, v, state, decay=decay, backend="native"),
        "mul_": lambda: other.mul_(0.999),
    }
    t = interleaved(calls, seconds=2.0, repeats=50)
    ratio = t["step"].median / t["mul_"].median
    return [Figure(f"decode step (B{batch} H{HEADS} D{DIM}) over mul_ of the state", ratio, 1.6, 1.2, "x", True)]


def small_call() -> list[Figure]:
    q, k, v = (torch.randn(1, 16, 4, 64) for _ in range(3))
    decay = logsigmoid(torch.randn(4))
    t = interleaved({"small": lambda: fulmen.linear_attention(q, k, v, decay=decay)}, seconds=1.0, repeats=100)
    return [Figure("a small call (B1 H4 n16 D64), end to end", t["small"].median * 1e6, 120, 60, "us", True)]


def states() -> list[Figure]:
    x = inputs(LENGTH, HEADS)

    def call(backend: str) -> Call:
        return lambda: fulmen.chunk_states(x.k, x.v, decay=x.decays["per key"][0], backend=backend)

    t = interleaved({name: call(name) for name in ("native", "torch")}, seconds=3.0, repeats=5)
    return [
        Figure("chunk_states per key, against our torch backend", t["torch"].median / t["native"].median, 4, 7, "x")
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
