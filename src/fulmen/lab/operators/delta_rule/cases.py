"""Calls of the delta rule with their inputs, made on the CPU, and what the recurrence in float64 makes of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

import fulmen
from fulmen.lab.operators.linear_attention.cases import log_decays
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.chunks.decay_form import Decays

DECAYS = ("none", "head", "token", "channel")


class Case(NamedTuple):
    """
    Attributes:
        heads: of q, k and v.
        values: the kind of log-decays (:func:`fulmen.lab.operators.linear_attention.cases.log_decays`).
        keys: "random"; "parallel", with cosines of 0.9999; "repeated", three of them in turns. Of length 1, unless the
            call normalizes them.
        betas: "random" from 0 to 2 with exact zeros and twos; "near two"; "zero".
        packed: lengths of packed sequences, whose sum is N; None: ``batch`` samples.
        seed: of all values.
    """

    batch: int = 2
    length: int = 65
    heads: tuple[int, int, int] = (2, 2, 2)
    key_size: int = 16
    value_size: int = 16
    decays: str = "token"
    values: str = "random"
    keys: str = "random"
    betas: str = "random"
    normalizes: bool = True
    scale: float | None = None
    initial: bool = True
    packed: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0


def _keys(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    if kind == "parallel":
        return normalize(x[:, :1], dim=-1) + 0.01 * normalize(x, dim=-1)
    return x[:, torch.arange(shape[1]) % 3] if kind == "repeated" else x


def _betas(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    if kind == "random":
        return torch.where(x < 0.1, 0.0, torch.where(x > 0.9, 2.0, 2 * x))
    return 2 - 0.1 * x if kind == "near two" else torch.zeros_like(x)


@lru_cache(maxsize=64)
def tensors(case: Case) -> dict[str, Tensor]:
    """Every tensor of the call, and the gradients of both results, rounded to the case's dtypes."""
    generator = torch.Generator().manual_seed(case.length + 1000 * case.key_size + 1_000_000 * case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    batch, length = (case.batch, case.length) if case.packed is None else (1, sum(case.packed))
    heads, (hq, hk, hv) = max(case.heads), case.heads
    states = batch if case.packed is None else len(case.packed)
    single = torch.float64 if case.dtype == torch.float64 else torch.float32
    k = _keys(case.keys, (batch, length, hk, case.key_size), generator)
    made = {
        "q": normal(batch, length, hq, case.key_size).to(case.dtype),
        "k": (3 * k if case.normalizes else normalize(k, dim=-1)).to(case.dtype),
        "v": normal(batch, length, hv, case.value_size).to(case.dtype),
        "beta": _betas(case.betas, (batch, length, heads), generator).to(single),
    }
    shapes = Decays.named(case.decays).shapes(batch, length, heads, case.key_size, case.value_size)
    made |= {name: log_decays(case.values, shape, generator).to(single) for name, shape in shapes.items()}
    if case.initial:
        made["initial_state"] = normal(states, heads, case.key_size, case.value_size).to(single)
    made["grad_output"] = normal(batch, length, heads, case.value_size).to(case.dtype)
    made["grad_state"] = normal(states, heads, case.key_size, case.value_size).to(single)
    return made


def options(case: Case, device: str = "cpu") -> dict[str, Any]:
    """The arguments of the call that need no gradient."""
    bounds = None if case.packed is None else [0, *torch.tensor(case.packed, device="cpu").cumsum(0).tolist()]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device)
    return {"normalize_qk": case.normalizes, "scale": case.scale, "cu_seqlens": cu_seqlens}


def run(
    case: Case, given: dict[str, Tensor], backend: str, schedule: str = "auto", without: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Both results and all gradients, by name; ``without`` names results whose gradient is left out."""
    leaves: dict[str, Any] = {n: x.detach().requires_grad_() for n, x in given.items() if not n.startswith("grad")}
    device = str(given["q"].device)
    output, state = fulmen.delta_rule(
        **leaves, **options(case, device), return_state=True, schedule=schedule, backend=backend
    )
    results = {"output": output, "state": state}
    used = [name for name in results if name not in without]
    grads = torch.autograd.grad(
        [results[name] for name in used], list(leaves.values()), [given[f"grad_{name}"] for name in used]
    )
    return {name: x.detach() for name, x in results.items()} | {
        f"d{name}": x for name, x in zip(leaves, grads, strict=True)
    }


@lru_cache(maxsize=64)
def exact(case: Case, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """From the recurrence in float64."""
    return run(case, {name: x.double() for name, x in tensors(case).items()}, "reference", without=without)


@lru_cache(maxsize=64)
def yardstick(case: Case, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Of bfloat16 inputs in the arithmetic of GPU kernels, which round the inverse of a chunk too."""
    with rounded_products():
        return run(case, tensors(case), "torch", without=without)
