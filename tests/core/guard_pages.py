"""Every native operator on tensors whose neighbours in memory no process may touch; run by test_guard_pages.py.

A read or a write beside a tensor's own rows ends the process. What runs is printed first, so that the last line says
where. The argument "touch" has the process do just that.
"""

import ctypes
import mmap
import sys
from contextlib import contextmanager
from math import prod

import torch

from fulmen.lab.fuzz.operators import SUBJECTS
from fulmen.lab.fuzz.problem import Problem, Setting
from fulmen.lab.fuzz.trial import in_double, results, tensors
from fulmen.lab.operators.causal_conv1d.cases import Case as Convolution
from fulmen.lab.operators.delta_rule.cases import Case as Delta
from fulmen.lab.operators.linear_attention.cases import Case as Attention
from fulmen.lab.operators.output_gate.checks import Case as Gate
from fulmen.lab.operators.tpa.checks import Case as Decode
from fulmen.lab.tolerances import deviations
from fulmen.runtime import core

NATIVE = Setting("native")
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
# A tensor in one piece, or each of its rows on a page of its own, right before or right after what is forbidden. Of
# "columns" the rows are those of the last two axes swapped.
PLACES = ("before", "after", "rows before", "rows after", "columns after")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A rest of every tile, and less than a vector.
SIZES = ((35, 21, 33), (2, 3, 1))


def forbid(memory, start, size):
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
    if LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0):
        raise OSError(ctypes.get_errno(), "mprotect")


def room(shape, dtype, place):
    """An uninitialised tensor of ``shape``."""
    if place.startswith("columns") and len(shape) > 1:
        return room((*shape[:-2], shape[-1], shape[-2]), dtype, "rows after").transpose(-1, -2)
    rows = prod(shape[:-1]) if place.startswith("rows") else 1
    used = prod(shape) // max(rows, 1) * dtype.itemsize
    pages = -(-used // PAGE)
    step = (pages + 1) * PAGE  # a row, and what is forbidden after it
    memory = mmap.mmap(-1, PAGE + max(rows, 1) * step)
    forbid(memory, 0, PAGE)
    for row in range(rows):
        forbid(memory, (row + 1) * step, PAGE)
    start = PAGE + (0 if place.endswith("after") else pages * PAGE - used)
    strides = [step // dtype.itemsize if place.startswith("rows") else shape[-1] if shape else 1, 1]
    for size in reversed(shape[1:-1]):
        strides.insert(0, strides[0] * size)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides[-len(shape) :], start // dtype.itemsize)


def guarded(x, place):
    if not x.is_floating_point() or x.ndim == 0 or x.numel() == 0:
        return x
    return room(tuple(x.shape), x.dtype, place).copy_(x)


@contextmanager
def guarded_results(place):
    """What the ops allocate for results, each in one piece, and the core's workspace, too."""
    place = place.split()[-1]
    new_empty, new_zeros, new = torch.Tensor.new_empty, torch.Tensor.new_zeros, core._Memory._new
    kept = core._Memory.KEPT_BYTES

    def allocate(x, *shape, dtype=None, **_):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        made = new_empty(x, shape, dtype=dtype)
        return made if made.numel() == 0 or made.ndim == 0 else room(shape, made.dtype, place).fill_(0)

    def workspace(self, size):
        return room((-(-size // self.ALIGNMENT) * self.ALIGNMENT,), torch.uint8, "before")

    torch.Tensor.new_empty, torch.Tensor.new_zeros = allocate, allocate
    core._Memory._new, core._Memory.KEPT_BYTES = workspace, 0
    try:
        yield
    finally:
        torch.Tensor.new_empty, torch.Tensor.new_zeros = new_empty, new_zeros
        core._Memory._new, core._Memory.KEPT_BYTES = new, kept


def problems(dtype):
    for length, key_size, value_size in SIZES[: 1 if dtype == torch.float16 else 2]:
        sizes = {"key_size": key_size, "value_size": value_size, "dtype": dtype}
        walk = sizes | {"batch": 1, "heads": (1, 2, 2)}
        for decays in ("none", "head", "token", "channel", "channel+value"):
            yield Problem("linear_attention", Attention(length=length, decays=decays, **walk))
            yield Problem("chunk_states", Attention(length=length, decays=decays, **walk | {"heads": (2, 2, 1)}))
            yield Problem("linear_attention_step", Attention(length=1, decays=decays, **walk))
        for decays in ("none", "token", "channel"):
            yield Problem("delta_rule", Delta(length=length, decays=decays, **walk))
            yield Problem("delta_rule_step", Delta(length=1, decays=decays, **walk))
        for width in (2, 4):
            yield Problem("causal_conv1d", Convolution(length=length, channels=key_size, width=width, dtype=dtype))
        yield Problem("causal_conv1d_step", Convolution(length=1, channels=key_size, dtype=dtype))
        for ranks in ((5, 1, 1), (3, 2, 2)):
            yield Problem("tpa_decode", Decode(tokens=length, ranks=ranks, **sizes))
        yield Problem("output_gated_attention", Gate(queries=length, keys=length + 3, **sizes))


def main():
    count = 0
    for dtype in DTYPES:
        for problem in problems(dtype):
            for isa in core.core.builds:
                with core.core.using(isa):
                    usual = in_double(results(problem, {n: x.clone() for n, x in tensors(problem).items()}, NATIVE))
                    for place in PLACES:
                        print(isa, place, problem, flush=True)
                        given = {name: guarded(x, place) for name, x in tensors(problem).items()}
                        with guarded_results(place):
                            found = results(problem, given, NATIVE)
                        assert not (wrong := deviations(found, usual, "native")), wrong
                        count += 1
    assert {problem.operator for problem in problems(torch.float32)} == set(SUBJECTS)
    print(f"{count} calls", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["touch"]:
        x = room((3, 5), torch.float32, "rows before")
        x.fill_(1.0)
        print("all rows written", x.sum().item(), flush=True)
        print(torch.as_strided(x, (1,), (1,), x.storage_offset() + 5))  # one element after the first row
    else:
        torch.set_num_threads(1)
        main()
