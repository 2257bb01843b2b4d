"""causal_conv1d, its gradients and its step against the specification in float64, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

import fulmen
from fulmen.lab.operators.causal_conv1d.cases import Case, exact, run, tensors
from fulmen.lab.precision import OURS, TORCH, Comparison
from fulmen.lab.tolerances import Results, deviations
from fulmen.lab.verify.check import DTYPES, Check, Target, unusual


def checks(target: Target) -> Iterator[Check]:
    for case in cases(target):
        yield Check("causal_conv1d", unusual(case), partial(convolve, target, case))
    yield Check("causal_conv1d", "the same bits twice", partial(twice, target, Case(dtype=torch.bfloat16)))
    for dtype in DTYPES[:1] if target.quick else DTYPES:
        case = Case(length=5, dtype=dtype)
        yield Check("causal_conv1d_step", unusual(case), partial(steps, target, case))


def cases(target: Target) -> Iterator[Case]:
    yield Case()
    if target.quick:
        return
    yield from (Case(dtype=dtype, dense=dense) for dtype in DTYPES for dense in ("channels", "tokens"))
    yield Case(dense="neither", width=3, state=None, bias=False, activation=None)
    yield from (Case(width=width, state=width + 2, length=11) for width in (1, 2, 8))
    yield from (Case(lengths=(0, 5, 1, 140, 0, 2), dense=dense) for dense in ("channels", "tokens"))
    yield from (Case(length=length, state=7) for length in (0, 1, 5))
    if not target.interpreted:
        yield from (Case(length=1300, channels=300, dense=dense) for dense in ("channels", "tokens"))


def convolve(target: Target, case: Case) -> list[str]:
    return deviations(run(case, on(target, case), target.backend), exact(case), target.backend)


def twice(target: Target, case: Case) -> list[str]:
    first, second = (run(case, on(target, case), target.backend) for _ in range(2))
    return [f"{name} differs from call to call" for name, x in first.items() if not torch.equal(x, second[name])]


def steps(target: Target, case: Case) -> list[str]:
    """Token by token, the same as the whole."""
    results, expected = run_steps(target, case), exact(case)
    return deviations(results, {name: expected[name] for name in results}, target.backend)


def run_steps(target: Target, case: Case) -> Results:
    given = on(target, case)
    state = given["initial_state"].clone()
    outputs = [
        fulmen.causal_conv1d_step(
            x, state, given["weight"], given["bias"], activation=case.activation, backend=target.backend
        )
        for x in given["x"].unbind(1)
    ]
    return {"output": torch.stack(outputs, 1), "state": state}


def on(target: Target, case: Case) -> dict[str, Tensor]:
    return {name: x.to(target.device) for name, x in tensors(case).items()}


def comparisons(target: Target) -> Iterator[Comparison]:
    """Its sums are float32 everywhere; in plain torch too, which rounds what the activation reads."""
    case = Case(length=80 if target.quick else 1024, channels=64, state=None, dtype=torch.bfloat16)
    given = tensors(case) | {"grad_state": torch.zeros(2, case.channels, case.width - 1, dtype=case.dtype)}
    expected = run(case, {name: x.double() for name, x in given.items()}, "reference")
    ours = run(case, {name: x.to(target.device) for name, x in given.items()}, target.backend)
    found = {OURS: ours, TORCH: in_plain_torch(case, given)}
    yield Comparison("causal_conv1d", {name: x for name, x in expected.items() if name != "state"}, found)
    case = Case(length=64, channels=64, dtype=torch.bfloat16)
    stepped = run_steps(target, case)
    yield Comparison("causal_conv1d_step", {"output": exact(case)["output"]}, {OURS: stepped})


def in_plain_torch(case: Case, given: dict[str, Tensor]) -> Results:
    leaves = {name: given[name].detach().requires_grad_() for name in ("weight", "x", "bias")}
    weight, x, bias = leaves.values()
    convolved = conv1d(x.mT, weight[:, None], bias, padding=case.width - 1, groups=case.channels)
    output = silu(convolved[..., : case.length]).mT
    grads = torch.autograd.grad(output, list(leaves.values()), given["grad_output"])
    return {"output": output.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
