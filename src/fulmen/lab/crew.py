"""Real processes, begun once, that form a group of each number of ranks and run what they are sent.

For the tests of :mod:`fulmen.distributed`, and for the suite that measures it.
"""

from __future__ import annotations

import io
import multiprocessing
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 180.0  # seconds: on a busy machine, processes take a minute to begin


class Crew:
    """``run(world, function, *args)`` calls ``function(group, *args)`` on each of the first ``world`` ranks, and gives
    what each returned; or what it raised, as a :class:`Raised`."""

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        # The server imports torch once; its children are forked before any thread is begun.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fulmen.distributed"])
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, meeting, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        for end in self._ends[:world]:
            end.send((world, function, args))
        return [_received(end, self._timeout + 30) for end in self._ends[:world]]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


class Raised(Exception):  # noqa: N818  (it is handed over as a result)
    """What a rank raised: its type's name and its message; the traceback is for who reads the test's output."""

    def __init__(self, kind: str, message: str, where: str) -> None:
        super().__init__(kind, message, where)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.args[2]}"


def _received(end: Connection, timeout: float) -> Any:
    try:
        if not end.poll(timeout):
            return Raised("TimeoutError", "the rank does not answer", "")
        return torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
    except EOFError:
        return Raised("EOFError", "the process has ended", "")


def _serve(rank: int, size: int, meeting: str, timeout: float, end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; who began these ends them
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=limit)
    groups = {world: dist.new_group(list(range(world)), timeout=limit) for world in range(1, size + 1)}
    while True:
        try:
            world, function, args = end.recv()
        except EOFError:
            return
        try:
            result = function(groups[world], *args)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        buffer = io.BytesIO()
        torch.save(result, buffer)
        end.send_bytes(buffer.getvalue())
