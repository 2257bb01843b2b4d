"""How far a result may be from the float64 specification: stated once, for the tests and for `fulmen verify`.

Each head of each sample is judged by itself. float32 and float16 results are held to their largest error. From bfloat16
inputs, factors of products may be bfloat16 too (docs/precision.md), and results are held to the norm of their error and
to their largest error:

- Where a sum has many terms (64 tokens, 16 channels) that do not cancel, to ``LARGE``.
- Elsewhere, to ``OVER_YARDSTICK`` times the error of a yardstick if that is more: our own torch formulas with the
  factors of every product rounded to bfloat16 (:mod:`fulmen.lab.yardstick`). Terms cancel where the yardstick misses
  ``LARGE`` itself. (Of few numbers, either error may be small by luck.)
- States are float32, and held to ``STATE``; only their norm, and to the yardstick where it misses that.
- The delta rule is held to the yardstick everywhere, and its states to more than ``STATE``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The largest error allowed, relative to the largest magnitude of the exact head. For 16-bit types it is half a unit
# in the last place of a result, no more; for float32 it is what e^-90 costs (its exponent is known to 90 · 6e-8).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Backends that carry what crosses a chunk from boundary to boundary subtract once for each chunk, and get looser limits
# for the gradient of a decay in float32: for [H], one number for all tokens of all samples whose terms are of either
# sign, and where the decay leaves less than SMALLEST of its terms, which are of order 1 before it weighs them. Of [H]
# each head is measured by itself, where its terms do not cancel to less than SMALLEST_HEAD of the largest head's (with
# other backends, by the largest head: the recurrence itself, in float32, is no better).
SUBTRACT = ("native", "triton")
TOLERANCE_PER_HEAD = 1e-4
SMALLEST_DECAY_GRADIENT = 1e-2
SMALLEST_HEAD = 0.1


class Error(NamedTuple):
    """The most that one may be, relative to the norm and to the largest magnitude of the exact head."""

    norm: float
    largest: float


class Bounds(NamedTuple):
    """Of an operator."""

    state: Error
    fixed: bool  # whether ``LARGE`` holds where terms are many, whatever the yardstick


LARGE = Error(norm=3.3e-3, largest=2**-7)  # the norm is twice what rounding the exact result makes of it
STATE = Error(norm=2e-3, largest=torch.inf)
ATTENTION = Bounds(STATE, fixed=True)
DELTA_RULE = Bounds(Error(norm=5e-3, largest=torch.inf), fixed=False)  # a token corrects what others' errors left
STATES = ("state", "states")
OVER_YARDSTICK = 1.5
OVER_NEARBY = 3.0
DECAY_GRADIENT_NORM = 1e-4  # from 16-bit inputs
MANY_TOKENS, MANY_CHANNELS = 64, 16

Results = dict[str, Tensor]


def relative_error(got: Tensor, want: Tensor, smallest: float = 1e-30) -> float:
    """The largest error over the largest magnitude, or over ``smallest`` where that is larger. Below 1e-30 (what is
    left of a state after e^-90 a few times over) float32 runs out of digits, and float16 below its smallest normal
    number. NaN if there is one anywhere."""
    if got.dtype == torch.float16:
        smallest = max(smallest, torch.finfo(torch.float16).tiny)
    if got.shape != want.shape:
        raise ValueError(f"the result has shape {list(got.shape)}, expected {list(want.shape)}")
    if want.numel() == 0:
        return 0.0
    got, want = got.cpu().double(), want.cpu()
    return (got - want).abs().max().item() / max(want.abs().max().item(), smallest)


def heads_of(name: str, x: Tensor) -> Tensor:
    """``[B, H, numbers]`` of a result; what has no heads is one."""
    x = x.cpu().double()
    if name.startswith("dlog_decay") and x.ndim == 1:
        return x[None, :, None]
    if x.ndim >= 4 or name in ("dbeta", "dlog_decay"):
        return x.transpose(1, 1 if "state" in name else 2).flatten(2)
    return x.reshape(1, 1, -1)


def spread(name: str, values: Tensor, x: Tensor) -> Tensor:
    """``values``, ``[B, H]`` as :func:`heads_of` has them, such that they can be multiplied with the result ``x``."""
    if name.startswith("dlog_decay") and x.ndim == 1:
        return values[0]
    if x.ndim >= 4 or name in ("dbeta", "dlog_decay"):
        rest = [1] * (x.ndim - 2)
        return values.reshape(*values.shape, *rest).transpose(1, 1 if "state" in name else 2)
    return values.reshape([1] * x.ndim)


class Measure(NamedTuple):
    """How far off a result is, and may be: one number for each head of each sample, ``[B, H]``."""

    what: str
    error: Callable[[Tensor], Tensor]
    allowed: Any


def norm(name: str, want: Tensor, smallest: float = 1e-30) -> Callable[[Tensor], Tensor]:
    """Measures the norm of the error, relative to that of the exact head or to ``smallest`` where that is larger."""
    exact = heads_of(name, want)
    return lambda got: (heads_of(name, got) - exact).norm(dim=2) / exact.norm(dim=2).clamp(min=smallest)


def largest(name: str, want: Tensor, smallest: float = 1e-30) -> Callable[[Tensor], Tensor]:
    """Measures the largest error, relative to the largest magnitude."""
    exact = heads_of(name, want)
    return lambda got: (heads_of(name, got) - exact).abs().amax(2) / exact.abs().amax(2).clamp(min=smallest)


def deviations(
    results: Results,
    expected: Results,
    backend: str,
    yardstick: Callable[[], Results] | None = None,
    bounds: Bounds = ATTENTION,
    inputs: torch.dtype | None = None,
    nearby: Callable[[], Sequence[Results]] = tuple,
) -> list[str]:
    """What is wrong with the results of ``backend``, by name: one sentence each, empty if all are close enough.

    Args:
        yardstick: gives the same results of rounded factors, and is only called if it matters.
        inputs: the dtype of q, k and v; None: the narrowest of the results'.
        nearby: gives results that are as good as can be where terms cancel (:func:`excess`); called if it matters.
    """
    found = []
    inputs = inputs or min((x.dtype for x in results.values()), key=lambda dtype: dtype.itemsize)
    for name, want in expected.items():
        got, of_decay = results[name], name.startswith("dlog_decay")
        if got.shape != want.shape:
            found.append(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
        elif not torch.isfinite(got).all():
            found.append(f"{name}: not finite")
        elif want.numel() > 0:
            if of_decay and got.dtype == torch.float32:
                measures = [of_decay_gradient(name, want, backend, inputs)]
            elif inputs == torch.bfloat16 and yardstick is not None and not of_decay:
                measures = of_rounded_factors(name, got, expected, yardstick, bounds)
            else:
                smallest = SMALLEST_DECAY_GRADIENT if of_decay and got.dtype.itemsize < 4 else 1e-30
                measures = [of_one_dtype(name, want, got.dtype, smallest)]
            found += [f"{name}: {problem}" for measure in measures if (problem := excess(name, got, measure, nearby))]
    return found


def excess(name: str, got: Tensor, measure: Measure, nearby: Callable[[], Sequence[Results]] = tuple) -> str:
    """A sentence if ``got`` is further off than it may be. Where the terms of a head cancel, it may be ``OVER_NEARBY``
    times as far off, in the same measure, as the worst of the ``nearby`` results."""
    error = measure.error(got)
    allowed = torch.as_tensor(measure.allowed, dtype=error.dtype).expand_as(error)
    if not (error <= allowed).all():
        for other in nearby():
            allowed = torch.maximum(allowed, OVER_NEARBY * measure.error(other[name]))
    if (error <= allowed).all():
        return ""
    worst = (error / allowed).argmax()
    return f"{measure.what} off by {error.flatten()[worst]:.1e}, allowed {allowed.flatten()[worst]:.1e}".lstrip()


def of_one_dtype(name: str, want: Tensor, dtype: torch.dtype, smallest: float = 1e-30) -> Measure:
    """Of a result whose only rounding to speak of is that of its own dtype."""
    if dtype == torch.float16:
        smallest = max(smallest, torch.finfo(dtype).tiny)
    return Measure("", largest(name, want, smallest), TOLERANCE[dtype])


def of_decay_gradient(name: str, want: Tensor, backend: str, inputs: torch.dtype) -> Measure:
    """Of a gradient in float32."""
    per_head, most = want.ndim == 1, want.abs().max().item()
    smallest = max(SMALLEST_DECAY_GRADIENT, SMALLEST_HEAD * most * per_head)
    if inputs.itemsize < 4:
        return Measure("", norm(name, want, smallest), DECAY_GRADIENT_NORM)
    if backend in SUBTRACT:
        tolerance = TOLERANCE_PER_HEAD if per_head else TOLERANCE[torch.float32]
        return Measure("", largest(name, want, smallest), tolerance)
    return Measure("", largest(name, want, max(1e-30, most * per_head)), TOLERANCE[torch.float32])


def of_rounded_factors(
    name: str, got: Tensor, expected: Results, yardstick: Callable[[], Results], of_operator: Bounds
) -> list[Measure]:
    """Of a result that is computed from bfloat16 inputs. The yardstick is left alone where a fixed bound is kept."""
    want = expected[name]
    bounds = of_operator.state if name in STATES else LARGE
    fixed = name in STATES or (of_operator.fixed and has_many_terms(expected))
    made = []
    for what, error, bound in zip(Error._fields, (norm(name, want), largest(name, want)), bounds, strict=True):
        allowed: Any = bound
        if not (fixed and (error(got) <= bound).all()):
            y = error(yardstick()[name])
            over = OVER_YARDSTICK * torch.maximum(y, error(want.to(got.dtype)))  # only luck is better than rounding
            allowed = torch.where(y <= bound, bound, over) if fixed else over.clamp(min=bound)
        made.append(Measure(what, error, allowed))
    return made


def has_many_terms(expected: Results) -> bool:
    """Whether all that is ``[B, N, H, size]`` has many tokens and channels."""
    rows = [x for name, x in expected.items() if x.ndim == 4 and "state" not in name and "log_decay" not in name]
    return all(x.shape[1] >= MANY_TOKENS and x.shape[3] >= MANY_CHANNELS for x in rows)
