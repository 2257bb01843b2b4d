"""What a call of an operator does that :mod:`fulmen.runtime.replay` can do again: calls of the CPU core, and updates of
states in place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import increment_version

from fulmen.runtime.core_structs import Struct


@dataclass
class Recording:
    calls: list[tuple[Struct, bytes]] = field(default_factory=list)
    updated: list[Tensor] = field(default_factory=list)


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


@contextmanager
def recording() -> Iterator[Recording]:
    """A block of which a recording is made; one around it gets what it does, too."""
    outer, inner = _current.recording, Recording()
    _current.recording = inner
    try:
        yield inner
    finally:
        _current.recording = outer
        if outer is not None:
            outer.calls += inner.calls
            outer.updated += inner.updated


def note_call(call: Struct, packed: bytes) -> None:
    if _current.recording is not None:
        _current.recording.calls.append((call, packed))


def note_update(state: Tensor) -> None:
    """``state`` was updated in place, by means that torch does not know of."""
    if not state.is_inference():
        increment_version(state)  # so that autograd notices where the state was saved for a backward
    if _current.recording is not None:
        _current.recording.updated.append(state)
