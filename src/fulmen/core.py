"""The CPU core: finding and loading the library that `pip install` built."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import fulmen

_NAMES = {"win32": "fulmen_core.dll", "darwin": "libfulmen_core.dylib"}


@cache
def load() -> ctypes.CDLL | str:
    """The loaded core, or in one sentence why there is none."""
    name = _NAMES.get(sys.platform, "libfulmen_core.so")
    # The package may have several folders (an editable install keeps what was compiled apart from the source).
    for folder in fulmen.__path__:
        path = Path(folder) / name
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                return f"the CPU core could not be loaded: {error}"
    return "the CPU core was not built: no C++ compiler was found when fulmen was installed"


def isa() -> str | None:
    """The widest instruction set of this CPU that the core distinguishes; None without a core."""
    core = load()
    if isinstance(core, str):
        return None
    core.fulmen_cpu_isa.restype = ctypes.c_char_p
    name: bytes = core.fulmen_cpu_isa()
    return name.decode()
