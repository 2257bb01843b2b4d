"""One problem in one setting, and what is wrong with its results."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fulmen.lab.fuzz.operators import SUBJECTS, Tensors
from fulmen.lab.fuzz.problem import Problem, Setting
from fulmen.lab.fuzz.views import AXES, viewed, written_around
from fulmen.lab.operators.tpa.checks import deviations_of as decode_deviations
from fulmen.lab.tolerances import ATTENTION, DELTA_RULE, LARGE, TOLERANCE, deviations, excess, relative_error
from fulmen.lab.yardstick import rounded_products
from fulmen.runtime.core import core
from fulmen.runtime.tensors import state_dtype

EXACT = Setting("reference")
OVER_REFERENCE = 3.0
FEW = 64  # numbers of a head
DIFFERENCE = 1e-6  # of the terms of a difference
OTHER = ("initial_state", "state", "beta", "weight", "bias")


@lru_cache(maxsize=4)
def tensors(problem: Problem) -> Tensors:
    """Of the call, and the gradients of its results."""
    found = dict(SUBJECTS[problem.operator].tensors(problem))
    for name, x in found.items():
        # A convolution takes its initial state in the dtype of x, and rounds any other.
        rounds = problem.operator == "causal_conv1d" and name == "initial_state"
        if name in OTHER and problem.other_dtype is not None and not rounds:
            found[name] = x.to(problem.other_dtype)
        axis = AXES.get(problem.equal, 9)
        if name in ("q", "k", "v") and axis < x.ndim and x.shape[axis]:
            found[name] = x.narrow(axis, 0, 1).expand(x.shape).contiguous()
    return found


def results(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    """By name, with the gradients of ``setting``."""
    subject = SUBJECTS[problem.operator]
    differentiated = subject.differentiable and setting.gradients != "none"
    leaves: dict[str, Any] = {}
    for name, x in given.items():
        if not name.startswith("grad_"):
            decay = name.startswith("log_decay")
            leaves[name] = x.detach()
            leaves[name].requires_grad_(differentiated and not (decay and setting.gradients == "inputs"))
    found = subject.call(problem, leaves, setting)
    made = {name: x.detach() for name, x in found.items()}
    if differentiated:
        used = [name for name, x in found.items() if x.requires_grad and name != problem.without]
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        cotangents = [given[f"grad_{name}"].to(found[name].dtype) for name in used]
        gradients = torch.autograd.grad(
            [found[name] for name in used], list(wanted.values()), cotangents, allow_unused=True
        )
        for (name, x), gradient in zip(wanted.items(), gradients, strict=True):
            made[f"d{name}"] = torch.zeros_like(x) if gradient is None else gradient
    return made


def in_double(given: Tensors) -> Tensors:
    """Copies: a step updates its state."""
    return {name: x.to(torch.float64, copy=True) if x.is_floating_point() else x for name, x in given.items()}


@lru_cache(maxsize=4)
def exact(problem: Problem) -> Tensors:
    return results(problem, in_double(tensors(problem)), EXACT)


@lru_cache(maxsize=4)
def yardstick(problem: Problem) -> Tensors:
    """Results of bfloat16 inputs with rounded factors."""
    with rounded_products():
        return results(problem, tensors(problem), Setting("torch"))


def wrong(problem: Problem, setting: Setting) -> list[str]:
    """One sentence for each result that is; empty if all are right."""
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        if setting.isa and core is not None:
            with core.using(setting.isa):
                return _wrong(problem, setting)
        return _wrong(problem, setting)
    finally:
        torch.set_num_threads(before)


def _wrong(problem: Problem, setting: Setting) -> list[str]:
    given, memory = {}, {}
    for name, x in tensors(problem).items():
        updated = name == "state"
        given[name], memory[name] = viewed(name, x, setting.layout, problem.equal, updated)
    try:
        found = results(problem, given, setting)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    found = {name: x.clone() if name == "state" else x for name, x in found.items()}
    problems = judged(problem, found, setting.backend)
    for name, x in tensors(problem).items():
        if name != "state" and not torch.equal(bits(given[name]), bits(x)):
            problems.append(f"{name} was written to")
        if setting.layout in ("sliced", "gaps") and written_around(given[name], memory[name]):
            problems.append(f"what lies around {name} was written to")
    return problems


def bits(x: Tensor) -> Tensor:
    """NaN is equal to itself."""
    return x.nan_to_num(nan=12345.0) if x.is_floating_point() else x


def judged(problem: Problem, found: Tensors, backend: str) -> list[str]:
    expected = {name: x for name, x in exact(problem).items() if name in found}
    if problem.operator.endswith("_step"):
        suspects = step_deviations(found, expected)
    elif problem.operator == "tpa_decode":
        suspects = decode_deviations(found["output"], expected["output"], backend, tensors(problem))
    else:
        rounds = SUBJECTS[problem.operator].rounds and problem.case.dtype == torch.bfloat16
        # What is of 16 bits says so, even where all results are float32.
        known = found | {"": torch.empty(0, dtype=problem.case.dtype)}
        bounds = DELTA_RULE if problem.operator == "delta_rule" else ATTENTION
        suspects = deviations(known, expected, backend, partial(yardstick, problem) if rounds else None, bounds)
    return [suspect for suspect in suspects if not ill_conditioned(problem, found, suspect.partition(":")[0])]


def ill_conditioned(problem: Problem, found: Tensors, name: str) -> bool:
    """Among thousands of calls are results of few numbers whose terms cancel, by chance, to next to nothing. They are
    as good as can be if the reference in float32 (of float64 inputs, in float64) is no better, from inputs that differ
    in the last place."""
    if name not in found or found[name].shape != exact(problem)[name].shape:
        return False
    got, want = found[name], exact(problem)[name]
    if got.dtype == torch.float16:  # what is beyond its largest number is infinite
        largest = torch.finfo(torch.float16).max
        got, want = got.clamp(-largest, largest), want.clamp(-largest, largest)
    if not torch.isfinite(got).all():
        return False
    if name == "dlog_decay" and got.ndim == 1 and (got - want).abs().max() <= DIFFERENCE * terms(problem):
        return True
    tolerance = TOLERANCE[got.dtype]
    if got.dtype == torch.bfloat16 and got.ndim == 4 and got[0, :, 0].numel() < FEW:  # the yardstick may be lucky
        tolerance = LARGE.largest
    allowed = tolerance + OVER_REFERENCE * max(relative_error(x[name], want) for x in nearby(problem))
    return relative_error(got, want) <= allowed


def terms(problem: Problem) -> float:
    """The size of the terms of a decay's gradient, which backends find as a difference: Σ |x dx| of q, k and v."""
    given, gradients = tensors(problem), exact(problem)
    return sum((given[x].double() * gradients[f"d{x}"]).abs().sum().item() for x in "qkv" if f"d{x}" in gradients)


@lru_cache(maxsize=4)
def nearby(problem: Problem) -> list[Tensors]:
    """Results of the reference in the dtype of its states, for inputs that differ in their last place."""
    generator = torch.Generator().manual_seed(0)
    dtype = state_dtype(problem.case.dtype)
    made = []
    for _ in range(4):
        given = in_double(tensors(problem))
        for name, x in given.items():
            if x.is_floating_point():
                given[name] = (x * (1 + torch.finfo(dtype).eps * torch.randn(x.shape, generator=generator))).to(dtype)
        made.append(results(problem, given, EXACT))
    return made


def step_deviations(found: Tensors, expected: Tensors) -> list[str]:
    """Results of 16 bits may be off by one rounding more than those of a whole sequence."""
    problems = []
    for name, want in expected.items():
        got = found[name]
        allowed = TOLERANCE[got.dtype] * (2 if got.dtype in (torch.bfloat16, torch.float16) else 1)
        if problem := excess(relative_error(got, want), allowed):
            problems.append(f"{name}: {problem}")
    return problems
