"""The run of `fulmen fuzz`: problem after problem until the time is up, with a record to go on from.

Problem number i of a seed is always the same one, so that a record is a number, counts and findings. It is replaced as
a whole every few seconds: what a killed run did after that is done again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

import fulmen
from fulmen.lab.files import write_json
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
    """What a run draws from. A record is continued by the same plan alone."""

    seed: int
    operators: list[str]
    backends: list[str]


class Record:
    """What has been tried, and what was found: ``index`` of the problem, what is ``wrong``, and a ``snippet``."""

    def __init__(self, plan: Plan, file: Path | None) -> None:
        self.problems, self.findings = 0, list[dict[str, Any]]()
        self.cases: Counter[str] = Counter()
        self._plan, self._file = plan._asdict(), file
        if file is not None and file.exists():
            self._go_on(file)
        self.save()

    def _go_on(self, file: Path) -> None:
        try:
            record = json.loads(file.read_text())
            if record["plan"] != self._plan:
                plan = json.dumps(record["plan"])
                raise RuntimeError(f"{file} is the record of another run, {plan}; pass its options")
            self.problems, self.cases = int(record["problems"]), Counter(record["cases"])
            self.findings = [finding for finding in record["findings"] if int(finding["index"]) >= 0]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RuntimeError(f"{file} is not a record of `fulmen fuzz`") from None

    def add(self, index: int, cases: Counter[str], findings: list[dict[str, Any]]) -> None:
        """What came of a problem; if it has been tried before, in place of what came of it then."""
        self.findings = [finding for finding in self.findings if finding["index"] != index] + findings
        if index == self.problems:
            self.problems += 1
            self.cases += cases

    def save(self) -> None:
        if self._file is not None:
            found = {"problems": self.problems, "cases": self.cases, "findings": self.findings}
            write_json(self._file, {"plan": self._plan} | found)


def available() -> list[str]:
    """Backends that can be fuzzed in this process, on the CPU. Where Triton's interpreter runs, its kernels alone."""
    names = ("triton",) if interpreted() else ("native", "torch")
    return [name for name in names if not fulmen.backends()[name].refuses("cpu", torch.float32)]


def serves(operator: str, backends: list[str]) -> bool:
    """Whether one of ``backends`` has the operator."""
    return any(name in backends_of(SUBJECTS[operator].folder) for name in backends)


def draw(plan: Plan, index: int) -> Iterator[tuple[Problem, Setting]]:
    """Problem number ``index``, in the settings in which it is tried."""
    random = Random(f"{plan.seed} {index}")
    problem = draw_problem(random, plan.operators, INTERPRETED if "triton" in plan.backends else ALL)
    for backend in plan.backends:
        if problem.case.dtype not in fulmen.backends()[backend].dtypes:
            continue
        if backend not in backends_of(SUBJECTS[problem.operator].folder):
            continue
        builds = core.builds if backend == "native" and core is not None else [""]
        for isa in builds:
            for _ in range(TIMES[backend]):
                yield problem, draw_setting(random, problem, backend, isa)


def names(problems: list[str]) -> str:
    """Of the results that are wrong."""
    return " ".join(problem.partition(":")[0] for problem in problems)


def fails(what: str, problem: Problem, setting: Setting) -> bool:
    return possible(problem) and what in names(wrong(problem, setting))


def fuzz(plan: Plan, seconds: float, file: Path | None) -> Record:
    """Try problems for ``seconds``, print what fails. What failed in an earlier run of the record comes first."""
    record, line = Record(plan, file), Line(seconds)
    end, saved = time.monotonic() + seconds, time.monotonic()
    known: set[object] = set()  # kinds of failures that have been made small
    failed = sorted({finding["index"] for finding in record.findings})
    for index in chain(failed, count(record.problems)):
        if time.monotonic() >= end:
            break
        cases, findings = Counter[str](), []
        for problem, setting in draw(plan, index):
            cases[" ".join(filter(None, (problem.operator, setting.backend, setting.isa)))] += 1
            if problems := wrong(problem, setting):
                what = names(problems)
                kind = problem.operator, setting.backend, problem.case.dtype, what
                if kind not in known:
                    known.add(kind)
                    problem, setting = shrink(problem, setting, partial(fails, what))
                    problems = wrong(problem, setting)
                    line.clear()
                    print(f"{'; '.join(problems)}\n{snippet(problem, setting)}\n", flush=True)
                findings.append({"index": index, "wrong": problems, "snippet": snippet(problem, setting)})
        record.add(index, cases, findings)
        line.done = seconds - (end - time.monotonic())
        line.show(f"{record.problems} problems, {record.cases.total()} cases, {len(record.findings)} found")
        if findings or time.monotonic() - saved > 5:
            record.save()
            saved = time.monotonic()
    line.clear()
    record.save()
    return record
