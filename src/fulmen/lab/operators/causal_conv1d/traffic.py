"""Bytes that one launch of each kernel of the convolution requests (:mod:`fulmen.lab.inspect.traffic`)."""

from __future__ import annotations

from math import ceil

from fulmen.lab.inspect.traffic import Arguments, Counts, bytes_of


def _windows(a: Arguments, chunks: int) -> int:
    """z of every token once: it reads K inputs, and a chunk all weights."""
    taps = bytes_of(a["weight"]) + bytes_of(a["bias"])
    return a["K"] * bytes_of(a["x"]) + chunks * taps


def _chunks(a: Arguments) -> int:
    batch, length, _ = a["x"].pointer.shape
    return batch * ceil(length / a["T"])


def _convolve(a: Arguments) -> int:
    return _windows(a, _chunks(a)) + bytes_of(a["output"])


def _differentiate(a: Arguments) -> int:
    """dz is recomputed for each of the K tokens that read an input, and dweight reads the inputs once more."""
    dz = bytes_of(a["grad"]) + (_windows(a, _chunks(a)) if a["ACTIVATION"] else 0)
    sums = bytes_of(a["sums"]) and a["K"] * bytes_of(a["x"]) + bytes_of(a["sums"])
    weights = _chunks(a) * bytes_of(a["weight"])
    return a["K"] * dz + weights + bytes_of(a["dx"]) + bytes_of(a["grad_state"]) + sums


def _last_inputs(a: Arguments) -> int:
    return 2 * bytes_of(a["state"])


def _differentiate_initial(a: Arguments) -> int:
    """Of a sequence, the first K - 1 tokens count for it."""
    batch, _, channels = a["x"].pointer.shape
    read = a["K"] * a["K"] * batch * channels * a["x"].pointer.itemsize
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
