"""Bytes that one launch of each kernel of tpa_decode requests (:mod:`fulmen.lab.inspect.traffic`)."""

from __future__ import annotations

from math import ceil

from fulmen.lab.inspect.traffic import Arguments, Counts, bytes_of


def _decode(a: Arguments) -> int:
    """Each tile of heads reads all of bk, bv and bq."""
    element, tiles = a["bk"].pointer.itemsize, ceil(a["heads"] / a["H"])
    batch, slices = a["output"].pointer.shape[:2]
    rows = tiles * (a["key_rank"] * a["bk"].size + a["value_rank"] * a["bv"].size)
    numbers = a["heads"] * (a["key_rank"] + a["value_rank"])
    query = a["rank"] * (a["heads"] + tiles * a["bq"].size)
    total = batch * (a["tokens"] * (rows + numbers) + slices * query) * element
    return total + sum(bytes_of(a[name]) for name in ("output", "maxima", "sums"))


def _merge(a: Arguments) -> int:
    return sum(bytes_of(a[name]) for name in ("partial", "maxima", "sums", "output"))


BYTES: Counts = {
    "fulmen.ops.tpa.triton.kernels.decode": _decode,
    "fulmen.ops.tpa.triton.kernels.merge": _merge,
}
