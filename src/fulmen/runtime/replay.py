"""Calls like one that was made before, made again without describing them again.

Of a small call, most of the time goes into what is the same every time: checks, the choice of a backend, shapes,
strides and options for the CPU core. All of it follows from the *signature* of the arguments: every attribute of a
tensor but its values, and all else as it is. So the first call with a signature is recorded, and where it was a single
call of the core on the arguments themselves, further ones only put new addresses into the same words.

What needs more than the core (gradients, autocast, torch.func, torch.compile, modes, profilers, subclasses, other
devices) has no signature, and a call that copies an argument is not replayed: both take the long way each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from fulmen.runtime import core
from fulmen.runtime.core_structs import HEADER, Struct, Words
from fulmen.runtime.recording import Recording, note_update, recording
from fulmen.runtime.torch_private import is_plain, thread_is_plain

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_REMEMBERED = 4096
_HEADER_WORDS, _HEADER_POINTERS = len(HEADER.format), len(HEADER.pointers)


class Replay(NamedTuple):
    """A call of the core that lacks nothing but addresses."""

    call: Struct
    words: Words  # after the header, which is of the thread that calls
    addresses: list[tuple[int, int]]  # the word, and which of the tensors: the arguments first, then the results
    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    several: bool  # whether the results are a tuple
    updated: list[int]  # of the arguments

    @classmethod
    def of(
        cls, recorded: Recording, arguments: list[Tensor], result: Tensor | tuple[Tensor, ...]
    ) -> Replay | Literal[False] | None:
        """What does the same for other arguments of this signature; False if nothing does, and None if these do not
        tell."""
        if len(recorded.calls) != 1:
            return False
        ((call, packed),) = recorded.calls
        results = list(result) if isinstance(result, tuple) else [result]
        tensors = [(x.data_ptr(), i) for i, x in enumerate(arguments + results) if x.data_ptr()]
        of_address = dict(tensors)
        words = call.unpack(packed)
        pointers = [word for word in call.pointers[_HEADER_POINTERS:] if words[word]]
        if len(of_address) < len(tensors):
            return None  # two tensors at one address: which of them does a word mean?
        if any(words[word] not in of_address for word in pointers):
            return False  # something was copied for the call
        used = {of_address[int(words[word])] for word in pointers}
        if any(x.numel() and i not in used for i, x in enumerate(results, len(arguments))):
            return False  # the call does not write this result
        return cls(
            call,
            words[_HEADER_WORDS:],
            [(word, of_address[int(words[word])]) for word in pointers],
            [(x.shape, x.stride(), x.dtype) for x in results],
            isinstance(result, tuple),
            [i for i, x in enumerate(arguments) if any(x is y for y in recorded.updated)],
        )

    def __call__(self, arguments: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
        results = [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in self.results]
        tensors = arguments + results
        words = [*core.header(self.call), *self.words]
        for word, i in self.addresses:
            words[word] = tensors[i].data_ptr()
        try:
            core.require().run(self.call, self.call.pack_words(words))
        finally:  # a warning that is an error comes when states have been updated
            for i in self.updated:
                note_update(arguments[i])
        return tuple(results) if self.several else results[0]


def replayed(function: _Function) -> _Function:
    """A public function whose calls are replayed where they can be."""
    known: dict[object, Replay | Literal[False]] = {}  # by signature; False: the long way each time

    def recorded(signature: object, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with recording() as made:
            result = function(*args, **kwargs)
        replay = Replay.of(made, tensors, result)
        if replay is not None:
            if len(known) >= _MOST_REMEMBERED:
                known.clear()
            known[signature] = replay
        return result

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not thread_is_plain():
            return function(*args, **kwargs)
        signature, tensors = _signature(args, kwargs)
        try:
            replay = known.get(signature) if signature else False
        except (TypeError, RuntimeError):  # something without a hash
            replay = False
        if replay is None:
            return recorded(signature, tensors, args, kwargs)
        if replay:
            try:
                return replay(tensors)
            except core.RefusedError:  # for the values of cu_seqlens or seqlens: the long way says what is wrong
                pass
        return function(*args, **kwargs)

    return cast(_Function, call)


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[object, ...], list[Tensor]]:
    """The signature of arguments, and the tensors among them. It is empty where one of these is not plain."""
    # Beside the arguments, what the descriptions of calls read.
    signature = [torch.are_deterministic_algorithms_enabled(), len(args), *kwargs]
    tensors = []
    for x in (*args, *kwargs.values()):
        if not isinstance(x, Tensor):
            signature += type(x), x
        elif is_plain(x):
            signature += x.shape, x.stride(), x.dtype
            tensors.append(x)
        else:
            return (), []
    return tuple(signature), tensors
