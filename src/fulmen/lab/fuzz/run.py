"""The run of `fulmen fuzz`: problem after problem until the time is up, with a record to go on from.

Problem number i of a seed is always the same one, so that a record is a number, counts and findings: lines of JSON.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

import fulmen
from fulmen.lab.fuzz.draw import ALL, INTERPRETED, draw_problem, draw_setting, possible
from fulmen.lab.fuzz.operators import SUBJECTS
from fulmen.lab.fuzz.problem import Problem, Setting, snippet
from fulmen.lab.fuzz.shrink import shrink
from fulmen.lab.fuzz.trial import wrong
from fulmen.lab.progress import Line
from fulmen.runtime.architectures import interpreted
from fulmen.runtime.core import core
from fulmen.runtime.operators import backends_of

TIMES = {"native": 2, "torch": 2, "triton": 1}  # settings of each build in which a problem is tried


class Plan(NamedTuple):
    """What a run draws from. A record is gone on with by the same plan alone."""

    seed: int
    operators: list[str]
    backends: list[str]


class Progress:
    """What has been tried, and what was found."""

    def __init__(self, plan: Plan, file: Path | None) -> None:
        self.problems, self.findings = 0, 0
        self.cases: Counter[str] = Counter()
        self._file = file
        if file is not None and file.exists():
            self._go_on(plan, file)
        elif file is not None:
            self._write(plan._asdict())

    def _go_on(self, plan: Plan, file: Path) -> None:
        try:
            first, *others = [json.loads(line) for line in file.read_text().splitlines()]
            if first != plan._asdict():
                raise RuntimeError(f"{file} is the record of another run, {json.dumps(first)}; pass its options")
            for record in others:
                if "finding" in record:
                    self.findings += 1
                else:
                    self.problems, self.cases = record["problems"], Counter(record["cases"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RuntimeError(f"{file} is not a record of `fulmen fuzz`") from None

    def found(self, problem: Problem, setting: Setting, problems: list[str]) -> None:
        self.findings += 1
        self._write({"finding": problems, "index": self.problems, "snippet": snippet(problem, setting)})

    def save(self) -> None:
        self._write({"problems": self.problems, "cases": dict(self.cases)})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")


def available() -> list[str]:
    """Backends that can be fuzzed in this process, on the CPU. Where Triton's interpreter runs, its kernels alone."""
    names = ("triton",) if interpreted() else ("native", "torch")
    return [name for name in names if not fulmen.backends()[name].refuses("cpu", torch.float32)]


def serves(operator: str, backends: list[str]) -> bool:
    """Whether one of ``backends`` has the operator."""
    return any(name in backends_of(SUBJECTS[operator].folder) for name in backends)


def settings(random: Random, problem: Problem, backends: list[str]) -> Iterator[Setting]:
    for backend in backends:
        if problem.case.dtype not in fulmen.backends()[backend].dtypes:
            continue
        if backend not in backends_of(SUBJECTS[problem.operator].folder):
            continue
        builds = core.builds if backend == "native" and core is not None else [""]
        for isa in builds:
            for _ in range(TIMES[backend]):
                yield draw_setting(random, problem, backend, isa)


def names(problems: list[str]) -> str:
    """Of the results that are wrong."""
    return " ".join(problem.partition(":")[0] for problem in problems)


def fails(what: str, problem: Problem, setting: Setting) -> bool:
    return possible(problem) and what in names(wrong(problem, setting))


def fuzz(plan: Plan, seconds: float, file: Path | None) -> Progress:
    """Try problems for ``seconds``, print what fails."""
    progress, line = Progress(plan, file), Line(seconds)
    end, saved = time.monotonic() + seconds, time.monotonic()
    most = INTERPRETED if "triton" in plan.backends else ALL
    known: set[object] = set()  # kinds of failures that have been made small
    while time.monotonic() < end:
        random = Random(f"{plan.seed} {progress.problems}")
        drawn = draw_problem(random, plan.operators, most)
        for setting in settings(random, drawn, plan.backends):
            problem = drawn
            problems = wrong(problem, setting)
            progress.cases[" ".join(filter(None, (problem.operator, setting.backend, setting.isa)))] += 1
            if problems:
                what = names(problems)
                kind = problem.operator, setting.backend, problem.case.dtype, what
                if kind not in known:
                    known.add(kind)
                    problem, setting = shrink(problem, setting, partial(fails, what))
                    problems = wrong(problem, setting)
                    line.clear()
                    print(f"{'; '.join(problems)}\n{snippet(problem, setting)}\n", flush=True)
                progress.found(problem, setting, problems)
        progress.problems += 1
        line.done = seconds - (end - time.monotonic())
        line.show(f"{progress.problems} problems, {progress.cases.total()} cases, {progress.findings} found")
        if time.monotonic() - saved > 5:
            progress.save()
            saved = time.monotonic()
    line.clear()
    progress.save()
    return progress
