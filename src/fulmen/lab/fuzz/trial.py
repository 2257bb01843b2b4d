"""One problem in one setting, and what is wrong with its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fulmen.lab.fuzz.operators import SUBJECTS, Tensors
from fulmen.lab.fuzz.problem import Problem, Setting
from fulmen.lab.fuzz.views import AXES, viewed, written_around
from fulmen.lab.operators.tpa.checks import deviations_of as decode_deviations
from fulmen.lab.tolerances import (
    ATTENTION,
    DELTA_RULE,
    OVER_NEARBY,
    STATES,
    TOLERANCE,
    deviations,
    excess,
    heads_of,
    of_one_dtype,
)
from fulmen.lab.yardstick import rounded_products
from fulmen.runtime.core import core
from fulmen.runtime.tensors import state_dtype

EXACT = Setting("reference")
FEW = 64  # numbers of a head
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
        if written_around(given[name], memory[name]):
            problems.append(f"what lies around {name} was written to")
    return problems


def bits(x: Tensor) -> Tensor:
    """NaN is equal to itself."""
    return x.nan_to_num(nan=12345.0) if x.is_floating_point() else x


def judged(problem: Problem, found: Tensors, backend: str) -> list[str]:
    # What is beyond the largest number of float16 is infinite there.
    expected = {name: in_range(exact(problem)[name], x.dtype) for name, x in found.items()}
    found = {name: in_range(x, x.dtype) for name, x in found.items()}
    others = partial(nearby, problem)
    if problem.operator.endswith("_step"):
        return step_deviations(found, expected, others)
    if problem.operator == "tpa_decode":
        return decode_deviations(found["output"], expected["output"], backend, tensors(problem), others)
    return deviations(
        found,
        expected,
        backend,
        yardstick=partial(yardstick, problem) if SUBJECTS[problem.operator].rounds else None,
        bounds=DELTA_RULE if problem.operator == "delta_rule" else ATTENTION,
        inputs=problem.case.dtype,
        nearby=others,
    )


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
def nearby(problem: Problem) -> list[Tensors]:
    """Results that are as good as can be, as among thousands of calls there are some of few numbers whose terms cancel,
    by chance, to next to nothing: the reference's in the dtype of its states, also for inputs that differ in the last
    place; and exact ones that are off by what luck cannot be relied on to prevent."""
    generator = torch.Generator().manual_seed(0)
    dtype = state_dtype(problem.case.dtype)
    made = [unlucky(problem)]
    for eps in (0.0, *[torch.finfo(dtype).eps] * 4):
        given = in_double(tensors(problem))
        for name, x in given.items():
            if x.is_floating_point():
                given[name] = (x * (1 + eps * torch.randn(x.shape, generator=generator))).to(dtype)
        made.append(results(problem, given, EXACT))
    return made


def unlucky(problem: Problem) -> Tensors:
    """Exact, but for roundings that agree: those of equal tokens in a sum, half a unit in the last place each; of
    bfloat16 inputs those of the factors, in a head of few numbers or of equal tokens, where the yardstick's may not
    agree. What is rounded to float16 has been rounded before. The gradient of a decay per head is a difference of sums,
    and has their error; so is what the delta rule leaves of the gradient of a state that its tokens erase."""
    dtype, equal, given = problem.case.dtype, problem.equal == "tokens", tensors(problem)
    rounds = SUBJECTS[problem.operator].rounds and dtype == torch.bfloat16
    rounded = of_rounded_inputs(problem) if rounds else {}
    tokens = max((x.shape[1] for x in given.values() if x.ndim == 4), default=0)
    found = {}
    for name, x in exact(problem).items():
        # The heads of tpa_decode are judged as one.
        numbers = x[0].numel() if problem.operator == "tpa_decode" else heads_of(name, x).shape[2]
        if name.startswith("dlog_decay"):
            found[name] = x + DIFFERENCE * terms(problem, len(x)) if x.ndim == 1 else x
        elif rounds and name not in STATES and (numbers < FEW or equal):
            found[name] = rounded[name]
        elif dtype == torch.float16:
            found[name] = x * (1 + (TOLERANCE[dtype] + TOLERANCE[torch.float32]) / OVER_NEARBY)
        else:
            found[name] = x * (1 + equal * tokens * torch.finfo(state_dtype(dtype)).eps / 2)
        if problem.operator == "delta_rule" and name == "dinitial_state":
            found[name] = found[name] + DIFFERENCE * given["grad_state"].abs().max()
    return found


def of_rounded_inputs(problem: Problem) -> Tensors:
    """The exact results where each input is off by a unit of bfloat16, of equal tokens by the same one."""
    generator, given = torch.Generator().manual_seed(0), in_double(tensors(problem))
    for name, x in given.items():
        if x.is_floating_point() and not name.startswith("log_decay"):
            shape = [1 if problem.equal == "tokens" and axis == 1 else n for axis, n in enumerate(x.shape)]
            sign = torch.randint(2, shape, generator=generator) * 2 - 1
            given[name] = x * (1 + sign * 2**-9)
    return results(problem, given, EXACT)


def terms(problem: Problem, heads: int) -> Tensor:
    """``[H]``, the size of the sums whose difference is a decay's gradient: Σ |x dx| of q, k and v."""
    given, gradients = tensors(problem), exact(problem)
    sums = ((given[x].double() * gradients[f"d{x}"]).abs().sum((0, 1, 3)) for x in "qkv" if x in given)
    return sum((x.repeat_interleave(heads // len(x)) for x in sums), torch.zeros(heads))
