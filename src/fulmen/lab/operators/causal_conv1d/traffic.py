"""Bytes that one launch of each kernel of the convolution requests (:mod:`fulmen.lab.inspect.traffic`)."""

from __future__ import annotations

from math import ceil

from fulmen.lab.inspect.traffic import Arguments, Counts, bytes_of


def _convolve(a: Arguments) -> int:
    """z of every token reads K inputs, and a chunk all weights."""
    batch, length, _ = a["x"].pointer.shape
    taps = bytes_of(a["weight"]) + bytes_of(a["bias"])
    return a["K"] * bytes_of(a["x"]) + batch * ceil(length / a["T"]) * taps + bytes_of(a["output"])


def _differentiate(a: Arguments) -> int:
    """A chunk loads K - 1 tokens of the next one, too; dweight reads the inputs once more."""
    batch, length, channels = a["x"].pointer.shape
    firsts = range(0, length, a["segment_tokens"])
    ends = (min(first + a["segment_tokens"], length) for first in firsts)
    own = a["T"] - (a["K"] - 1)
    chunks = [t for first, end in zip(firsts, ends, strict=True) for t in range(first, end, own)]
    windows = a["K"] * ((a["ACTIVATION"] is not None) + (a["sums"] is not None))
    tokens = sum(min(a["T"], length - t) for t in chunks) * (1 + windows)
    if a["initial"] is not None:
        tokens += windows * (a["K"] - 1) // 2
    read = batch * tokens * channels * a["x"].pointer.itemsize
    taps = batch * len(chunks) * (2 * bytes_of(a["weight"]) + bytes_of(a["bias"]))
    return read + taps + sum(bytes_of(a[name]) for name in ("dx", "grad_state", "sums"))


def _last_inputs(a: Arguments) -> int:
    return 2 * bytes_of(a["state"])


def _differentiate_initial(a: Arguments) -> int:
    """Of a sequence, the S tokens from where the state begins."""
    batch, _, channels = a["x"].pointer.shape
    tokens = a["S"] - a["dinitial"].tokens + a["K"] * a["S"] - a["K"] * (a["K"] - 1) // 2
    read = tokens * batch * channels * a["x"].pointer.itemsize
    return 2 * bytes_of(a["dinitial"]) + read + batch * bytes_of(a["weight"])


def _roll(a: Arguments) -> int:
    """The state's oldest input is not read, and all of it is written."""
    batch, token = a["x"].pointer.shape[0], bytes_of(a["x"])
    parameters = bytes_of(a["weight"]) + bytes_of(a["bias"])
    moved = 2 * bytes_of(a["state"]) - bytes_of(a["state"]) // max(1, a["state"].tokens)
    return a["K"] * token + moved + bytes_of(a["output"]) + batch * parameters


_MODULE = "fulmen.ops.causal_conv1d.triton.kernels"
BYTES: Counts = {
    f"{_MODULE}.convolve": _convolve,
    f"{_MODULE}.last_inputs": _last_inputs,
    f"{_MODULE}.differentiate": _differentiate,
    f"{_MODULE}.differentiate_initial": _differentiate_initial,
    f"{_MODULE}.roll": _roll,
}
