"""output_gated_attention and its gradients against the specification in float64, and against themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fulmen
from fulmen.lab.precision import GPU_STYLE, OURS, TORCH, Comparison
from fulmen.lab.tolerances import Results, deviations
from fulmen.lab.verify.check import DTYPES, Check, Target, unusual
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.output_gate import reference
from fulmen.ops.output_gate.validation import SAVES


class Case(NamedTuple):
    queries: int = 67
    keys: int = 41
    heads: int = 3
    key_size: int = 20
    value_size: int = 9
    dtype: torch.dtype = torch.float32
    seed: int = 0  # of all values


def checks(target: Target) -> Iterator[Check]:
    for case in cases(target):
        for save in SAVES:
            what = f"{unusual(case)}, saves {'+'.join(save) or 'nothing'}"
            yield Check("output_gated_attention", what, partial(attend, target, case, save))
    yield Check("output_gated_attention", "the same bits twice", partial(twice, target, Case(dtype=torch.bfloat16)))


def cases(target: Target) -> Iterator[Case]:
    if target.quick:
        yield Case()
        return
    yield from (Case(dtype=dtype) for dtype in DTYPES)
    yield from (Case(queries=n, keys=m) for n, m in ((1, 1), (64, 64), (130, 257)))
    if target.device == "cuda" or target.backend == "native":
        yield Case(queries=1000, keys=1500, heads=12, key_size=128, value_size=128, dtype=torch.bfloat16)


def tensors(case: Case) -> list[Tensor]:
    """q, k, v, the gate and the gradient of the output, made on the CPU, for two samples."""
    generator = torch.Generator().manual_seed(case.queries + 1_000_000 * case.seed)
    n, m, d, e = case.queries, case.keys, case.key_size, case.value_size
    shapes = [(n, d), (m, d), (m, e), (n, e), (n, e)]
    return [
        torch.randn(2, length, case.heads, size, generator=generator, device="cpu").to(case.dtype)
        for length, size in shapes
    ]


def run(inputs: list[Tensor], save: tuple[str, ...], backend: str) -> Results:
    return differentiate(partial(fulmen.output_gated_attention, save=save, backend=backend), inputs)


def differentiate(function: Callable[..., Tensor], inputs: list[Tensor]) -> Results:
    *leaves, gradient = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    output = function(*leaves)
    grads = torch.autograd.grad(output, leaves, gradient)
    return {"output": output.detach()} | dict(zip(("dq", "dk", "dv", "dgate"), grads, strict=True))


def attend(target: Target, case: Case, save: tuple[str, ...]) -> list[str]:
    expected = run([x.double() for x in tensors(case)], save, "reference")
    results = run([x.to(target.device) for x in tensors(case)], save, target.backend)
    return deviations(results, expected, target.backend, partial(yardstick, case, save))


@rounded_products()
def yardstick(case: Case, save: tuple[str, ...]) -> Results:
    return run(tensors(case), save, "torch")


def twice(target: Target, case: Case) -> list[str]:
    first, second = (run([x.to(target.device) for x in tensors(case)], (), target.backend) for _ in range(2))
    return [f"{name} differs from call to call" for name, x in first.items() if not torch.equal(x, second[name])]


def comparisons(target: Target) -> Iterator[Comparison]:
    tokens = 80 if target.quick else 1024
    case = Case(tokens, tokens, heads=2, key_size=64, value_size=64, dtype=torch.bfloat16)
    found = {
        OURS: run([x.to(target.device) for x in tensors(case)], (), target.backend),
        GPU_STYLE: yardstick(case, ()),
        TORCH: differentiate(in_plain_torch, tensors(case)),
    }
    yield Comparison("output_gated_attention", run([x.double() for x in tensors(case)], (), "reference"), found)


def in_plain_torch(*inputs: Tensor) -> Tensor:
    return reference.attend(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
