"""One problem in one setting, and what is wrong with its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fulmen.lab.fuzz.operators import SUBJECTS, Tensors
from fulmen.lab.fuzz.problem import Problem, Setting, changed
from fulmen.lab.fuzz.views import AXES, viewed, written_around
from fulmen.lab.operators.tpa.checks import deviations_of as decode_deviations
from fulmen.lab.tolerances import (
    ATTENTION,
    DELTA_RULE,
    LARGE,
    OVER_NEARBY,
    STATES,
    TOLERANCE,
    Bounds,
    deviations,
    excess,
    heads_of,
    norm,
    of_one_dtype,
    spread,
)
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.delta_rule import reference as delta_rule
from fulmen.ops.delta_rule.problem import normalized
from fulmen.runtime.core import core
from fulmen.runtime.tensors import state_dtype

EXACT = Setting("reference")
FEW = 64  # numbers of a head
DRAWS = 4  # of inputs that are a little off
DIFFERENCE = 3e-7  # of the sums that are subtracted: five units in the last place of float32
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
    return scaled(found, problem.scales) if "v" in found and problem.scales else found


def scaled(given: Tensors, scales: tuple[float, ...]) -> Tensors:
    """With heads of v, ``[..., H, E]``, and of the states ``[B, H, D, E]`` that they are added to, multiplied by
    ``scales`` in turn."""
    heads = given["v"].shape[-2]
    of_v = torch.tensor([scales[i % len(scales)] for i in range(heads)])
    found = given | {"v": given["v"] * of_v[:, None].to(given["v"].dtype)}
    for name in given.keys() & {"initial_state", "state"}:
        of_state = of_v.repeat_interleave(given[name].shape[1] // heads)
        found[name] = given[name] * of_state[:, None, None].to(given[name].dtype)
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
def yardstick(problem: Problem, schedule: str = "auto") -> Tensors:
    """Results of bfloat16 inputs with rounded factors."""
    with rounded_products():
        return results(problem, tensors(problem), Setting("torch", schedule=schedule))


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
    right = found_right(problem, setting.backend)
    problems = [] if any(agrees(found, other) for other in right) else judged(problem, found, setting)
    if not problems:
        right.append(found)
    for name, x in tensors(problem).items():
        if name != "state" and not torch.equal(bits(given[name]), bits(x)):
            problems.append(f"{name} was written to")
        if written_around(given[name], memory[name]):
            problems.append(f"what lies around {name} was written to")
    return problems


@lru_cache(maxsize=4)
def found_right(problem: Problem, backend: str) -> list[Tensors]:
    """Results that need no second judgement: most settings give the same bits."""
    return []


def agrees(found: Tensors, other: Tensors) -> bool:
    return all(name in other and torch.equal(x, other[name]) for name, x in found.items())


def bits(x: Tensor) -> Tensor:
    """NaN is equal to itself."""
    return x.nan_to_num(nan=12345.0) if x.is_floating_point() else x


def judged(problem: Problem, found: Tensors, setting: Setting) -> list[str]:
    backend, subject = setting.backend, SUBJECTS[problem.operator]
    # What is beyond the largest number of float16 is infinite there.
    expected = {name: in_range(exact(problem)[name], x.dtype) for name, x in found.items()}
    found = {name: in_range(x, x.dtype) for name, x in found.items()}
    others = partial(nearby, problem, backend)
    if problem.operator.endswith("_step"):
        return step_deviations(found, expected, others)
    if problem.operator == "tpa_decode":
        return decode_deviations(found["output"], expected["output"], backend, tensors(problem), others)
    return deviations(
        found,
        expected,
        backend,
        yardstick=partial(yardstick, problem, setting.schedule if subject.keeps else "auto")
        if subject.rounds
        else None,
        bounds=bounds_of(problem),
        inputs=problem.case.dtype,
        nearby=others,
    )


def bounds_of(problem: Problem) -> Bounds:
    return DELTA_RULE if problem.operator == "delta_rule" else ATTENTION


def in_range(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest) if dtype == torch.float16 else x


def step_deviations(found: Tensors, expected: Tensors, nearby: Callable[[], list[Tensors]]) -> list[str]:
    """Results of 16 bits may be off by one rounding more than those of a whole sequence."""
    problems = []
    for name, want in expected.items():
        measure = of_one_dtype(name, want, found[name].dtype)
        if found[name].dtype.itemsize == 2:
            measure = measure._replace(allowed=2 * measure.allowed)
        if want.numel() and (problem := excess(name, found[name], measure, nearby)):
            problems.append(f"{name}: {problem}")
    return problems


@lru_cache(maxsize=4)
def nearby(problem: Problem, backend: str) -> list[Tensors]:
    """Results that are as good as can be, as among thousands of calls there are some of few numbers whose terms cancel,
    by chance, to next to nothing: the reference's in the dtype of its states, also for inputs that differ in the last
    place; and exact ones that are off by what luck cannot be relied on to prevent."""
    generator = torch.Generator().manual_seed(0)
    dtype = state_dtype(problem.case.dtype)
    made = [unlucky(problem, backend)]
    for eps in (0.0, *[torch.finfo(dtype).eps] * DRAWS):
        given = in_double(tensors(problem))
        for name, x in given.items():
            if x.is_floating_point():
                given[name] = (x * (1 + eps * torch.randn(x.shape, generator=generator, dtype=torch.float64))).to(dtype)
        made.append(results(problem, given, EXACT))
    return made


def unlucky(problem: Problem, backend: str) -> Tensors:
    """Exact, but for roundings that agree: those of equal tokens in a sum, half a unit in the last place each; those of
    factors, in a head of few numbers or of equal tokens, where the yardstick's may not agree, and in the gradient of a
    decay, whose terms cancel. What is rounded to float16 has been rounded before. Differences have the error of what
    they are differences of: the gradient of a decay per head, and of the delta rule what its tokens leave of the
    gradient of a state that they erase, and what is left of the gradients of rows that it makes 1 long."""
    dtype, equal, given = problem.case.dtype, problem.equal == "tokens", tensors(problem)
    tokens = max((x.shape[1] for x in given.values() if x.ndim == 4), default=0)
    of_tokens = equal * tokens * torch.finfo(state_dtype(dtype)).eps / 2
    of_result = (TOLERANCE[dtype] + TOLERANCE[torch.float32]) / OVER_NEARBY if dtype == torch.float16 else 0.0
    found = {}
    for name, x in exact(problem).items():
        decay, off = name.startswith("dlog_decay"), torch.zeros_like(x)
        if terms := factor_terms(problem, backend, decay):
            off += off_by_factors(problem, terms)[name] * (decay or equal or magnified(problem, name, terms))
        if not decay:
            off += max(of_result, of_tokens) * x.abs()
        elif x.ndim == 1:
            off += DIFFERENCE * summands(problem, len(x))
        if problem.operator == "delta_rule" and name == "dinitial_state":
            off += DIFFERENCE * given["grad_state"].abs().max()
        if problem.operator == "delta_rule" and problem.case.normalizes and name in ("dq", "dk"):
            off += DIFFERENCE * of_unit_rows(problem)[name]
        found[name] = x + off.copysign(x)
    return found


def factor_terms(problem: Problem, backend: str, decay: bool) -> int:
    """Of how many bfloat16 terms a factor of a product may consist (docs/precision.md); 0: it is float32."""
    dtype = problem.case.dtype
    if not SUBJECTS[problem.operator].rounds or dtype.itemsize > 2:
        return 0
    if dtype == torch.bfloat16 and not decay:
        return 1
    return 2 if backend == "triton" else 0


def magnified(problem: Problem, name: str, terms: int) -> Tensor:
    """Whether a head is of few numbers, or magnifies what is off in its factors: where the yardstick misses its bound
    by far, its error is that of few numbers, too. In a shape that the result can be multiplied with."""
    want = exact(problem)[name]
    if problem.operator == "tpa_decode":  # its heads are judged as one
        return torch.tensor(want[0].numel() < FEW)
    few = heads_of(name, want).shape[2] < FEW
    if few or terms > 1:
        return torch.tensor(few)
    bound = bounds_of(problem).state if name in STATES else LARGE
    return spread(name, norm(name, want)(yardstick(problem)[name]) > 2 * bound.norm, want)


@lru_cache(maxsize=4)
def off_by_factors(problem: Problem, terms: int) -> Tensors:
    """How far exact results are off where each factor is, by a unit of so many bfloat16 terms: inputs, of equal tokens
    by the same, and what the delta rule reads and corrects, which is more than its inputs where it erases. The most of
    a few draws: in one of few numbers signs may cancel."""
    want, most = exact(problem), Tensors()
    rounded = Rounding(2.0 ** -(8 * terms + 1))
    for _ in range(DRAWS):
        given = in_double(tensors(problem))
        for name, x in given.items():
            if x.is_floating_point() and not name.startswith("log_decay"):
                given[name] = rounded(x, alike=1 if problem.equal == "tokens" else None)
        with patch.object(delta_rule, "correction", rounded.correction):
            found = {name: (x - want[name]).abs() for name, x in results(problem, given, EXACT).items()}
        most = {name: torch.maximum(x, most.get(name, x)) for name, x in found.items()}
    return most


class Rounding:
    """Puts numbers off by ``unit`` of themselves, in either direction."""

    def __init__(self, unit: float) -> None:
        self._unit, self._generator = unit, torch.Generator().manual_seed(0)
        self._correction = delta_rule.correction

    def __call__(self, x: Tensor, alike: int | None = None) -> Tensor:
        shape = [1 if axis == alike else n for axis, n in enumerate(x.shape)]
        return x * (1 + self._unit * (torch.randint(2, shape, generator=self._generator) * 2 - 1))

    def correction(self, state: Tensor, x: delta_rule.Operands, t: int) -> Tensor:
        return self(self._correction(self(state), x, t))


def of_unit_rows(problem: Problem) -> Tensors:
    """The largest number of each row of dq and dk, of the delta rule, before the part along q and k is taken away: of
    the gradients of rows that are 1 long, over the lengths that they had. Of one channel next to nothing is left."""
    given, reciprocals = in_double(tensors(problem)), {}
    for name in ("q", "k"):
        given[name], reciprocals[f"d{name}"] = normalized(given[name])
    plain = changed(problem, "case", changed(problem.case, "normalizes", False))
    found = results(plain, given, EXACT)
    return {name: x * found[name].abs().amax(-1, keepdim=True) for name, x in reciprocals.items()}


def summands(problem: Problem, heads: int) -> Tensor:
    """``[H]``, the size of the sums whose difference is a decay's gradient: Σ |x dx| of q, k and v."""
    given, gradients = tensors(problem), exact(problem)
    sums = ((given[x].double() * gradients[f"d{x}"]).abs().sum((0, 1, 3)) for x in "qkv" if x in given)
    return sum((x.repeat_interleave(heads // len(x)) for x in sums), torch.zeros(heads))
