"""Bytes of memory that recorded launches request: every load and store of all programs, without credit for caches."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any

from fulmen.lab.inspect.dry_run import Launch

Arguments = dict[str, Any]


def requested_bytes(launches: list[Launch]) -> int:
    """Loads and stores of all ``launches``; sequences must not be packed."""
    return sum(_COUNTS[launch.kernel](launch.arguments) for launch in launches)


def _rows(a: Arguments, *names: str) -> int:
    """One pass over the tokens of each of these, for every head."""
    tokens = [a[name] for name in names if a[name] is not None]
    return sum(_passes(a) * x.size * x.pointer.itemsize for x in tokens)


def _passes(a: Arguments) -> int:
    """Tokens of all heads of all sequences."""
    first = next(a[name] for name in ("x", "y", "q", "decay") if a.get(name) is not None)
    return first.pointer.shape[0] * a["length"] * a["heads"]


def _states(a: Arguments, read: int, write: int, *names: str) -> int:
    """A state of each segment of each head."""
    sequences = _passes(a) // a["length"] // a["heads"]
    count = sum(a[name] is not None for name in names)
    return count * sequences * a["heads"] * a["segments"] * read * write * 4


def _shared_decay(a: Arguments) -> int:
    """One pass of one program over a decay that all channels share. One per head is a number for each chunk."""
    if a["decay"] is None:
        return 0
    return _passes(a) * a["decay"].pointer.itemsize // (1 if a["PER_TOKEN"] else a["C"])


def _scan(a: Arguments) -> int:
    tiles = ceil(a["write_size"] / a["W"])
    total = tiles * (_rows(a, "x", "y", "read_decay") + _shared_decay(a))
    total += _rows(a, "z", "result", "write_decay", "m")
    # Only a walk backward in time that follows one forward in time adds to what that one wrote.
    follows = a["BACKWARD"] and a["y"] is not None
    total += _states(a, a["x"].size, a["write_size"], "entering", "leaving", *(["boundaries"] if a["BACKWARD"] else []))
    if a["decay_grad"] is not None:
        once = prod(a["decay_grad"].pointer.shape) * 4
        if a["given"] is not None and a["y"] is not None:
            total += prod(a["given"].pointer.shape) * 4
        total += once * (2 if follows else 1)
    return total


def _summarise(a: Arguments) -> int:
    tiles = ceil(a["z"].size / a["W"])
    total = tiles * (_rows(a, "y", "read_decay") + _shared_decay(a)) + _rows(a, "z", "write_decay")
    total += _states(a, a["y"].size, a["z"].size, "boundaries")
    first = prod((a["y"].pointer.shape[0], a["heads"], a["y"].size, a["z"].size)) * 4
    return total + (first if a["CARRY"] else 0)


def _fold(a: Arguments) -> int:
    """Every boundary but the first is read and written, the first is read."""
    boundaries, segments = prod(a["boundaries"].pointer.shape) * 4, a["segments"]
    totals = [a[name].pointer for name in ("scalar_totals", "read_totals", "write_totals") if a[name] is not None]
    return boundaries + boundaries * segments // (segments + 1) + sum(prod(x.shape) * 4 for x in totals)


def _sum_segments(a: Arguments) -> int:
    return _rows(a, "decay") + prod(a["totals"].pointer.shape) * 4


def _recur(a: Arguments) -> int:
    tiles = ceil(a["v"].size / a["E"])
    total = tiles * _rows(a, "q", "k") + _rows(a, "v", "decay_v", "result")
    if a["decay"] is not None:
        total += tiles * _passes(a) * a["decay"].pointer.itemsize * (a["decay"].size if a["PER_CHANNEL"] else 1)
    return total + _states(a, a["q"].size, a["v"].size, "entering", "leaving")


def _decode(a: Arguments) -> int:
    """Each tile of heads reads all of bk, bv and bq."""
    element, tiles = a["bk"].pointer.itemsize, ceil(a["heads"] / a["H"])
    batch, slices = a["output"].pointer.shape[:2]
    rows = tiles * (a["key_rank"] * a["bk"].size + a["value_rank"] * a["bv"].size)
    numbers = a["heads"] * (a["key_rank"] + a["value_rank"])
    query = a["rank"] * (a["heads"] + tiles * a["bq"].size)
    total = batch * (a["tokens"] * (rows + numbers) + slices * query) * element
    return total + sum(map(_whole, (a["output"].pointer, a["maxima"], a["sums"])))


def _merge(a: Arguments) -> int:
    return sum(map(_whole, (a["partial"].pointer, a["maxima"], a["sums"], a["output"].pointer)))


def _sum_outer(a: Arguments) -> int:
    """A tile of the sums reads its own channels of all tokens. Several segments are then added up."""
    column_tiles, row_tiles = ceil(a["y"].size / a["W"]), ceil(a["x"].size / a["R"])
    total = column_tiles * _whole(a["x"].pointer) + row_tiles * (_of(a["y"]) + _of(a["gate"]))
    sums = _whole(a["sums"].pointer)
    return total + sums + (sums + sums // a["segments"] if a["segments"] > 1 else 0)


def _multiply_rows(a: Arguments) -> int:
    """Each chunk of tokens reads the whole matrix."""
    tiles, chunks = ceil(a["result"].size / a["W"]), ceil(a["length"] / a["C"])
    return (
        tiles * (_of(a["x"]) + _of(a["gate"])) + chunks * _of(a["matrix"])
        + _of(a["factor"]) + _of(a["ungated"]) + _of(a["result"])
    )  # fmt: skip


def _of(operand: Any) -> int:
    return 0 if operand is None else _whole(operand.pointer)


def _whole(x: Any) -> int:
    """All of a tensor, once."""
    return 0 if x is None else prod(x.shape) * x.itemsize


_COUNTS: dict[str, Callable[[Arguments], int]] = {
    "scan": _scan,
    "summarise": _summarise,
    "fold": _fold,
    "sum_segments": _sum_segments,
    "recur": _recur,
    "decode": _decode,
    "merge": _merge,
    "sum_outer": _sum_outer,
    "multiply_rows": _multiply_rows,
}
