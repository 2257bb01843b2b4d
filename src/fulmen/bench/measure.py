"""Measuring calls: time, interleaved so that a noisy neighbour hits all alike, and peak memory."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Seconds."""

    median: float
    p20: float
    p80: float


def interleaved(calls: dict[str, Callable[[], object]], seconds: float, repeats: int = 3) -> dict[str, Timing]:
    """Time every call in turn, again and again, for about ``seconds`` and at least ``repeats`` rounds."""
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < repeats:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return {name: _summary(taken) for name, taken in samples.items()}


def _summary(samples: list[float]) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that ``call`` held at once on the CPU, its result included, by torch's own account."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    with _silent_stderr():
        profiler.start()
    result = call()
    with _silent_stderr():
        profiler.stop()
    del result
    current = peak = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """torch's profiler writes a line to the error output whenever it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
