"""How far a result may be from the float64 specification: stated once, for the tests and for `fulmen verify`.

float32 and float16 results are held to their largest error. From bfloat16 inputs, factors of products may be bfloat16
too (docs/precision.md), and each head of each sample is held to the norm of its error and to its largest error:

- Where a sum has many terms (64 tokens, 16 channels) that do not cancel, to ``LARGE``.
- Elsewhere, to ``OVER_YARDSTICK`` times the error of a yardstick if that is more: our own torch formulas with the
  factors of every product rounded to bfloat16 (:mod:`fulmen.lab.yardstick`). Terms cancel where the yardstick misses
  ``LARGE`` itself. (Of few numbers, either error may be small by luck.)
- States are float32, and held to ``STATE``; only their norm, and to the yardstick where it misses that.
- The delta rule is held to the yardstick everywhere, and its states to more than ``STATE``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The largest error allowed, relative to the largest magnitude of the exact tensor. For 16-bit types it is half a unit
# in the last place of a result, no more; for float32 it is what e^-90 costs (its exponent is known to 90 · 6e-8).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Backends that carry what crosses a chunk from boundary to boundary subtract once for each chunk, and get looser limits
# for the gradient of a decay in float32: for [H], one number for all tokens of all samples whose terms are of either
# sign, and where the decay leaves less than SMALLEST of its terms, which are of order 1 before it weighs them. Of [H]
# each head is measured by itself, where its terms do not cancel to less than SMALLEST_HEAD of the largest head's.
SUBTRACT = ("native", "triton")
TOLERANCE_PER_HEAD = 1e-4
SMALLEST_DECAY_GRADIENT = 1e-2
SMALLEST_HEAD = 0.1


class Error(NamedTuple):
    """Of heads, or the most that it may be: relative to the norm and to the largest magnitude of the exact head."""

    norm: Any  # Tensor [B, H], or a number
    largest: Any


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


def error_of_heads(got: Tensor, want: Tensor, tokens_first: bool) -> Error:
    """``[B, H]`` each, of tensors ``[B, N, H, ...]`` (``tokens_first``) or ``[B, H, ...]``."""
    off, exact = (x.transpose(1, 2 if tokens_first else 1).flatten(2) for x in (got.cpu().double() - want, want))
    return Error(
        off.norm(dim=2) / exact.norm(dim=2).clamp(min=1e-30),
        off.abs().amax(2) / exact.abs().amax(2).clamp(min=1e-30),
    )


def deviations(
    results: Results,
    expected: Results,
    backend: str,
    yardstick: Callable[[], Results] | None = None,
    bounds: Bounds = ATTENTION,
) -> list[str]:
    """What is wrong with the results of ``backend``, by name: one sentence each, empty if all are close enough.

    ``yardstick`` gives the same results of rounded factors, and is only called if it matters.
    """
    found = []
    inputs = {x.dtype for x in results.values()} & {torch.bfloat16, torch.float16}
    for name, want in expected.items():
        got = results[name]
        of_decay = name.startswith("dlog_decay")
        if got.shape != want.shape:
            problem = f"shape {list(got.shape)}, expected {list(want.shape)}"
        elif not torch.isfinite(got).all():
            problem = "not finite"
        elif of_decay and got.dtype == torch.float32 and inputs:
            off = (got.cpu().double() - want).norm() / want.norm().clamp(min=SMALLEST_DECAY_GRADIENT)
            problem = excess(off.item(), DECAY_GRADIENT_NORM)
        elif torch.bfloat16 in inputs and yardstick is not None and not of_decay:
            problem = excess_of_heads(name, got, expected, yardstick, bounds)
        else:
            error, tolerance = relative_error(got, want), TOLERANCE[got.dtype]
            if of_decay and got.dtype == torch.float32 and backend in SUBTRACT:
                smallest = SMALLEST_DECAY_GRADIENT
                error = relative_error(got, want, smallest)
                if want.ndim == 1:
                    smallest = max(smallest, SMALLEST_HEAD * want.abs().max().item())
                    error = max(relative_error(*head, smallest) for head in zip(got, want, strict=True))
                    tolerance = TOLERANCE_PER_HEAD
            problem = excess(error, tolerance)
        if problem:
            found.append(f"{name}: {problem}")
    return found


def excess(error: float, allowed: float) -> str:
    return "" if error <= allowed else f"off by {error:.1e}, allowed {allowed:.1e}"


def excess_of_heads(
    name: str, got: Tensor, expected: Results, yardstick: Callable[[], Results], of_operator: Bounds
) -> str:
    """Of a result that is computed from bfloat16 inputs."""
    want = expected[name]
    if want.numel() == 0:
        return ""
    tokens_first = "state" not in name
    bounds = of_operator.state if name in STATES else LARGE
    fixed = name in STATES or (of_operator.fixed and has_many_terms(expected))
    error = error_of_heads(got, want, tokens_first)
    if fixed and all((e <= bound).all() for e, bound in zip(error, bounds, strict=True)):
        return ""
    of_yardstick = error_of_heads(yardstick()[name], want, tokens_first)
    of_rounding = error_of_heads(want.to(got.dtype), want, tokens_first)  # only luck makes the yardstick better than it
    for what, e, y, r, bound in zip(Error._fields, error, of_yardstick, of_rounding, bounds, strict=True):
        over_yardstick = OVER_YARDSTICK * torch.maximum(y, r)
        allowed = torch.where(y <= bound, bound, over_yardstick) if fixed else over_yardstick.clamp(min=bound)
        if not (e <= allowed).all():
            worst = (e / allowed).argmax()
            return f"{what} {excess(e.flatten()[worst].item(), allowed.flatten()[worst].item())}"
    return ""


def has_many_terms(expected: Results) -> bool:
    """Whether all that is ``[B, N, H, size]`` has many tokens and channels."""
    rows = [x for name, x in expected.items() if x.ndim == 4 and "state" not in name and "log_decay" not in name]
    return all(x.shape[1] >= MANY_TOKENS and x.shape[3] >= MANY_CHANNELS for x in rows)
