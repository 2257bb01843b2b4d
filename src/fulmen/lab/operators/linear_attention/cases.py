"""Calls of linear attention with their inputs, and what the recurrence in float64 makes of them.

Tensors are made on the CPU, so that they are the same everywhere, and moved to where a call runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import fulmen
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.chunks.decay_form import Decays
from fulmen.ops.chunks.sequences import share_heads
from fulmen.ops.linear_attention.reference import read_out, states_of, token_decay

# By name (:class:`fulmen.ops.chunks.decay_form.Decays`): the published ones; the other combinations are tested too.
DECAYS = ("none", "head", "token", "channel", "channel+value")
ALL_DECAYS = (*DECAYS, "none+value", "head+value", "token+value")


@dataclass(frozen=True)
class Case:
    batch: int = 2
    length: int = 65
    heads: tuple[int, int, int] = (2, 2, 2)  # of q, k and v
    key_size: int = 16
    value_size: int = 16
    decays: str = "head"
    values: str = "random"
    scale: float | None = None
    initial: bool = True
    packed: tuple[int, ...] | None = None  # lengths of packed sequences
    dtype: torch.dtype = torch.float32
    decay_dtype: torch.dtype = torch.float32
    seed: int = 0  # of all values

    def of(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def factor(self) -> float:
        return self.key_size**-0.5 if self.scale is None else self.scale

    @property
    def bounds(self) -> list[int] | None:
        if self.packed is None:
            return None
        return [0, *torch.tensor(self.packed).cumsum(0).tolist()]


def log_decays(values: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log-decays of the named kind. The extreme ones put very different magnitudes side by side."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    if values == "random":
        return torch.nn.functional.logsigmoid(
            torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        )
    choices = {
        "zero": [0.0],
        "tiny": [-1e-8],
        "strong": [-30.0],
        "mixed": [-90.0, -1e-3, -1e-3, -1e-3],
        "far": [-5000.0, -1e-3, -1e-3, -1e-3],
        "forget": [-torch.inf, -0.1, -0.01, -1e-3, -0.5],
    }[values]
    return torch.tensor(choices, dtype=torch.float64, device="cpu")[(uniform * len(choices)).long()]


@lru_cache(maxsize=64)
def tensors(case: Case) -> dict[str, Tensor]:
    """Every tensor of the call, and the cotangents of output and state, rounded to the case's dtypes."""
    generator = torch.Generator().manual_seed(case.length + case.key_size + 1_000_000 * case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    batch, length = (1, sum(case.packed)) if case.packed else (case.batch, case.length)
    heads, (hq, hk, hv) = max(case.heads), case.heads
    states = len(case.packed) if case.packed else batch
    shapes = Decays.named(case.decays).shapes(batch, length, heads, case.key_size, case.value_size)
    single = torch.float64 if case.dtype == torch.float64 else torch.float32
    decay_dtype = torch.float64 if case.dtype == torch.float64 else case.decay_dtype
    made = {
        "q": normal(batch, length, hq, case.key_size).to(case.dtype),
        "k": normal(batch, length, hk, case.key_size).to(case.dtype),
        "v": normal(batch, length, hv, case.value_size).to(case.dtype),
    }
    made |= {name: log_decays(case.values, shape, generator).to(decay_dtype) for name, shape in shapes.items()}
    if case.initial:
        made["initial_state"] = normal(states, heads, case.key_size, case.value_size).to(single)
    made["grad_output"] = normal(batch, length, heads, case.value_size).to(case.dtype)
    made["grad_state"] = normal(states, heads, case.key_size, case.value_size).to(single)
    return made


def inputs(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """The call's tensors as fresh leaves."""
    return {
        name: x.detach().clone().to(device).requires_grad_()
        for name, x in tensors(case).items()
        if name not in ("grad_output", "grad_state")
    }


def run(case: Case, device: str = "cpu", schedule: str = "auto", backend: str = "auto") -> dict[str, Tensor]:
    """Output, final state and all gradients of ``fulmen.linear_attention``."""
    leaves: dict[str, Any] = inputs(case, device)
    cu_seqlens = None if case.bounds is None else torch.tensor(case.bounds, device=device)
    output, state = fulmen.linear_attention(
        **leaves, scale=case.scale, return_state=True, cu_seqlens=cu_seqlens, schedule=schedule, backend=backend
    )
    return differentiate(case, leaves, output, state)


def differentiate(
    case: Case, leaves: dict[str, Tensor], output: Tensor, state: Tensor, without: str = ""
) -> dict[str, Tensor]:
    """The results by name, and the gradients of all ``leaves``; ``without`` names a cotangent to leave out (zero)."""
    results = {"output": output, "state": state}
    given = {"output": tensors(case)["grad_output"], "state": tensors(case)["grad_state"]}
    used = [name for name, x in results.items() if x.requires_grad]
    cotangents = [(given[name] * (f"grad_{name}" != without)).to(results[name]) for name in used]
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if used:
        grads = torch.autograd.grad(
            [results[name] for name in used], list(leaves.values()), cotangents, allow_unused=True
        )
    found = {name: x.detach() for name, x in results.items()}
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
    return found


@lru_cache(maxsize=64)
def exact(case: Case, without: str = "") -> dict[str, Tensor]:
    """The same from the recurrence in float64, differentiated by autograd."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs(case).items()}
    bounds = case.bounds or [0, leaves["q"].shape[1]]
    heads = max(case.heads)
    q, k, v = (share_heads(leaves[name], heads) for name in "qkv")
    a, c = token_decay(leaves.get("log_decay"), k), token_decay(leaves.get("log_decay_v"), v)
    outputs, finals = [], []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        rows = slice(i, i + 1) if case.packed else slice(None)
        tokens = slice(start, stop)
        state = (
            leaves["initial_state"][rows]
            if case.initial
            else q.new_zeros(1 if case.packed else case.batch, heads, case.key_size, case.value_size)
        )
        part_a, part_c = (None if x is None else x[:, tokens] for x in (a, c))
        states = states_of(k[:, tokens], v[:, tokens], part_a, part_c, state)
        outputs.append(read_out(q[:, tokens], states, case.factor))
        finals.append(states[-1])
    return differentiate(case, leaves, torch.cat(outputs, 1), torch.cat(finals), without)


@lru_cache(maxsize=64)
def yardstick(case: Case) -> dict[str, Tensor]:
    """The same of bfloat16 inputs in the arithmetic of GPU kernels."""
    with rounded_products():
        return run(case, backend="torch")
