"""Where the library of the CPU core is, or why there is none that can be loaded."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

_NAMES = {"win32": "fulmen_core.dll", "darwin": "libfulmen_core.dylib"}
NAME = _NAMES.get(sys.platform, "libfulmen_core.so")
# Written by CMakeLists.txt in every installation: "built", or why the core was not.
RECORD = "core_build.txt"
_SEGMENT_BYTES = 56  # of an entry in an ELF file's table of segments


def find(folders: list[Path]) -> Path | str:
    """The library in one of the package's folders, or in one sentence why there is none.

    A package may have several folders: an editable install keeps what was compiled apart from the source.
    """
    for folder in folders:
        path = folder / NAME
        if path.is_file():
            return _why_damaged(path) or path
    for folder in folders:
        if (folder / RECORD).is_file():
            record = (folder / RECORD).read_text().strip()
            if record != "built":
                return f"the CPU core was not built, because {record} when fulmen was installed"
            return f"the CPU core is gone: {NAME}, which was built when fulmen was installed, is not in {folder}"
    return "the CPU core was not built, because fulmen was not installed with pip"


def named(path: Path) -> Path | str:
    """The library that FULMEN_CORE names, as a whole path: the loader would search its folders for a bare name."""
    path = path.absolute()
    if not path.is_file():
        return f"the CPU core cannot be loaded: {path}, which FULMEN_CORE names, is not a file"
    return _why_damaged(path) or path


def _why_damaged(path: Path) -> str:
    """Loading an ELF file that ends too early kills the process: compare its size with what its header says."""
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01" or len(header) < 64:  # 64 bits, little-endian; others are left to dlopen
            return ""
        segments, sections = struct.unpack_from("<QQ", header, 32)
        segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", header, 54)
        if segment_size != _SEGMENT_BYTES:  # dlopen refuses it
            return ""
        file.seek(segments)
        table = file.read(segment_size * segment_count)
    ends = [sections + section_size * section_count, segments + segment_size * segment_count]
    for start in range(0, len(table) - _SEGMENT_BYTES + 1, _SEGMENT_BYTES):
        offset, _, _, length = struct.unpack_from("<4Q", table, start + 8)
        ends.append(offset + length)
    size = path.stat().st_size
    return f"the CPU core is damaged: {path} has {size} of {max(ends)} bytes" if size < max(ends) else ""
