"""A failure made small: one thing after the other is made simpler, as long as it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from fulmen.lab.fuzz.problem import Problem, Setting, changed, parts

Fails = Callable[[Problem, Setting], bool]
KEPT = ("operator", "case", "backend", "isa")


def shrink(problem: Problem, setting: Setting, fails: Fails, seconds: float = 20.0) -> tuple[Problem, Setting]:
    """Greedy: the simplest failing problem and setting that ``seconds`` suffice to find."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in simpler(problem, setting):
            if time.monotonic() > end:
                break
            if fails(*candidate):
                (problem, setting), progress = candidate, True
                break
    return problem, setting


def simpler(problem: Problem, setting: Setting) -> Iterator[tuple[Problem, Setting]]:
    """What is plainest comes first."""
    for name, value in simpler_parts(setting):
        yield problem, changed(setting, name, value)
    for name, value in simpler_parts(problem):
        yield changed(problem, name, value), setting
    for name, value in simpler_parts(problem.case):
        yield changed(problem, "case", changed(problem.case, name, value)), setting


def simpler_parts(x: Any) -> Iterator[tuple[str, Any]]:
    for name, value, default in parts(x):
        if name not in KEPT:
            yield from ((name, other) for other in simpler_values(value, default) if other != value)


def simpler_values(value: Any, default: Any) -> Iterator[Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (n for n in (1, 2, value // 2, value - 16, value - 1) if 0 < n < value)
    elif isinstance(value, tuple) and value and isinstance(value[0], int):
        if default is None:  # lengths of packed sequences
            yield None
            yield from (value[:i] + value[i + 1 :] for i in range(len(value)) if len(value) > 1)
        else:
            yield (1,) * len(value)
        yield from ((*value[:i], n // 2, *value[i + 1 :]) for i, n in enumerate(value) if n > 1)
    else:
        yield default
