"""What a benchmark suite is: everything about one report but its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fulmen.lab.bench.owners import Owner, ours
from fulmen.lab.bench.peers import version_of, why_missing
from fulmen.lab.bench.results import without_run
from fulmen.runtime.architectures import Architecture

if TYPE_CHECKING:
    from fulmen.lab.inspect.dry_run import Launch  # with Triton, which not everybody has

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PUBLISHED_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    dim: int
    rank: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Those of a table."""
        return cls(config["batch"], config["heads"], config["dim"], config.get("rank"))


@dataclass(frozen=True)
class Input:
    """A random tensor: normal numbers, to which ``then`` is done."""

    axes: str  # names of sizes: "B N H D", "B 1 H R" ...
    then: Callable[[Tensor], Tensor] = lambda x: x

    def shape(self, sizes: Sizes, n: int) -> list[int]:
        extent = {"B": sizes.batch, "N": n, "H": sizes.heads, "D": sizes.dim, "R": sizes.rank or 1, "1": 1}
        return [extent[axis] for axis in self.axes.split()]

    def make(self, sizes: Sizes, n: int, generator: torch.Generator) -> Tensor:
        """In float32, on the CPU."""
        return self.then(torch.randn(self.shape(sizes, n), generator=generator))


@dataclass(frozen=True)
class Preset:
    sizes: tuple[Sizes, ...]
    lengths: tuple[int, ...]
    sections: tuple[str, ...] | None = None  # only these


class Work(NamedTuple):
    bytes: float
    flops: float


@dataclass(frozen=True)
class Column:
    """One column of a table: a way to compute what its report is about.

    Attributes:
        name: as published.
        title: the same for people, in a few words.
        about: what it is, in one line.
        pros, cons: in a few words, for the report.
        takes: which of the suite's tensors it is called with.
        function: gives the result. May be a :class:`~fulmen.lab.bench.compiled.Compiled`.
        exact: gives the same from float64 tensors: the specification.
        least: the least work of each mode at some sizes and length, whoever computes it: every input read and every
            result written once, in bfloat16, and the products of the algorithm.
        launched: what our kernels are launched for in each mode, on an architecture at some sizes and length (by dry
            run); None where we have no such operation.
        owner: whose it is on a device ("cpu" or "cuda").
        fixed: those of ``takes`` that get no gradient.
        heads_first: whether its tensors are contiguous as ``[B, H, N, D]``, and its result is of that form.
        growth: its time grows with this power of the length.
        peer: the package whose kernels it is on CUDA; empty for fulmen's and torch's own.
        cuda_only: whether only that package has it; otherwise it is ours on CPU.
        needs: the package, or the file of one, without which it does not run on any device.
    """

    name: str
    title: str
    about: str
    pros: str
    cons: str
    takes: tuple[str, ...]
    function: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    least: Callable[[Sizes, int], Mapping[str, Work]]
    launched: Callable[[Architecture, Sizes, int], Mapping[str, list[Launch]]] | None = None
    owner: Callable[[str], Owner] = ours
    fixed: tuple[str, ...] = ()
    heads_first: bool = False
    growth: int = 1
    peer: str = ""
    cuda_only: bool = False
    needs: str = ""

    def owned(self, device: str) -> Owner:
        """By whom, as it would run here."""
        owner = self.owner(device)
        return replace(owner, version=version_of(owner.package))

    def why_not(self, device: str) -> str:
        """Why it cannot run here on ``device`` ("cpu" or "cuda"); empty if it can."""
        if device == "cuda" and not torch.cuda.is_available():
            return "torch finds no CUDA device"
        return self.why_missing(device)

    def why_missing(self, device: str) -> str:
        """Why there is no such column for ``device``, whether or not the device is here; empty if there is."""
        if reason := why_missing(self.needs) if self.needs else "":
            return reason
        if device == "cpu":
            return f"{self.peer} runs on CUDA only" if self.cuda_only else ""
        return why_missing(self.peer) if self.peer else ""


@dataclass(frozen=True)
class Text:
    """What a report explains in words."""

    title: str
    subject: str  # what is compared, in one sentence
    algorithm: str  # its name
    formula: str
    complexity: tuple[str, ...]


@dataclass(frozen=True)
class Kernels:
    """Those of ours that a suite runs, as its report shows them.

    Attributes:
        operator: that `fulmen inspect` names them by.
        tiles: what each is for, and its tile (a named tuple) on an architecture, given sizes and dtype. Only called
            where Triton is installed, and imports what needs it.
        core: the parameters of the CPU core: name, value, notes.
    """

    operator: str
    tiles: Callable[[Sizes, torch.dtype], Mapping[str, Callable[[Architecture], Any]]]
    core: tuple[tuple[str, str, str], ...] = ()


def batch_head_dim(sizes: Sizes) -> str:
    return f"batch{sizes.batch}-head{sizes.heads}-dim{sizes.dim}"


@dataclass(frozen=True)
class Suite:
    """One report, published or our own.

    Attributes:
        name: of its module, and in the titles of its tables.
        about: what is measured, in one line.
        text: for the report.
        axis: what the report calls the length.
        baseline: the column that speedups are relative to.
        modes: "fwd", or "fwd" and "bwd".
        forward_only: the sections that have no backward, where others have one.
        sections: the columns of each section; reports with one section call it "".
        inputs: the tensors, by name.
        presets: sizes and lengths by the preset's name.
        kernels: that are ours; None if it runs none.
        one_token: whether a call in a section takes one token of each sample, whatever the length.
        check_sizes: what columns are checked with, given the sizes to be measured.
        sizes_in_title: the sizes as the titles of the report have them.
        memory_columns: the columns of the report's memory tables, where they are not all.
        by_length: the tables of the data file as titled tables with a length in each row, where the report itself
            printed others. A titled table has "heading", "section", "title", "axis", "columns" and "rows".
    """

    name: str
    about: str
    text: Text
    axis: str
    baseline: str
    modes: tuple[str, ...]
    sections: Mapping[str, tuple[Column, ...]]
    inputs: Mapping[str, Input]
    presets: Mapping[str, Preset]
    kernels: Kernels | None = None
    forward_only: tuple[str, ...] = ()
    one_token: Callable[[str], bool] = lambda section: False
    check_sizes: Callable[[Sizes], Sizes] = lambda sizes: sizes
    sizes_in_title: Callable[[Sizes], str] = batch_head_dim
    memory_columns: tuple[str, ...] | None = None
    by_length: Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]] = lambda tables: tables

    @property
    def columns(self) -> list[Column]:
        """Each column once, in the order of the report."""
        unique: dict[str, Column] = {}
        for columns in self.sections.values():
            for column in columns:
                unique.setdefault(column.name, column)
        return list(unique.values())

    def column(self, name: str, section: str = "") -> Column | None:
        """A column of a section; of any, where a published table stands in a section that is not measured. ``name`` may
        be that of one run among several."""
        own, columns = without_run(name), self.sections.get(section, self.columns)
        return next((column for column in columns if column.name == own), None)

    def title(self, metric: str, mode: str, sizes: Sizes, dtype: str) -> str:
        return f"{self.name}-{metric}-{mode}-{self.sizes_in_title(sizes)}-{dtype}"


def tensor_bytes(sizes: Sizes, n: int) -> int:
    """Of one tensor ``[B, N, H, D]`` in bfloat16."""
    return 2 * sizes.batch * n * sizes.heads * sizes.dim


def product_flops(sizes: Sizes, n: int) -> int:
    """Of every row of such a tensor with a matrix ``[D, D]``, or with another row to make one."""
    return 2 * sizes.batch * n * sizes.heads * sizes.dim**2


def describe_columns(suite: Suite, device: str) -> list[dict[str, Any]]:
    """What `fulmen list` says of a suite's columns, ready for JSON."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}  # sections may have columns of one name that differ
    for column in (column for columns in suite.sections.values() for column in columns):
        reason = column.why_not(device)
        rows[column.name, column.about] = {
            "name": column.name,
            "title": column.title,
            "owner": column.owned(device).described,
            "available": not reason,
            "reason": reason,
            "about": column.about,
        }
    return list(rows.values())
