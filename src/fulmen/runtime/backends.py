"""Which backends there are, which of them work on this machine, and which one a call gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from fulmen.runtime import core
from fulmen.runtime.architectures import interpreted, why_unsupported
from fulmen.runtime.availability import why_triton_is_unavailable
from fulmen.runtime.operators import backends_of
from fulmen.runtime.warning import warn_once

_HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_UNAVAILABLE = why_triton_is_unavailable()


@dataclass(frozen=True)
class Backend:
    """One way to run the operators, and whether it can run here.

    Attributes:
        name: what to pass as ``backend=``.
        available: whether it works on this machine.
        reason: why not, in one sentence; empty where it does.
        devices: the device types it takes, or ("any",).
        dtypes: the dtypes of q, k and v it takes.
        auto: how it runs ``schedule="auto"``.
    """

    name: str
    available: bool
    reason: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    auto: str

    def __repr__(self) -> str:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        works = f"{'/'.join(self.devices)}; {dtypes}" if self.available else f"unavailable: {self.reason}"
        return f"<Backend {self.name}: {works}>"

    def refuses(self, device: str, dtype: torch.dtype) -> str:
        """Why this backend cannot take tensors of ``dtype`` on ``device``; empty if it can."""
        if not self.available:
            return self.reason
        if self.devices != ("any",) and device not in self.devices:
            return f"it runs on {' and '.join(self.devices)} tensors, not on {device}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        return ""


_BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            name="native",
            available=core.core is not None,
            reason=core.why_unavailable,
            devices=("cpu",),
            dtypes=_HALF_AND_SINGLE,
            auto="one task per head; fewer heads than threads: slices of E, then segments of N",
        ),
        Backend(
            name="triton",
            available=not _TRITON_UNAVAILABLE,
            reason=_TRITON_UNAVAILABLE,
            devices=("cpu",) if interpreted() else ("cuda",),
            dtypes=_HALF_AND_SINGLE,
            auto="chunks walked in segments, as few as fill the card",
        ),
        Backend(
            name="torch",
            available=True,
            reason="",
            devices=("any",),
            dtypes=(*_HALF_AND_SINGLE, torch.float64),
            auto="chunks of 64 tokens, in segments that stay in cache (CPU) or fill the card",
        ),
        Backend(
            name="reference",
            available=True,
            reason="",
            devices=("any",),
            dtypes=(*_HALF_AND_SINGLE, torch.float64),
            auto="the recurrence, token by token, for every schedule: the specification, and slow",
        ),
    )
}
# What backend="auto" tries, in this order, and what it should find on a device.
_PREFERENCE = ("native", "triton", "torch")
_FASTEST = {"cpu": "native", "cuda": "triton"}


def backends() -> dict[str, Backend]:
    """All backends by name, the unavailable ones with the reason why.

    >>> fulmen.backends()["torch"].available
    True
    """
    return dict(_BACKENDS)


def choose(backend: str, device: torch.device, dtype: torch.dtype, operator: str = "") -> str:
    """The backend that a call with tensors of ``dtype`` on ``device`` runs on. ``operator`` names one that has not all
    of them."""
    chosen = _chosen if torch.compiler.is_compiling() else _remembered
    return chosen(backend, device, dtype, operator)


def _chosen(backend: str, device: torch.device, dtype: torch.dtype, operator: str) -> str:
    call = device, dtype, operator
    if backend == "auto":
        chosen = next(name for name in _PREFERENCE if not _refusal(name, *call))
        fastest = _FASTEST.get(device.type)
        if chosen == "torch" and fastest and dtype in _HALF_AND_SINGLE and not torch.compiler.is_compiling():
            reason = _refusal(fastest, *call)
            warn_once(f"the torch backend serves {device.type} tensors, several times slower: {reason}")
        return chosen
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, _BACKENDS))}; got {backend!r}")
    if refusal := _refusal(backend, *call):
        raise ValueError(f"backend {backend!r} cannot run this call: {refusal}")
    return backend


_remembered = cache(_chosen)


def _refusal(name: str, device: torch.device, dtype: torch.dtype, operator: str) -> str:
    if operator and name not in backends_of(operator):
        return f"{operator} has no {name} backend"
    refusal = _BACKENDS[name].refuses(device.type, dtype)
    if name == "triton" and device.type == "cuda" and not refusal and not torch.compiler.is_compiling():
        refusal = why_unsupported(device)  # asked here and not at import: asking starts CUDA
    return refusal
