"""Bytes that one launch of each kernel of linear attention requests (:mod:`fulmen.lab.inspect.traffic`)."""

from __future__ import annotations

from math import ceil

from fulmen.lab.inspect.traffic import Arguments, Counts, bytes_of


def _rows(a: Arguments, *names: str) -> int:
    """One pass over the tokens of each of these, for every head."""
    tokens = [a[name] for name in names if a[name] is not None]
    return sum(_passes(a) * x.size * x.pointer.itemsize for x in tokens)


def _passes(a: Arguments) -> int:
    """Tokens of all heads of all sequences."""
    first = next(a[name] for name in ("x", "y", "q", "gradient", "decay") if a.get(name) is not None)
    return first.pointer.shape[0] * a["length"] * a["heads"]


def _states(a: Arguments, read: int, write: int, *names: str) -> int:
    """A state of each segment of each head, in its own dtype."""
    sequences = _passes(a) // a["length"] // a["heads"]
    itemsize = sum(a[name].pointer.itemsize for name in names if a[name] is not None)
    return itemsize * sequences * a["heads"] * a["segments"] * read * write


def _scalar_decay(a: Arguments) -> int:
    """One pass of one program over a scalar decay. One per head is a number for each chunk."""
    if a["decay"] is None:
        return 0
    return _passes(a) * a["decay"].pointer.itemsize // (1 if a["PER_TOKEN"] else a["C"])


def _walk(a: Arguments) -> int:
    """One launch may walk some of the segments."""
    tiles = ceil(a["write_size"] / a["W"])
    of_written = a["write_decay"] is not None
    scalar = _scalar_decay(a)
    if of_written or a["read_decay"] is not None:  # beside a decay per channel, which has every token
        scalar = _rows(a, "decay")
    total = tiles * (_rows(a, "x", "y", "scores", "read_decay") + scalar + bytes_of(a["totals"]))
    total += _rows(a, "z", "result", "m", "write_decay") + bytes_of(a["write_totals"]) + bytes_of(a["left_out"])
    total += _states(a, a["read_size"], a["write_size"], "leaving", "boundaries")
    of_entering = _states(a, a["read_size"], a["write_size"], "entering")
    total += of_entering // a["segments"] if a["CARRY"] else of_entering
    # With a decay per channel, a walk backward in time that follows one forward in time reads what that one wrote.
    follows = of_written and a["WALK"] in ("dk", "dv") and a["y"] is not None
    total += bytes_of(a["sums"]) * (2 if follows else 1) + bytes_of(a["crossing"])
    return total if a["CARRY"] else total * a["walked"] // a["segments"]


def _prepare(a: Arguments) -> int:
    of_chunks = sum(bytes_of(a[name]) for name in ("totals", "left_out"))
    return _rows(a, "q", "k", "decay", "scalar", "q_in", "k_out", "scores") + of_chunks


def _merging(a: Arguments) -> int:
    """Where no chunk needs it."""
    return bytes_of(a["left_out"])


def _sum_decay_gradient(a: Arguments) -> int:
    of_walks = sum(bytes_of(a[name]) for name in ("forward", "backward", "crossing"))
    return of_walks + bytes_of(a["gradient"]) + _rows(a, "decay")


def _sum_before(a: Arguments) -> int:
    return 2 * bytes_of(a["sums"]) + bytes_of(a["crossing"])


def _fold(a: Arguments) -> int:
    """Every boundary but the first is read and written, the first is read."""
    boundaries, segments = bytes_of(a["boundaries"]), a["segments"]
    totals = sum(bytes_of(a[name]) for name in ("scalar_totals", "read_totals", "write_totals"))
    return boundaries + boundaries * segments // (segments + 1) + totals


def _sum_segments(a: Arguments) -> int:
    return _rows(a, "decay") + bytes_of(a["totals"])


def _recur(a: Arguments) -> int:
    tiles = ceil(a["v"].size / a["E"])
    total = tiles * _rows(a, "q", "k") + _rows(a, "v", "decay_v", "result")
    if a["decay"] is not None:
        total += tiles * _passes(a) * a["decay"].pointer.itemsize * (a["decay"].size if a["PER_CHANNEL"] else 1)
    return total + _states(a, a["q"].size, a["v"].size, "entering", "leaving")


BYTES: Counts = {
    "fulmen.ops.linear_attention.triton.walk.walk": _walk,
    "fulmen.ops.linear_attention.triton.prepare.prepare": _prepare,
    "fulmen.ops.linear_attention.triton.prepare.merge_blocks": _merging,
    "fulmen.ops.linear_attention.triton.merged_pairs.add_merged_pairs": _merging,
    "fulmen.ops.linear_attention.triton.decay_sums.sum_decay_gradient": _sum_decay_gradient,
    "fulmen.ops.linear_attention.triton.decay_sums.sum_before": _sum_before,
    "fulmen.ops.linear_attention.triton.states.fold": _fold,
    "fulmen.ops.linear_attention.triton.states.sum_segments": _sum_segments,
    "fulmen.ops.linear_attention.triton.recurrent.recur": _recur,
}
