"""Bytes that one launch of each kernel of the delta rule requests (:mod:`fulmen.lab.inspect.traffic`)."""

from __future__ import annotations

from math import ceil

from fulmen.lab.inspect.traffic import Arguments, Counts, bytes_of


def _passes(a: Arguments) -> int:
    """Tokens of all heads of all samples."""
    batch, length, heads = a["beta"].pointer.shape[:3]
    return int(batch * length * heads)


def _rows(a: Arguments, *names: str) -> int:
    """One pass over the tokens of each of these, for every head."""
    return sum(_passes(a) * x.size * x.pointer.itemsize for x in (a[name] for name in names) if x is not None)


def _columns(a: Arguments, count: int) -> int:
    """Factors of rows, which are float32, and β."""
    return _passes(a) * (4 * count + a["beta"].pointer.itemsize)


def _decay(a: Arguments, chunks: int) -> int:
    """One per head is a number for each chunk."""
    if a["DECAY"] == "head":
        return int(chunks * a["decay"].pointer.itemsize)
    return _rows(a, "decay")


def _all(a: Arguments, *names: str) -> int:
    return sum(bytes_of(a[name]) for name in names)


def _chunks(a: Arguments) -> int:
    """Of all heads of all samples."""
    batch, length, heads = a["beta"].pointer.shape[:3]
    return int(batch * heads * ceil(length / a["C"]))


def _prepare(a: Arguments) -> int:
    stored = ("inverse", "scores", "overlaps", "factors", "totals", "reads", "q_in", "k_out")
    again = _rows(a, "k") + (_rows(a, "decay") if a["DECAY"] == "channel" else 0)
    return _rows(a, "q", "k") + again + _columns(a, 0) + _decay(a, _chunks(a)) + _all(a, *stored)


def _walk(a: Arguments) -> int:
    tiles = ceil(a["v"].size / a["W"])
    rows = _rows(a, "q", "k", "reads", "inverse", "scores") + _columns(a, 2 if a["output"] is None else 4)
    own = ("output", "states", "errors", "entering", "leaving")
    return tiles * (rows + bytes_of(a["totals"])) + _rows(a, "v") + _all(a, *own)


def _walk_backward(a: Arguments) -> int:
    tiles = ceil(a["grad"].size / a["W"])
    rows = _rows(a, "q", "k", "reads", "inverse", "scores") + _columns(a, 4) + bytes_of(a["totals"])
    total = tiles * rows + _rows(a, "grad", "dv") + _all(a, "grad_states", "entering", "leaving")
    if a["dbeta"] is not None:
        total += _rows(a, "errors") + bytes_of(a["dbeta"])
    return total


def _differentiate(a: Arguments) -> int:
    tiles = ceil(a["k"].size / a["K"])
    rows, own = _rows(a, "grad", "dv", "errors") + _columns(a, 4), _rows(a, "q", "k")
    if a["DECAY"] == "channel":
        own += _rows(a, "decay")
    elif a["DECAY"] != "none":
        rows += _decay(a, _chunks(a))
    if a["ddecay"] is not None:
        if a["DECAY"] == "channel":
            own += bytes_of(a["totals"])
        else:
            rows += _rows(a, "scores", "overlaps") + bytes_of(a["totals"])
    return tiles * rows + own + _all(a, "states", "grad_states", "dq", "dk", "ddecay")


def _finish(a: Arguments) -> int:
    return _all(a, "of_heads", "result", *(["x"] if a["NORMALIZE"] else []))


def _recur(a: Arguments) -> int:
    tiles = ceil(a["v"].size / a["W"])
    rows = _rows(a, "q", "k") + _columns(a, 0) + _decay(a, _passes(a))
    return tiles * rows + _rows(a, "v") + _all(a, "output", "entering", "leaving")


def _of(module: str) -> str:
    return f"fulmen.ops.delta_rule.triton.{module}"


BYTES: Counts = {
    _of("prepare.prepare"): _prepare,
    _of("walk.walk"): _walk,
    _of("walk.walk_backward"): _walk_backward,
    _of("gradients.differentiate"): _differentiate,
    _of("gradients.finish"): _finish,
    _of("recurrent.recur"): _recur,
}
