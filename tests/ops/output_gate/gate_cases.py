"""Inputs and the float64 oracle that all tests of the output gate share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

import fulmen
from cases import BACKENDS, Results, assert_close
from fulmen.lab.yardstick import rounded_products

__all__ = ["OPS", "SAVES", "Case", "assert_close", "compared", "differentiate", "exact", "leaves", "run", "tensors"]

SAVES = ((), ("kv",), ("kv", "qkv"))
OPS = [name for name in BACKENDS if name != "reference"]  # the reference is no op


@dataclass(frozen=True)
class Case:
    batch: int = 2
    queries: int = 37
    keys: int = 53
    heads: int = 3
    key_size: int = 20
    value_size: int = 24
    dtype: torch.dtype = torch.float32


@lru_cache(maxsize=64)
def tensors(case: Case) -> dict[str, Tensor]:
    """q, k, v, the gate and the output's cotangent, rounded to the case's dtype."""
    generator = torch.Generator().manual_seed(case.queries + 1000 * case.key_size)
    sizes = {
        "q": (case.queries, case.key_size),
        "k": (case.keys, case.key_size),
        "v": (case.keys, case.value_size),
        "gate": (case.queries, case.value_size),
        "grad": (case.queries, case.value_size),
    }
    return {
        name: torch.randn(case.batch, tokens, case.heads, size, generator=generator, dtype=torch.float64).to(case.dtype)
        for name, (tokens, size) in sizes.items()
    }


def leaves(case: Case) -> dict[str, Tensor]:
    return {name: x.clone().requires_grad_() for name, x in tensors(case).items() if name != "grad"}


def differentiate(case: Case, inputs: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(output, list(inputs.values()), tensors(case)["grad"].to(output.dtype))
    return {"output": output.detach()} | {f"d{name}": x for name, x in zip(inputs, grads, strict=True)}


def run(case: Case, backend: str = "auto", **options: object) -> Results:
    """The output and all gradients."""

    inputs = leaves(case)
    output = fulmen.output_gated_attention(**inputs, backend=backend, **options)
    return compared(case, differentiate(case, inputs, output), backend)


def compared(case: Case, results: dict[str, Tensor], backend: str) -> Results:
    """With the yardstick of the case, whatever is saved."""
    return Results(results, backend, rounded_products()(lambda: run(case, backend="torch")))


@lru_cache(maxsize=64)
def exact(case: Case) -> dict[str, Tensor]:
    """The same in float64 by the formula itself, differentiated by autograd."""
    inputs = {name: x.detach().double().requires_grad_() for name, x in leaves(case).items()}
    kv = torch.einsum("bmhd,bmhe->bhde", inputs["k"], inputs["v"])
    return differentiate(case, inputs, inputs["gate"] * torch.einsum("bnhd,bhde->bnhe", inputs["q"], kv))
