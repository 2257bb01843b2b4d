"""What a launch does, from Triton's own code (TTIR) and the arguments of the launch: how often its loops run, and which
operands it reads and writes.

TTIR is one function whose scalars are arithmetic on arguments and the program's number, so the bounds of its loops can
be computed. They are those of the program in the middle of the grid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fulmen.lab.inspect.dry_run import Launch, Operand  # with Triton, which not everybody has


@dataclass(frozen=True)
class Trips:
    """Of one loop; ``count`` is None where a tensor's values decide it."""

    count: int | None
    lines: int
    inner: tuple[Trips, ...]


@dataclass(frozen=True)
class Work:
    """
    Attributes:
        loops: those that no other has inside it, in order.
        bytes: of all operands once: of those that are read, and of those that are written.
        tokens: of all heads, of the operand that has most; 0 where there is none with tokens.
    """

    loops: tuple[Trips, ...]
    bytes: int
    tokens: int


def work_of(launch: Launch, ttir: str) -> Work:
    """The work of a launch of a function that was compiled to ``ttir``."""
    function, given = _Function(ttir, _values(launch), launch.grid), launch.arguments
    # Where segments are walked one by one, a launch has its part of the operands; where they are carried, all.
    partly = "walked" in given and not given["CARRY"]
    walked, segments = (given["walked"], given["segments"]) if partly else (1, 1)
    return Work(function.loops, function.bytes * walked // segments, tokens_of(given) * walked // segments)


def tokens_of(arguments: Mapping[str, Any]) -> int:
    """Tokens are operands ``[B, N, heads, …]`` or ``[B, N, channels]`` with strides of their own. Operands may have
    other heads than the launch: fewer, which are shared, or one for each tile of a head."""
    length, heads = arguments.get("length"), arguments.get("heads", 1)
    counts = [
        prod(x.pointer.shape[:2]) * (heads if hasattr(x, "head") else 1)
        for x in arguments.values()
        if hasattr(x, "token") and x.pointer is not None and len(x.pointer.shape) > 2
        if length in (None, x.pointer.shape[1])
    ]
    return max(counts, default=0)


def _values(launch: Launch) -> list[Any]:
    """Of the compiled function's parameters: all arguments, those in tuples one by one, that are not constants."""

    def flat(kind: Any, value: Any) -> Iterator[Any]:
        if isinstance(kind, tuple):
            for one, part in zip(kind, value, strict=True):
                yield from flat(one, part)
        elif kind != "constexpr":
            yield value

    return [value for name, kind in launch.signature.items() for value in flat(kind, launch.arguments[name])]


def _quotient(a: int, b: int) -> int:
    """Towards zero, as the hardware divides."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": _quotient,
    "divui": lambda a, b: a // b,
    "remsi": lambda a, b: a - b * _quotient(a, b),
    "remui": lambda a, b: a % b,
    "ceildivsi": lambda a, b: -(-a // b),
    "floordivsi": lambda a, b: a // b,
    "minsi": min,
    "maxsi": max,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
    "shli": lambda a, b: a << b,
    "shrsi": lambda a, b: a >> b,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    **dict.fromkeys(("slt", "ult"), lambda a, b: a < b),
    **dict.fromkeys(("sle", "ule"), lambda a, b: a <= b),
    **dict.fromkeys(("sgt", "ugt"), lambda a, b: a > b),
    **dict.fromkeys(("sge", "uge"), lambda a, b: a >= b),
}


class _Definition(NamedTuple):
    operation: str  # "arith.addi", "tt.load", ...
    operands: tuple[str, ...]
    rest: str  # the text after the operation's name


_ACCESSES = ("tt.load", "tt.store", "tt.descriptor_load", "tt.descriptor_store")
_LINE = re.compile(r"\s*(?:(%[\w#]+)(?::\d+)? = )?\"?([a-z_]+\.[\w.]+)\"?(.*)")
_FOR = re.compile(r"(%\w+) = (%\w+) to (%\w+) step (%\w+)")
_NAME = re.compile(r"%\w+")


class _Function:
    """TTIR has one operation on a line, and ends a block with a line that begins with a brace."""

    def __init__(self, ttir: str, values: list[Any], grid: tuple[int, int, int]) -> None:
        self.grid = grid
        self.known: dict[str, int | None] = {}
        self.definitions: dict[str, _Definition] = {}
        self.carried: dict[str, str] = {}  # what a loop hands on: what it begins with
        self.pointers: dict[str, Operand] = {}
        accessed: set[tuple[str, str]] = set()
        lines = ttir.splitlines()
        for line in lines:
            found = _LINE.match(line)
            if found is None:
                continue
            name, operation, rest = found.groups()
            if operation == "tt.func":
                self._declare(rest, values)
            elif operation == "scf.for":
                self.carried |= dict(re.findall(r"(%\w+) = (%\w+)", rest.partition("iter_args")[2]))
            elif operation in _ACCESSES and (operand := self._operand(_NAME.findall(rest)[0])):
                accessed.add((operation, operand))
            if name:
                self.definitions[name] = _Definition(operation, tuple(_NAME.findall(rest)), rest)
        self.loops = self._loops(lines)
        sizes = {name: prod(x.shape) * x.itemsize for name, x in self.pointers.items()}
        self.bytes = sum(sizes[operand] for _, operand in accessed)

    def _declare(self, rest: str, values: list[Any]) -> None:
        parameters = re.findall(r"(%\w+): ", rest)
        for name, value in zip(parameters, values, strict=True):
            if hasattr(value, "itemsize"):
                self.pointers[name] = value
            else:
                self.known[name] = value if isinstance(value, int) else None

    def _operand(self, name: str) -> str | None:
        """The parameter that a pointer points into."""
        while name not in self.pointers:
            if name in self.carried:
                name = self.carried[name]
            elif name in self.definitions and self.definitions[name].operands:
                name = self.definitions[name].operands[0]  # of an addition, the pointer comes first
            else:
                return None
        return name

    def _loops(self, lines: list[str]) -> tuple[Trips, ...]:
        """By indentation: a loop ends with the brace that stands where it began."""
        found = []
        i = 0
        while i < len(lines):
            line = lines[i]
            if match := re.match(r"(\s*)(?:%[\w#]+(?::\d+)? = )?scf\.(for|while)\b", line):
                end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith(f"{match[1]}}}"))
                count = self._count(line) if match[2] == "for" else None
                found.append(Trips(count, end - i, self._loops(lines[i + 1 : end])))
                i = end
            i += 1
        return tuple(found)

    def _count(self, line: str) -> int | None:
        match = _FOR.search(line)
        first, last, step = (self._value(name) for name in match.groups()[1:]) if match else (None, None, None)
        if first is None or last is None or step is None:
            return None
        return max(0, -(-(last - first) // step))

    def _value(self, name: str) -> int | None:
        if name not in self.known:
            self.known[name] = self._computed(name)
        return self.known[name]

    def _computed(self, name: str) -> int | None:
        definition = self.definitions.get(name)
        if definition is None:
            return None
        dialect, _, operation = definition.operation.partition(".")
        rest, operands = definition.rest, definition.operands
        if operation == "constant":
            first = rest.split()[0]
            return int(first) if re.fullmatch(r"-?\d+", first) else {"true": 1, "false": 0}.get(first)
        if operation == "get_program_id":
            return self.grid["xyz".index(rest.split()[0])] // 2
        if operation == "get_num_programs":
            return self.grid["xyz".index(rest.split()[0])]
        if dialect != "arith":
            return None
        values = [self._value(operand) for operand in operands]
        if operation in ("extsi", "extui", "trunci", "index_cast"):
            return values[0]
        if operation == "select":
            return None if values[0] is None else values[1 if values[0] else 2]
        if operation == "minsi" and None in values:  # what a tensor limits counts as not limited
            return next((value for value in values if value is not None), None)
        if len(values) != 2 or values[0] is None or values[1] is None:
            return None
        if operation == "cmpi":
            return int(_COMPARISONS[rest.split()[0].rstrip(",")](values[0], values[1]))
        return _ARITHMETIC[operation](values[0], values[1]) if operation in _ARITHMETIC else None
