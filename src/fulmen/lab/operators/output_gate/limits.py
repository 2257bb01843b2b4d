"""The output gate against plain torch matmuls with autograd (the published ``Lao Tor``).

Those get the layout they like best, contiguous ``[B, H, N, D]``, and ours is the library's ``[B, N, H, D]``. Without
bfloat16 instructions torch's product is tens of times slower, and compared with nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import fulmen
from fulmen.lab.bench.figures import Call, Figure, multiplies_bfloat16
from fulmen.lab.bench.measure import interleaved
from fulmen.ops.output_gate import reference

BATCH, HEADS, LENGTH, DIM = 4, 12, 4096, 128


def output_gate() -> list[Figure]:
    """Forward, and forward with backward, in float32 and bfloat16."""
    single = compared(torch.float32, "fp32", LENGTH, (1.2, 1.5), (1.3, 1.6))
    if not multiplies_bfloat16("output_gate"):
        return single
    return [
        *single,
        *compared(torch.bfloat16, "bf16", LENGTH, (1.3, 1.5), (1.2, 1.5)),
        *compared(torch.bfloat16, "bf16", 1024, (1.0, 1.2), (1.0, 1.2)),
    ]


def compared(
    dtype: torch.dtype, name: str, length: int, forward: tuple[float, float], training: tuple[float, float]
) -> list[Figure]:
    """``forward`` and ``training``: what the figure must reach and what we aim for."""
    torch.manual_seed(0)
    *inputs, grad = (torch.randn(BATCH, length, HEADS, DIM).to(dtype) for _ in range(5))
    *heads_first, grad_heads_first = (x.transpose(1, 2).contiguous() for x in (*inputs, grad))

    def gated(*leaves: torch.Tensor) -> torch.Tensor:
        return fulmen.output_gated_attention(*leaves, save=("kv", "qkv"), backend="native")

    def both(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor) -> Call:
        leaves = [x.detach().requires_grad_() for x in inputs]

        @torch.enable_grad()
        def call() -> object:
            return torch.autograd.grad(function(*leaves), leaves, grad)

        return call

    calls: dict[str, Call] = {
        "torch": lambda: reference.attend(*heads_first),
        "native": lambda: gated(*inputs),
        "native, both": both(gated, inputs, grad),
        "torch, both": both(reference.attend, heads_first, grad_heads_first),
    }
    t = {call: timing.median for call, timing in interleaved(calls, seconds=8.0, repeats=5).items()}
    return [
        Figure(f"output gate forward, {name}, n{length}, against torch", t["torch"] / t["native"], *forward, "x"),
        Figure(
            f"output gate forward + backward, {name}, n{length}", t["torch, both"] / t["native, both"], *training, "x"
        ),
    ]


LIMITS = (output_gate,)
