"""What a benchmark suite is: one published report, as inputs, columns and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from fulmen.lab.bench.peers import why_missing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PUBLISHED_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    dim: int
    rank: int | None = None


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


@dataclass(frozen=True)
class Column:
    """One column of a published table: a way to compute what its report is about.

    Attributes:
        name: as published.
        about: what it is, in one line.
        takes: which of the suite's tensors it is called with.
        function: gives the result. May be a :class:`~fulmen.lab.bench.compiled.Compiled`.
        exact: gives the same from float64 tensors: the specification.
        fixed: those of ``takes`` that get no gradient.
        heads_first: whether its tensors are contiguous as ``[B, H, N, D]``, and its result is of that form.
        growth: its time grows with this power of the length.
        peer: the package whose kernels it is on CUDA; empty for fulmen's and torch's own.
        cuda_only: whether only that package has it; otherwise it is ours on CPU.
    """

    name: str
    about: str
    takes: tuple[str, ...]
    function: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    fixed: tuple[str, ...] = ()
    heads_first: bool = False
    growth: int = 1
    peer: str = ""
    cuda_only: bool = False

    def why_not(self, device: str) -> str:
        """Why it cannot run here on ``device`` ("cpu" or "cuda"); empty if it can."""
        if device == "cuda" and not torch.cuda.is_available():
            return "torch finds no CUDA device"
        return self.why_missing(device)

    def why_missing(self, device: str) -> str:
        """Why there is no such column for ``device``, whether or not the device is here; empty if there is."""
        if device == "cpu":
            return f"{self.peer} runs on CUDA only" if self.cuda_only else ""
        return why_missing(self.peer) if self.peer else ""


@dataclass(frozen=True)
class Suite:
    """One published report.

    Attributes:
        name: as in the titles of its tables.
        about: what is measured, in one line.
        axis: what the report calls the length.
        baseline: the column that speedups are relative to.
        modes: "fwd", or "fwd" and "bwd".
        sections: the columns of each section; reports with one section call it "".
        inputs: the tensors, by name.
        presets: sizes and lengths by the preset's name.
        check_sizes: what columns are checked with, given the sizes to be measured.
        sizes_in_title: the sizes as the titles of the report have them.
        memory_columns: the columns of the report's memory tables, where they are not all.
    """

    name: str
    about: str
    axis: str
    baseline: str
    modes: tuple[str, ...]
    sections: Mapping[str, tuple[Column, ...]]
    inputs: Mapping[str, Input]
    presets: Mapping[str, Preset]
    check_sizes: Callable[[Sizes], Sizes]
    sizes_in_title: Callable[[Sizes], str]
    memory_columns: tuple[str, ...] | None = None

    @property
    def columns(self) -> list[Column]:
        """Each column once, in the order of the report."""
        unique = {column.name: column for columns in self.sections.values() for column in columns}
        return list(unique.values())

    def title(self, metric: str, mode: str, sizes: Sizes, dtype: str) -> str:
        return f"{self.name}-{metric}-{mode}-{self.sizes_in_title(sizes)}-{dtype}"


def batch_head_dim(sizes: Sizes) -> str:
    return f"batch{sizes.batch}-head{sizes.heads}-dim{sizes.dim}"


def few_heads(sizes: Sizes) -> Sizes:
    """Enough to see a mistake, little enough for a recurrence in float64."""
    return Sizes(batch=2, heads=2, dim=sizes.dim, rank=sizes.rank)


def _unit(x: Tensor) -> Tensor:
    return normalize(x, dim=-1)


# As in the published lasd report: q and k normalised, log-decays logsigmoid of normal numbers.
ATTENTION_INPUTS = {
    "q": Input("B N H D", _unit),
    "k": Input("B N H D", _unit),
    "v": Input("B N H D"),
    "head": Input("H", logsigmoid),
    "token": Input("B N H", logsigmoid),
    "channel": Input("B N H D", logsigmoid),
    "channel_v": Input("B N H D", logsigmoid),
}


def describe_columns(suite: Suite, device: str) -> list[dict[str, Any]]:
    """What `fulmen list` says of a suite's columns, ready for JSON."""
    rows = []
    for column in suite.columns:
        reason = column.why_not(device)
        rows.append({"name": column.name, "available": not reason, "reason": reason, "about": column.about})
    return rows
