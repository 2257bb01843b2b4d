"""causal_conv1d, its gradients and its step against the specification in float64, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import fulmen
from fulmen.lab.operators.causal_conv1d.cases import Case, exact, run, tensors
from fulmen.lab.tolerances import deviations
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
    given, expected = on(target, case), exact(case)
    state = given["initial_state"].clone()
    outputs = [
        fulmen.causal_conv1d_step(
            x, state, given["weight"], given["bias"], activation=case.activation, backend=target.backend
        )
        for x in given["x"].unbind(1)
    ]
    results = {"output": torch.stack(outputs, 1), "state": state}
    return deviations(results, {name: expected[name] for name in results}, target.backend)


def on(target: Target, case: Case) -> dict[str, Tensor]:
    return {name: x.to(target.device) for name, x in tensors(case).items()}
