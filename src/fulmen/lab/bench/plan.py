"""What a run will measure: options, the groups of cells that are measured together, and the share of time each gets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fulmen.lab.arguments import unknown
from fulmen.lab.bench import suites
from fulmen.lab.bench.correctness import LENGTH
from fulmen.lab.bench.results import Table
from fulmen.lab.bench.suite import Column, Preset, Sizes, Suite

METRICS, MODES = ("speed", "memory"), ("fwd", "bwd")


class Pace(NamedTuple):
    """How long to measure. The whole plan is gone through several times, so that a cell is not of one moment alone."""

    seconds: float  # for all columns at one length, in one mode and sitting
    repeats: int  # at least, for each
    sittings: int  # at most: cells that are settled need no more
    budget: float | None  # for the whole run


PACES = {"published": Pace(3.5, 3, 3, None), "laptop": Pace(1.0, 3, 3, None), "quick": Pace(0.2, 2, 12, 270.0)}


@dataclass(frozen=True)
class Options:
    """What a user requested; None leaves a choice to the preset."""

    suites: tuple[str, ...]
    device: str
    dtype: str
    modes: tuple[str, ...] = MODES
    metrics: tuple[str, ...] = METRICS
    preset: str = "quick"
    batch: int | None = None
    heads: int | None = None
    dim: int | None = None
    rank: int | None = None
    lengths: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    sections: tuple[str, ...] | None = None
    budget: float | None = None
    threads: int | None = None
    freed_memory: str = "kept"  # for the next call, or "returned" to the system

    def __post_init__(self) -> None:
        columns = [column.name for suite in self._suites() for column in suite.columns]
        sections = [section for suite in self._suites() for section in suite.sections if section]
        for what, names, known in (("column", self.columns, columns), ("section", self.sections, sections)):
            for name in names or ():
                if name not in known:
                    raise ValueError(unknown(f"{what} {name!r} in {', '.join(self.suites)}", name, known))
        if not any(set(self.modes) & set(suite.modes) for suite in self._suites()):
            raise ValueError(f"{', '.join(self.suites)} has no {' or '.join(self.modes)}")
        if self.rank is not None and not any(suite.presets[self.preset].sizes[0].rank for suite in self._suites()):
            raise ValueError(f"--rank: {', '.join(self.suites)} has no rank")

    def _suites(self) -> list[Suite]:
        return [suites.find(name) for name in self.suites]

    @property
    def pace(self) -> Pace:
        pace = PACES[self.preset]
        return pace if self.budget is None else pace._replace(budget=self.budget)

    def as_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Options:
        """What :meth:`as_json` gave; ValueError where this version does not know it."""
        try:
            given: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in content.items()}
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"the run was begun by another version of fulmen: {error}") from error

    def preset_of(self, suite: Suite) -> Preset:
        """The suite's, with what the user wants otherwise."""
        preset = suite.presets[self.preset]
        changes = {name: value for name in ("batch", "heads", "dim") if (value := getattr(self, name)) is not None}
        if self.rank is not None and preset.sizes[0].rank is not None:
            changes["rank"] = self.rank
        sizes = tuple(dict.fromkeys(replace(sizes, **changes) for sizes in preset.sizes))
        sections = self.sections or preset.sections
        return Preset(sizes, self.lengths or preset.lengths, sections)


@dataclass(frozen=True)
class Part:
    """One section of a suite at some sizes: the tables that share their inputs and columns."""

    suite: Suite
    section: str
    sizes: Sizes
    columns: tuple[Column, ...]
    lengths: tuple[int, ...]
    modes: tuple[str, ...]
    metrics: tuple[str, ...]

    def tables(self, dtype: str, device: str) -> Iterator[Table]:
        config = {name: size for name, size in asdict(self.sizes).items() if size is not None}
        for mode in self.modes:
            for metric in self.metrics:
                only = self.suite.memory_columns if metric == "memory" else None
                columns = [column for column in self.columns if only is None or column.name in only]
                yield Table(
                    suite=self.suite.name,
                    title=self.suite.title(metric, mode, self.sizes, dtype),
                    section=self.section,
                    metric=metric,
                    mode=mode,
                    axis=self.suite.axis,
                    columns=[column.name for column in columns],
                    baseline=self.suite.baseline,
                    config=config | {"dtype": dtype, "device": device},
                    checked=f"{self.suite.axis} = {LENGTH}, {_sizes(self.suite.check_sizes(self.sizes))}",
                    owners={column.name: column.owned(device) for column in columns},
                )


def _sizes(sizes: Sizes) -> str:
    return ", ".join(f"{name} {size}" for name, size in asdict(sizes).items() if size is not None)


def plan(options: Options) -> list[Part]:
    parts = []
    for name in options.suites:
        suite = suites.find(name)
        preset = options.preset_of(suite)
        for sizes in preset.sizes:
            for section, columns in suite.sections.items():
                if preset.sections is not None and section not in preset.sections:
                    continue
                there = ("fwd",) if section in suite.forward_only else suite.modes
                modes = tuple(mode for mode in there if mode in options.modes)
                wanted = tuple(c for c in columns if options.columns is None or c.name in options.columns)
                if wanted and modes:
                    parts.append(Part(suite, section, sizes, wanted, preset.lengths, modes, options.metrics))
    return parts


class Budget:
    """Time is shared out as cells come: each length gets what is left, in proportion to its work. ``spent`` is what
    went before, on imports for instance."""

    def __init__(self, seconds: float | None, parts: list[Part], spent: float = 0.0) -> None:
        self._end = self._until = float("inf") if seconds is None else time.perf_counter() + seconds - spent
        self._ahead = [self.work(part, n) for part in parts for n in part.lengths]

    @staticmethod
    def work(part: Part, n: int) -> float:
        """In units of its own; short lengths cost their repeats, whatever their length."""
        return len(part.columns) * len(part.modes) * (n + 2048)

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.perf_counter()

    def go_on(self, sittings: int, seconds: Iterable[float]) -> None:
        """The first sitting may take all it needs, as every cell has its first value there. Of at most so many more, as
        many as are whole share what it left, in proportion to the ``seconds`` that lengths are now known to need."""
        self._ahead = [*seconds]
        whole = int(min(sittings, self.left / sum(self._ahead)))
        self._until = time.perf_counter() + self.left / max(whole, 1)

    def take(self) -> float:
        """The seconds that the next length of a sitting may take, in the order of the plan."""
        ahead, here = sum(self._ahead), self._ahead.pop(0)
        return max((self._until - time.perf_counter()) * here / ahead, 0.0) if here else 0.0
