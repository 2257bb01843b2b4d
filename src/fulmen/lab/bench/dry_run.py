"""The memory tables of a GPU, without one: columns run on fake tensors, and Triton launches are recorded."""

from __future__ import annotations

from typing import Any

from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.correctness import one_line
from fulmen.lab.bench.peers import why_missing
from fulmen.lab.bench.plan import Options, Part, plan
from fulmen.lab.bench.results import Cell, Results, now
from fulmen.lab.bench.suite import DTYPES, Column
from fulmen.lab.bench.workload import Material, Workload, bytes_of
from fulmen.lab.inspect.dry_run import dry_run
from fulmen.lab.inspect.memory import Memory
from fulmen.runtime.architectures import ARCHITECTURES
from fulmen.runtime.library import implementations
from fulmen.runtime.torch_private import dispatch_mode

ARCHITECTURE = "sm_80"  # of the A100 and the A800, where most published figures were taken
MEBIBYTE = 1 << 20


class OnTriton(dispatch_mode()):  # type: ignore[misc]  # a class that mypy cannot see
    """fulmen's ops run their Triton backend, where fake tensors would only ask them for shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fulmen":
            return implementations[func._opname](*args[:-1], "triton")
        return func(*args, **(kwargs or {}))


def memory_tables(options: Options, results: Results) -> Results:
    """Fills the memory tables only; a column that needs another package, or a compiler, says so."""
    for part in plan(options):
        for table in part.tables(options.dtype, options.device):
            if table.metric == "memory":
                columns = [column for column in part.columns if column.name in table.columns]
                for n in part.lengths:
                    table.cells += [_cell(part, column, n, table.mode, options.dtype) for column in columns]
                results.tables.append(table)
    results.finished = now()
    return results


def _cell(part: Part, column: Column, n: int, mode: str, dtype: str) -> Cell:
    if isinstance(column.function, Compiled):
        return Cell(n, column.name, skipped="no dry run of what torch.compile makes")
    if package := column.peer or column.needs:
        return Cell(n, column.name, skipped=why_missing(package) or f"no dry run of what runs in {package}")
    try:
        with dry_run(ARCHITECTURES[ARCHITECTURE]) as (_, memory), OnTriton():
            return _weighed(Workload(column, Material(part.suite, part.sizes, n, DTYPES[dtype], "cpu")), memory, mode)
    except Exception as failure:
        return Cell(n, column.name, skipped=f"no dry run: {one_line(failure)}")


def _weighed(workload: Workload, memory: Memory, mode: str) -> Cell:
    """Split as in a real run."""
    given = list(workload.inputs)
    if mode == "bwd":
        given.append(workload.cotangent)
    before = memory.allocated
    with memory.workspace() as beyond:
        results = [workload.forward()] if mode == "fwd" else list(workload.backward())
    total, inputs, outputs = before + beyond[0], bytes_of(given), bytes_of(results)
    sizes = [round(size / MEBIBYTE, 6) for size in (total, inputs, outputs, total - inputs - outputs)]
    cell = Cell(workload.material.n, workload.column.name, sizes[0])
    cell.inputs, cell.outputs, cell.workspace = sizes[1:]
    return cell
