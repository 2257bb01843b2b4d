"""Measuring calls: time, interleaved so that a noisy neighbour hits all alike, and memory."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fulmen.runtime.torch_private import memory_events

Call = Callable[[], object]
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_kept = False


class Timing(NamedTuple):
    """Seconds."""

    median: float
    p20: float
    p80: float


class Usage(NamedTuple):
    """Bytes that a call allocated: the most at once, its result included, and what its result still held."""

    peak: int
    held: int


def seconds_of(call: Call, device: str = "cpu") -> float:
    """The time of one call, until the device is done."""
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds_on_cuda(call: Call) -> float:
    """The time of one call on the GPU, from caches without its data, as triton's do_bench takes it."""
    torch.empty(256 << 20, dtype=torch.int8, device="cuda").zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def interleaved(
    calls: dict[str, Call], seconds: float, repeats: int = 3, clock: Callable[[Call], float] = seconds_of
) -> dict[str, Timing]:
    """:func:`in_turns`, after a call of each to warm up."""
    for call in calls.values():
        call()
    return in_turns(calls, seconds, repeats, clock)


def in_turns(calls: dict[str, Call], seconds: float, repeats: int, clock: Callable[[Call], float]) -> dict[str, Timing]:
    """Time every call in turn, again and again, for about ``seconds`` and at least ``repeats`` rounds."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < repeats:
        for name, call in calls.items():
            samples[name].append(clock(call))
    return {name: _summary(taken) for name, taken in samples.items()}


def _summary(samples: list[float]) -> Timing:
    """Each is the time of a call: between two there is no mean, but for the median the lower."""
    ordered, fifth = sorted(samples), len(samples) // 5
    return Timing(statistics.median_low(ordered), ordered[fifth], ordered[-1 - fifth])


def memory_use(call: Call, device: str = "cpu") -> Usage:
    """By torch's own account, which includes what the CPU core and the kernels are given to work in."""
    return _use_on_cuda(call) if device == "cuda" else _use_on_cpu(call)


def peak_bytes(call: Call) -> int:
    """The most memory that ``call`` held at once on the CPU, its result included."""
    return memory_use(call).peak


def _use_on_cuda(call: Call) -> Usage:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return Usage(peak, held)


def _use_on_cpu(call: Call) -> Usage:
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    with _silent_stderr():
        profiler.start()
    result = call()
    with _silent_stderr():
        profiler.stop()
    del result
    current = peak = 0
    for event in sorted(memory_events(profiler), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return Usage(peak, current)


def keep_freed_memory() -> None:
    """Tell the C library not to give freed memory back to the system, and so not to ask for it again in every call.

    Otherwise columns that allocate are timed with the page faults of the moment, which differ from run to run. Nothing
    takes it back.
    """
    global _kept
    _kept = True
    if libc := _glibc():
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def keeps_freed_memory() -> bool:
    """Whether :func:`keep_freed_memory` was called in this process."""
    return _kept


def release_freed_memory() -> None:
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def available_bytes(device: str) -> int:
    """The memory that can still be taken without swapping."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
