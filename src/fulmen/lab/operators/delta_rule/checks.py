"""delta_rule, its gradients and its step against the recurrence in float64, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fulmen
from fulmen.lab.operators.delta_rule.cases import DECAYS, Case, exact, run, tensors, yardstick
from fulmen.lab.precision import GPU_STYLE, OURS, Comparison
from fulmen.lab.tolerances import DELTA_RULE, TOLERANCE, Results, deviations, relative_error
from fulmen.lab.verify.check import DTYPES, Check, Target, unusual
from fulmen.ops.chunks.decay_form import tokens_of
from fulmen.ops.chunks.validation import SCHEDULES

# Ragged, not a multiple of anything, and more than one chunk of every backend.
RAGGED = Case(batch=1, length=67, key_size=20, value_size=9, scale=0.3)


def checks(target: Target) -> Iterator[Check]:
    for case, schedule in cases(target):
        what = unusual(case) + f", {schedule}" * (schedule != "auto")
        yield Check("delta_rule", what, partial(attend, target, case, schedule))
    yield Check("delta_rule", "the same bits twice", partial(twice, target, RAGGED._replace(dtype=torch.bfloat16)))
    for dtype in DTYPES[:1] if target.quick else DTYPES:
        case = RAGGED._replace(length=5, dtype=dtype)
        yield Check("delta_rule_step", unusual(case), partial(steps, target, case))


def cases(target: Target) -> Iterator[tuple[Case, str]]:
    """Every decay; then dtypes, lengths, schedules, packed sequences, shared heads, and what is hard on the numbers."""
    for decays in DECAYS:
        yield RAGGED._replace(decays=decays), "auto"
    if target.quick:
        return
    for decays in DECAYS:
        case = RAGGED._replace(decays=decays)
        yield from ((case._replace(dtype=dtype), "auto") for dtype in DTYPES[1:])
        yield from ((case._replace(length=300), schedule) for schedule in SCHEDULES)
        yield case._replace(packed=(0, 33, 150, 0, 1), heads=(1, 2, 4)), "auto"
        yield case._replace(keys="parallel", betas="near two", normalizes=False), "auto"
        if decays != "none":
            yield from ((case._replace(values=values), "auto") for values in ("far", "forget"))
    yield from ((Case(length=length, initial=False), "auto") for length in (0, 1, 64, 1000))
    yield RAGGED._replace(keys="repeated"), "auto"
    yield RAGGED._replace(betas="zero"), "auto"


def given(target: Target, case: Case) -> dict[str, Tensor]:
    return {name: x.to(target.device) for name, x in tensors(case).items()}


def attend(target: Target, case: Case, schedule: str) -> list[str]:
    results = run(case, given(target, case), target.backend, schedule)
    return deviations(results, exact(case), target.backend, partial(yardstick, case), DELTA_RULE)


def twice(target: Target, case: Case) -> list[str]:
    first, second = (run(case, given(target, case), target.backend) for _ in range(2))
    return [f"{name} differs from call to call" for name, x in first.items() if not torch.equal(x, second[name])]


def steps(target: Target, case: Case) -> list[str]:
    """Token by token, the same as the whole."""
    results, expected = run_steps(target, case), exact(case)
    errors = {
        "output": relative_error(results["output"], expected["output"]) / TOLERANCE[case.dtype],
        "state": relative_error(results["state"], expected["state"]) / TOLERANCE[torch.float32],
    }
    return [f"{name}: {error:.1f} times the error allowed" for name, error in errors.items() if not error <= 1]


def run_steps(target: Target, case: Case) -> Results:
    x = given(target, case)
    state, outputs = x["initial_state"].clone(), []
    for t in range(case.length):
        token: dict[str, Any] = {name: tokens_of(x[name], t) for name in ("q", "k", "v", "beta", "log_decay")}
        outputs.append(
            fulmen.delta_rule_step(
                **token, state=state, normalize_qk=case.normalizes, scale=case.scale, backend=target.backend
            )
        )
    return {"output": torch.stack(outputs, 1), "state": state}


def comparisons(target: Target) -> Iterator[Comparison]:
    tokens = 80 if target.quick else 1024
    typical = Case(1, tokens, key_size=64, value_size=64, initial=False, dtype=torch.bfloat16)
    for decays in ("token", "channel"):
        case = typical._replace(decays=decays)
        found = {OURS: run(case, given(target, case), target.backend), GPU_STYLE: yardstick(case)}
        yield Comparison(f"delta_rule, {decays}", exact(case), found)
    case = typical._replace(length=64, initial=True)
    ours = run_steps(target, case)
    yield Comparison("delta_rule_step, token", {name: exact(case)[name] for name in ours}, {OURS: ours})
