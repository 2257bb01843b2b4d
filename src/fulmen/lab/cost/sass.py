"""The listing of a cubin: instructions, what ptxas tells the hardware about each, and loops.

ptxas schedules statically: bits of each 128-bit instruction say how long its warp stalls after it, which scoreboard is
set until its result is there (for instructions of variable latency) and until its operands are read, and which
scoreboards it waits for. So dependences are known without an analysis of registers.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

NO_SCOREBOARD = 7
SCOREBOARDS = 6


class Control(NamedTuple):
    stall: int  # clocks until the warp's next instruction, 1 at least
    result: int  # scoreboard that is set until the result is there, or NO_SCOREBOARD
    operands: int  # the same until the operands are read
    waits: tuple[int, ...]  # scoreboards that must be clear


class Instruction(NamedTuple):
    text: str
    opcode: str  # with its modifiers, "LDG.E.128"
    control: Control

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def predicated(self) -> bool:
        return self.text.startswith("@")


@dataclass(frozen=True)
class Loop:
    """Instructions from ``first`` to ``last``, which jumps back."""

    first: int
    last: int
    inner: tuple[Loop, ...]

    @property
    def size(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Code:
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # the instruction that each stands before

    @cached_property
    def end(self) -> int:
        """After the last instruction that every warp reaches."""
        after = self.loops[-1].last + 1 if self.loops else 0
        exits = (i for i in range(after, len(self.instructions)) if self._leaves(self.instructions[i]))
        return next(exits, len(self.instructions) - 1) + 1

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Those that no other one has inside it, in order."""
        last_of: dict[int, int] = {}
        for i, instruction in enumerate(self.instructions):
            if instruction.name == "BRA" and (target := re.search(r"`\((\.[\w.$]+)\)", instruction.text)):
                first = self.labels.get(target[1], i)
                if first < i - 3:  # the trap after the end jumps to itself
                    last_of[first] = i
        return _nested(sorted(last_of.items(), key=lambda loop: (loop[0], -loop[1])))

    @staticmethod
    def _leaves(instruction: Instruction) -> bool:
        return instruction.name == "EXIT" and not instruction.predicated


def _nested(loops: Sequence[tuple[int, int]]) -> tuple[Loop, ...]:
    found: list[Loop] = []
    while loops:
        (first, last), *rest = loops
        inner = [loop for loop in rest if loop[1] <= last]
        found.append(Loop(first, last, _nested(inner)))
        loops = [loop for loop in rest if loop[1] > last]
    return tuple(found)


_LABEL = re.compile(r"\s*(\.L[\w.$]+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND_HALF = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


def parse(listing: str) -> Code:
    """What ``nvdisasm -c -hex`` prints: each instruction and its lower half on a line, its upper half on the next."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    text = ""
    for line in listing.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            text = found[1].strip()
        elif text and (found := _SECOND_HALF.match(line)):
            opcode = _PREDICATE.sub("", text).split()[0]
            instructions.append(Instruction(text, opcode, _control(int(found[1], 16))))
            text = ""
    return Code(tuple(instructions), labels)


def _control(upper_half: int) -> Control:
    bits = upper_half >> 41
    waits = tuple(i for i in range(SCOREBOARDS) if bits >> 11 & 1 << i)
    return Control(max(bits & 15, 1), bits >> 5 & 7, bits >> 8 & 7, waits)


def disassemble(cubin: bytes) -> str:
    """By the nvdisasm that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", "-hex", file.name], capture_output=True, text=True, check=True).stdout
