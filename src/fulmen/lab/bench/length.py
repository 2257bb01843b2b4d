"""All columns of a part of the plan at one length: prepared together, timed in turns, weighed one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.correctness import CorrectnessCheck, one_line
from fulmen.lab.bench.measure import Call, available_bytes, in_turns, memory_use, release_freed_memory, seconds_of
from fulmen.lab.bench.plan import METRICS, Budget, Pace, Part
from fulmen.lab.bench.prediction import peak_bytes, seconds_per_call
from fulmen.lab.bench.prepared import Prepared
from fulmen.lab.bench.progress import Live
from fulmen.lab.bench.results import OVER_BUDGET, Cell, Table
from fulmen.lab.bench.spending import Spending
from fulmen.lab.bench.suite import Column
from fulmen.lab.bench.workload import Material, Workload, bytes_of

WARM_UP, WEIGHING = 1, 1  # calls beside the repeats: in every sitting, and in the first
A_LITTLE = 0.1  # seconds
NOT_WORTH_A_REHEARSAL = 1 / 64  # of the free memory: inputs below this
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Bench:
    """What measuring needs, whatever is measured."""

    device: str
    dtype: torch.dtype
    pace: Pace
    check: CorrectnessCheck
    clock: Callable[[Call], float]
    live: Live
    spending: Spending
    budget: Budget


class Length:
    """One length of a part, in one sitting. ``tables`` are those of the part, by mode and metric; the first sitting
    adds cells to them, and later ones add to these cells."""

    def __init__(
        self, bench: Bench, part: Part, tables: dict[tuple[str, str], Table], n: int, sitting: int, share: float
    ) -> None:
        self._bench, self._part, self._tables, self._n, self._sitting = bench, part, tables, n, sitting
        self._share = share / len(part.modes)  # seconds for each mode
        self._material = Material(part.suite, part.sizes, n, bench.dtype, bench.device)
        self._workloads: dict[str, Workload] = {}
        self._first_calls: dict[tuple[str, str], float] = {}  # seconds, by column and mode

    def measure(self, mode: str) -> None:
        columns = [column for column in self._part.columns if any(self._due(column, mode, each) for each in METRICS)]
        columns = self._affordable(self._possible(columns, mode), mode)
        columns = [column for column in columns if self._ready(column, mode)]
        self._time([column for column in columns if self._due(column, mode, "speed")], mode)
        for column in columns:
            if self._due(column, mode, "memory"):
                self._weigh(column, mode)

    def close(self) -> None:
        """Give back what columns had prepared for this length."""
        for column in self._part.columns:
            if isinstance(column.function, Prepared):
                column.function.release()

    def _cell(self, column: Column, mode: str, metric: str) -> Cell | None:
        table = self._tables.get((mode, metric))
        return table.cell(self._n, column.name) if table else None

    def _due(self, column: Column, mode: str, metric: str) -> bool:
        """Whether this sitting is to fill the column's cell, or to add to it."""
        table, cell = self._tables.get((mode, metric)), self._cell(column, mode, metric)
        if table is None or column.name not in table.columns:
            return False
        return cell is None or (metric == "speed" and _open(cell) and len(cell.sittings) <= self._sitting)

    def _sittings(self, column: Column, mode: str) -> int:
        """That the column had before this one."""
        cell = self._cell(column, mode, "speed")
        return len(cell.sittings) if cell else 0

    def _skip(self, column: Column, mode: str, reason: str, first_call: float | None = None) -> None:
        """What earlier sittings measured stays if only time is short, but not if the column now fails."""
        for (of, metric), table in self._tables.items():
            if of != mode or column.name not in table.columns:
                continue
            cell = self._cell(column, mode, metric)
            if cell is not None and not reason.startswith(OVER_BUDGET):
                table.cells.remove(cell)
                cell = None
            if cell is None:
                table.cells.append(Cell(self._n, column.name, skipped=reason, first_call=first_call))

    def _possible(self, columns: list[Column], mode: str) -> list[Column]:
        """Those that can run here, are right, and fit into memory."""
        found = []
        for column in columns:
            self._bench.live.show(self._part.suite.name, column.name, self._n)
            reason = column.why_not(self._bench.device) or self._no_time()
            if not reason:
                with self._bench.spending.on("checks"):
                    reason = self._wrong(column, mode)
            reason = reason or self._too_large(column, mode)
            if reason:
                self._skip(column, mode, reason)
            else:
                found.append(column)
        return found

    def _wrong(self, column: Column, mode: str) -> str:
        """Its error is one of the column, and stands in the table once."""
        verdict = self._bench.check.verdict(self._part.suite, column, self._part.sizes, mode)
        if (mode, "speed") in self._tables and verdict.error is not None and not verdict.problem:
            self._tables[mode, "speed"].errors[column.name] = verdict.error
        return verdict.problem

    def _no_time(self) -> str:
        """The budget may be spent at any moment; then nothing more is begun."""
        return f"{OVER_BUDGET}: nothing is left of it" if self._bench.budget.left <= 0 else ""

    def _too_large(self, column: Column, mode: str) -> str:
        part, free = self._part, available_bytes(self._bench.device)
        if self._sittings(column, mode):
            return ""
        if sum(map(self._material.bytes_of, column.takes)) < free * NOT_WORTH_A_REHEARSAL:
            return ""
        with self._bench.spending.on("rehearsals"):
            needed = peak_bytes(part.suite, column, part.sizes, self._n, self._bench.dtype, mode)
        if needed > free:
            release_freed_memory()
            free = available_bytes(self._bench.device)
        if needed <= free:
            return ""
        return f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"

    def _affordable(self, columns: list[Column], mode: str) -> list[Column]:
        """Those with the fewest sittings first, and of them cheap ones, as far as the share of time goes."""
        table = self._tables.get((mode, "speed"))
        if table is None:
            return columns
        expected = {column: seconds_per_call(table, column, self._n) or 0.0 for column in columns}
        left, affordable = self._share, []
        for column in sorted(columns, key=lambda column: (self._sittings(column, mode), expected[column])):
            calls = self._bench.pace.repeats + WARM_UP + (0 if self._sittings(column, mode) else WEIGHING)
            needed = expected[column] * calls
            if needed <= left:
                left -= needed
                affordable.append(column)
            else:
                reason = f"{OVER_BUDGET}: about {needed:.2g} s expected, {left:.2g} s left for it"
                self._skip(column, mode, reason)
        return [column for column in columns if column in affordable]

    def _ready(self, column: Column, mode: str) -> bool:
        """Makes what the column needs and calls it once, which warms up; for the first time it may compile."""
        self._bench.live.show(self._part.suite.name, column.name, self._n)
        if reason := self._no_time():
            self._skip(column, mode, reason)
            return False
        try:
            with self._bench.spending.on("inputs"):
                workload = self._workloads.setdefault(column.name, Workload(column, self._material))
            with self._bench.spending.on("first calls"):
                if mode == "bwd":
                    _ = workload.cotangent  # of the output, which is kept
                first = seconds_of(workload.call(mode), self._bench.device)
        except Exception as failure:
            self._skip(column, mode, f"failed: {one_line(failure)}")
            return False
        self._first_calls[column.name, mode] = first
        if reason := _not_compiled(column):
            self._skip(column, mode, reason)
        elif first * self._bench.pace.repeats > self._share and not isinstance(column.function, Compiled):
            reason = f"{OVER_BUDGET}: the first call took {first:.1f} s"
            self._skip(column, mode, reason, round(first * 1e3, 3))
        else:
            return True
        return False

    def _time(self, columns: list[Column], mode: str) -> None:
        if not columns:
            return
        bench = self._bench
        bench.live.show(self._part.suite.name, "all columns in turn", self._n)
        calls = {column.name: self._workloads[column.name].call(mode) for column in columns}
        with bench.spending.on("timing"):
            times = in_turns(calls, min(bench.pace.seconds, self._share), bench.pace.repeats, bench.clock)
        for column in columns:
            if reason := _not_compiled(column):
                self._skip(column, mode, reason)
                continue
            cell = self._cell(column, mode, "speed")
            if cell is None:
                first = self._first_calls[column.name, mode]
                cell = Cell(self._n, column.name, first_call=round(first * 1e3, 3))
                self._tables[mode, "speed"].cells.append(cell)
            cell.sit(round(times[column.name].median * 1e3, 6))

    def _weigh(self, column: Column, mode: str) -> None:
        """Inputs are what the call was given (for bwd also the output's gradient), outputs what it gave; workspace is
        the rest of the peak (for bwd also the output and all that its graph keeps)."""
        workload, device = self._workloads[column.name], self._bench.device
        inputs, kept = list(workload.inputs), 0
        with self._bench.spending.on("memory"):
            if mode == "bwd":
                inputs.append(workload.cotangent)
                kept = memory_use(workload.forward, device).held
            use = memory_use(workload.call(mode), device)
            results = workload.leaves if mode == "bwd" else [workload.kept_output]
        given, outputs = bytes_of(inputs), bytes_of(results)
        total = given + kept + use.peak
        mib = [round(size / MEBIBYTE, 6) for size in (total, given, outputs, total - given - outputs)]
        cell = Cell(self._n, column.name, mib[0])
        cell.inputs, cell.outputs, cell.workspace = mib[1:]
        self._tables[mode, "memory"].cells.append(cell)


def seconds_again(tables: dict[tuple[str, str], Table], n: int, pace: Pace) -> float:
    """What one more sitting needs at a length: a little for every mode, or its calls where they are long."""
    needed = 0.0
    for (_, metric), table in tables.items():
        cells = [cell for cell in table.cells if metric == "speed" and cell.n == n and _open(cell)]
        a_round = sum(cell.value or 0.0 for cell in cells) / 1e3
        needed += max(A_LITTLE, (pace.repeats + WARM_UP) * a_round) if cells else 0.0
    return needed


def _open(cell: Cell) -> bool:
    """Whether another sitting would tell more of it."""
    return not cell.skipped and not cell.settled


def _not_compiled(column: Column) -> str:
    """Why a column that should be compiled is not to be believed; empty for all others."""
    function = column.function
    if not isinstance(function, Compiled) or not function.eager_calls:
        return ""
    return f"not compiled: {function.eager_calls} of {function.calls} calls ran eagerly"
