"""Several calls of the CPU core that are made as one, again and again, on tensors that may be elsewhere each time.

A :class:`Trace` notes the calls of a function as they are made, and of each address in them in which tensor it is:
one of the arguments, or one that the function has made on the way. A :class:`Program` makes the same calls on others:
those it is given, the result, and one piece of memory for all that is in between.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.runtime import core
from fulmen.runtime.core_structs import HEADER, PATCH, PROGRAM, Struct, Words
from fulmen.runtime.recording import Recording, note_update

_ALIGNMENT = 64
_HEADER_POINTERS = len(HEADER.pointers)


class _Memory(NamedTuple):
    """Addresses that belong to a tensor."""

    begin: int
    end: int
    tensor: int


class _Address(NamedTuple):
    """A word of a call, and where that is: ``offset`` bytes into a tensor."""

    call: int
    word: int
    tensor: int
    offset: int


class Trace:
    """Of a function of ``arguments``. ``complete`` is whether calls of the core are all that it does, but for views;
    who calls the function says so, too."""

    def __init__(self, arguments: list[Tensor]) -> None:
        self.complete = True
        self._arguments = arguments
        self._made: list[Tensor] = []  # kept, so that no two of them have the same memory
        self._calls: list[tuple[Struct, Words]] = []
        self._addresses: list[_Address] = []
        self._updated: list[Tensor] = []
        self._memory: list[_Memory] = []
        for i, x in enumerate(arguments):
            self._own(i, x.data_ptr(), _bytes_of(x))

    def _own(self, tensor: int, begin: int, size: int) -> None:
        end = begin + size
        if size and any(begin < other.end and other.begin < end for other in self._memory):
            self.complete = False  # memory of two: which of them does an address mean?
        self._memory.append(_Memory(begin, end, tensor))

    def add(self, recorded: Recording, results: list[Tensor]) -> None:
        """Calls that were made just now, and what they have written beside their arguments."""
        new = set()
        for x in results:
            if any(x is y for y in self._arguments):
                self.complete = False  # written in place, other than a state: torch would know of it
            elif x.numel() and not any(x is y for y in self._made):
                new.add(len(self._arguments) + len(self._made))
                self._own(max(new), x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
                self._made.append(x)
        addresses = []
        for i, (call, packed) in enumerate(recorded.calls, len(self._calls)):
            words = call.unpack(packed)
            self._calls.append((call, words))
            for word in call.pointers[_HEADER_POINTERS:]:
                address = int(words[word])
                owner = next((m for m in self._memory if m.begin <= address < m.end), None)
                if owner is not None:
                    addresses.append(_Address(i, word, owner.tensor, address - owner.begin))
                elif address:
                    self.complete = False  # something was copied for the call
        if not new <= {address.tensor for address in addresses}:
            self.complete = False  # the calls do not write this result
        self._addresses += addresses
        self._updated += recorded.updated

    def program(self, result: Tensor) -> Program | None:
        """What does the same for other arguments like these; None if nothing does."""
        storages = [x.untyped_storage().data_ptr() for x in self._made]
        begin = result.data_ptr()
        if not self.complete or begin not in storages or result.untyped_storage().nbytes() != _bytes_of(result):
            return None
        given, of_result = len(self._arguments), storages.index(begin)
        places, size = [], 0  # in the memory for what is in between
        for x in self._made:
            places.append(size)
            size += -(-x.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        addresses = []
        for address in self._addresses:
            made = address.tensor - given
            if made == of_result:
                address = address._replace(tensor=given)
            elif made >= 0:
                address = address._replace(tensor=given + 1, offset=places[made] + address.offset)
            addresses.append(address)
        updated = [i for i, x in enumerate(self._arguments) if any(x is y for y in self._updated)]
        return Program(given, self._calls, addresses, result, size, updated)


class Program:
    """Calls of the core that lack nothing but addresses."""

    def __init__(
        self,
        given: int,
        calls: list[tuple[Struct, Words]],
        addresses: list[_Address],
        result: Tensor,
        between: int,
        updated: list[int],
    ) -> None:
        """``given`` tensors, then the result, and then ``between`` bytes are what the addresses are of."""
        number = core.require().call_number
        words = b"".join(
            struct.pack("=q", number(call.name.removesuffix("_call").encode())) + call.pack_words(of_call)
            for call, of_call in calls
        )
        patches = b"".join(PATCH.pack(**address._asdict()) for address in addresses)
        self._kept = words, patches  # the program has their addresses
        self._program = PROGRAM.pack(
            bytes=PROGRAM.size,
            calls=len(calls),
            words=_address_of(words),
            patches=len(addresses),
            patch=_address_of(patches),
        )
        self._result = result.shape, result.stride(), result.dtype
        self._between, self._updated = between, updated
        self._pack = struct.Struct(f"={given + 2}Q").pack

    def __call__(self, arguments: list[Tensor]) -> Tensor:
        shape, stride, dtype = self._result
        result = torch.empty_strided(shape, stride, dtype=dtype)
        between = torch.empty(self._between, dtype=torch.uint8)
        addresses = [x.data_ptr() for x in arguments]
        try:
            core.require().run_program(self._program, self._pack(*addresses, result.data_ptr(), between.data_ptr()))
        finally:  # a warning that is an error comes when states have been updated
            for i in self._updated:
                note_update(arguments[i])
        return result


def _bytes_of(x: Tensor) -> int:
    """From the first element to the last."""
    if not x.numel():
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
