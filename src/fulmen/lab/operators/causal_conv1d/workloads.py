"""The calls that dry runs make of the convolution, on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fulmen.lab.inspect.dry_run import Launch, dry_run
from fulmen.lab.inspect.inspection import Shape, Workload
from fulmen.lab.inspect.traffic import requested_bytes
from fulmen.lab.operators.causal_conv1d.traffic import BYTES
from fulmen.ops.causal_conv1d import triton as _backend
from fulmen.ops.causal_conv1d.problem import Convolution, Gradients, Step
from fulmen.runtime.architectures import Architecture

__all__ = ["BYTES", "WORKLOADS"]

TAPS = 4  # as models have it


def call(
    dtype: torch.dtype,
    channels: int,
    *,
    dense: str = "channels",
    state: bool = True,
    batch: int = 4,
    length: int = 8192,
) -> Convolution:
    """With SiLU, to be made in a dry run; ``dense`` is the dimension with stride 1."""
    if dense == "tokens":
        x = torch.empty(batch, channels, length, dtype=dtype).transpose(1, 2)
    else:
        x = torch.empty(batch, length, channels, dtype=dtype)
    weight, bias = torch.empty(channels, TAPS, dtype=dtype), torch.empty(channels, dtype=dtype)
    initial = torch.empty(batch, channels, TAPS, dtype=dtype) if state else None
    return Convolution(x, weight, bias, "silu", initial, None)


def gradients(p: Convolution) -> Gradients:
    initial = None if p.initial_state is None else torch.empty_like(p.initial_state)
    weight, bias = torch.empty(p.weight.shape), torch.empty(p.weight.shape[0])
    return Gradients(torch.empty_like(p.x), weight, bias, initial)


def causal_conv1d(launches: list[Launch], shape: Shape) -> Iterator[tuple[str, Launch]]:
    """Each kernel for either dense dimension, with states and without, at 48 channels for each key channel (6144 for
    128, as a large Mamba-2 has)."""
    for dense in ("channels", "tokens"):
        for state, name in ((False, ""), (True, ", states")):
            p = call(shape.dtype, 48 * shape.D, dense=dense, state=state)
            _backend.forward(p, torch.empty_like(p.x), p.initial_state)
            _backend.backward(p, p.x, p.initial_state, gradients(p))
            for launch in launches:
                yield f"conv {launch.kernel}, dense {dense}{name}", launch
            launches.clear()
    x = torch.empty(p.x.shape[0], p.x.shape[2], dtype=shape.dtype)
    assert p.initial_state is not None
    _backend.step(Step(x, p.initial_state, p.weight, p.bias, "silu"), torch.empty_like(x))
    yield "conv step", launches.pop()


WORKLOADS = (Workload("causal_conv1d", "kernel", ("none",), causal_conv1d),)


def traffic(architecture: Architecture, batch: int, length: int, channels: int) -> tuple[int, int]:
    """Bytes that forward and backward request (:mod:`fulmen.lab.inspect.traffic`), in bfloat16, without states."""
    with dry_run(architecture) as (launches, _):
        p = call(torch.bfloat16, channels, state=False, batch=batch, length=length)
        _backend.forward(p, torch.empty_like(p.x), None)
        forward = requested_bytes(launches)
        launches.clear()
        _backend.backward(p, p.x, None, gradients(p))
    return forward, requested_bytes(launches)
