"""Bytes that one launch of each kernel of the output gate requests (:mod:`fulmen.lab.inspect.traffic`)."""

from __future__ import annotations

from math import ceil

from fulmen.lab.inspect.traffic import Arguments, Counts, bytes_of


def _sum_outer(a: Arguments) -> int:
    """A tile of the sums reads its own channels of all tokens. Several segments are then added up."""
    column_tiles, row_tiles = ceil(a["y"].size / a["W"]), ceil(a["x"].size / a["R"])
    total = column_tiles * bytes_of(a["x"]) + row_tiles * (bytes_of(a["y"]) + bytes_of(a["gate"]))
    sums = bytes_of(a["sums"])
    return total + sums + (sums + sums // a["segments"] if a["segments"] > 1 else 0)


def _multiply_rows(a: Arguments) -> int:
    """S chunks of tokens read the matrix once, or each for itself where it has more channels than a program takes."""
    tiles, tokens = ceil(a["result"].size / a["W"]), a["C"] * (a["S"] if a["WHOLE"] else 1)
    total = tiles * (bytes_of(a["x"]) + bytes_of(a["gate"])) + ceil(a["length"] / tokens) * bytes_of(a["matrix"])
    return total + sum(bytes_of(a[name]) for name in ("factor", "ungated", "result"))


BYTES: Counts = {
    "fulmen.ops.output_gate.triton.kernels.sum_outer": _sum_outer,
    "fulmen.ops.output_gate.triton.kernels.multiply_rows": _multiply_rows,
}
