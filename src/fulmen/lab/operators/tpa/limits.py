"""How much of the machine the native tensor-product attention reaches, and how far it is from torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fulmen
from fulmen.lab.bench.figures import GEMM, Call, Figure, multiplies_bfloat16, threads_over_one
from fulmen.lab.bench.measure import interleaved
from fulmen.ops.tpa.native import workspace_bytes
from fulmen.ops.tpa.problem import Decode, decode_of
from fulmen.ops.tpa.reference import naive
from fulmen.ops.tpa.torch_factorised import factorised

BATCH, HEADS, RANK, DIM = 8, 32, 16, 128
LENGTHS = (4096, 16384)
BFLOAT16 = {
    4096: (2.0, 2.5),
    16384: (2.2, 3.0),
}  # where torch has bfloat16 instructions: what must be reached, and the aim
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs(tokens: int, dtype: torch.dtype = torch.float32, batch: int = BATCH) -> Decode:
    """As in the published tpa_decode report: keys and values of rank one."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    aq, bq = normal(batch, 1, HEADS, RANK), normal(batch, 1, RANK, DIM)
    ak, av = normal(batch, tokens, HEADS), normal(batch, tokens, HEADS)
    bk, bv = normal(batch, tokens, DIM), normal(batch, tokens, DIM)
    return decode_of(aq, ak, av, bq, bk, bv)


def nominal_flops(tokens: int) -> int:
    return 2 * BATCH * tokens * (DIM * RANK + RANK * HEADS + HEADS * DIM)


def tensor_product_decode() -> list[Figure]:
    """Against the published torch forms, which compute in the dtype of the factors."""
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    figures = []
    dtypes = DTYPES if multiplies_bfloat16("tpa_decode") else {"fp32": torch.float32}
    for tokens in LENGTHS:
        given = {name: inputs(tokens, dtype) for name, dtype in dtypes.items()}
        # The dtypes alternate, so that no form finds in cache what the one before it has read.
        calls: dict[str, Call] = {"gemm": lambda: a @ b}
        calls |= {f"native {name}": _native(p) for name, p in given.items()}
        calls |= {f"to {name}": _form(factorised, p) for name, p in given.items()}
        calls |= {f"toc {name}": _form(torch.compile(factorised, fullgraph=True), p) for name, p in given.items()}
        if tokens == LENGTHS[0]:
            calls["ton"] = _form(naive, given["fp32"])
        t = {name: timing.median for name, timing in interleaved(calls, seconds=6.0, repeats=5).items()}
        torch.compiler.reset()  # compiled again for other sizes, it would serve all of them, more slowly
        of_gemm = nominal_flops(tokens) / t["native fp32"] / (2 * GEMM**3 / t["gemm"])
        for name, (must, aim) in zip(dtypes, ((2.5, 4.0), BFLOAT16[tokens]), strict=False):
            ratio = min(t[f"to {name}"], t[f"toc {name}"]) / t[f"native {name}"]
            figures.append(Figure(f"tpa_decode {name} against to and toc, m = {tokens}", ratio, must, aim, "x"))
        if "ton" in t:
            ratio = t["ton"] / t["native fp32"]
            figures.append(Figure(f"tpa_decode fp32 against ton, m = {tokens}", ratio, 100, 250, "x"))
        figures.append(Figure(f"tpa_decode fp32 as a fraction of sgemm, m = {tokens}", of_gemm, 0.45, 0.65, ""))
    return figures


def tensor_product_decode_of_one_sample() -> list[Figure]:
    ratio = threads_over_one(_native(inputs(16384, batch=1)))
    return [Figure(f"tpa_decode B1 m = 16384, {torch.get_num_threads()} threads over one", ratio, 1.7, 1.9, "x")]


def tensor_product_workspace() -> list[Figure]:
    """Asked of the core, for the shorter of the published lengths."""
    figures = []
    for name, dtype in DTYPES.items():
        p = inputs(LENGTHS[0], dtype)
        share = 100 * workspace_bytes(p) / sum(x.nbytes for x in p[:6])
        figures.append(Figure(f"tpa_decode {name} workspace over factors, m = {LENGTHS[0]}", share, 1, 1, "%", True))
    return figures


def _native(p: Decode) -> Call:
    return lambda: fulmen.tpa_decode(p.aq, p.ak, p.av, p.bq, p.bk, p.bv, backend="native")


def _form(form: Callable[[Decode], Tensor], p: Decode) -> Call:
    return lambda: form(p)


LIMITS = (tensor_product_decode, tensor_product_decode_of_one_sample, tensor_product_workspace)
