"""Calls of the CPU core that are under way when the interpreter ends.

A call holds no lock of Python's. If the main thread returned while a daemon thread is in one, the tensors that it reads
and writes would be freed under it. So the interpreter waits for calls that have begun, and afterwards none begins in
any other thread than the one that ends the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

_calls: list[None] = []  # one for each: appending and popping are single steps, which threads share safely
_ending = False


def begin() -> None:
    """Before a call."""
    _calls.append(None)
    if _ending and threading.current_thread() is not threading.main_thread():
        end()
        threading.Event().wait()  # for the end of the process


end = _calls.pop  # after it


def _wait() -> None:
    global _ending
    _ending = True
    while _calls:
        time.sleep(1e-4)


atexit.register(_wait)
os.register_at_fork(after_in_child=_calls.clear)  # a child has none of the parent's other threads
