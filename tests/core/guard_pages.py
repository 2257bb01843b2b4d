"""Every native operator on tensors whose neighbours in memory no process may touch; run by test_guard_pages.py.

A read or a write beside a tensor's own rows ends the process. What runs is printed first, so that the last line says
where. The argument "short" is for a selection, and "touch" has the process do just that.
"""

import ctypes
import mmap
import sys
from contextlib import ExitStack, contextmanager
from itertools import islice, product
from math import prod
from unittest.mock import patch

import torch

from fulmen.lab.fuzz.operators import SUBJECTS
from fulmen.lab.fuzz.problem import Problem, Setting, written
from fulmen.lab.fuzz.trial import in_double, results, tensors
from fulmen.lab.operators.causal_conv1d.cases import Case as Convolution
from fulmen.lab.operators.delta_rule.cases import Case as Delta
from fulmen.lab.operators.linear_attention.cases import Case as Attention
from fulmen.lab.operators.output_gate.checks import Case as Gate
from fulmen.lab.operators.tpa.checks import Case as Decode
from fulmen.lab.tolerances import deviations
from fulmen.nn.native_matmul import matmul
from fulmen.nn.norms import formula, rms_norm
from fulmen.ops.chunks.validation import SCHEDULES
from fulmen.ops.tpa.validation import SPLITS
from fulmen.runtime import core

PAGE = mmap.PAGESIZE
empty_strided = torch.empty_strided
LIBC = ctypes.CDLL(None, use_errno=True)
# A tensor in one piece, or each of its rows on a page of its own, right before or right after what is forbidden. Of
# "columns" the rows are those of the last two axes swapped.
PLACES = ("before", "after", "rows before", "rows after", "columns after")
# The sums over tokens of a convolution: what the core writes is float32, and becomes another tensor.
CONVERTED = {"dweight", "dbias"}
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
    if x.ndim == 0 or x.numel() == 0:
        return x
    return room(tuple(x.shape), x.dtype, place).copy_(x)


class GuardedMemory:
    """Inside, what the ops allocate for results lies between forbidden pages, and so do the core's workspace and
    tensors of offsets."""

    def __init__(self, place):
        self.end = place.split()[-1]
        self.ranges = []

    def holds(self, x):
        first = x.data_ptr()
        return x.numel() == 0 or any(start <= first < stop for start, stop in self.ranges)

    def strided(self, size, stride, dtype):
        size, stride = tuple(size), tuple(stride)
        if prod(size) == 0 or not size:
            return empty_strided(size, stride, dtype=dtype)
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        flat = room((last + 1,), dtype, self.end).fill_(0)
        self.ranges.append((flat.data_ptr(), flat.data_ptr() + flat.nbytes))
        return flat.as_strided(size, stride, flat.storage_offset())

    def like(self, made):
        return self.strided(made.shape, made.stride(), made.dtype)

    @contextmanager
    def used(self):
        def of(allocate):
            return lambda *args, **options: self.like(allocate(*args, **options))

        def workspace(memory, size):
            return room((-(-size // memory.ALIGNMENT) * memory.ALIGNMENT,), torch.uint8, "before")

        with ExitStack() as patches:
            for owner, name in ((torch.Tensor, "new_empty"), (torch.Tensor, "new_zeros"), (torch, "empty_like")):
                patches.enter_context(patch.object(owner, name, of(getattr(owner, name))))
            offsets = torch.tensor
            patches.enter_context(patch.object(torch, "empty_strided", self.strided))
            patches.enter_context(patch.object(torch, "tensor", lambda *x, **y: guarded(offsets(*x, **y), self.end)))
            patches.enter_context(patch.multiple(core._Memory, _new=workspace, KEPT_BYTES=0))
            yield


def problems(dtype):
    for length, key_size, value_size in SIZES[: 1 if dtype == torch.float16 else 2]:
        sizes = {"key_size": key_size, "value_size": value_size, "dtype": dtype}
        walk = sizes | {"batch": 1, "heads": (1, 2, 2)}
        packed = (0, length - 1, 1)
        for decays in ("none", "head", "token", "channel", "channel+value"):
            yield Problem("linear_attention", Attention(length=length, decays=decays, **walk))
            yield Problem("chunk_states", Attention(length=length, decays=decays, **walk | {"heads": (2, 2, 1)}))
            yield Problem("linear_attention_step", Attention(length=1, decays=decays, **walk))
        yield Problem("linear_attention", Attention(length=length, decays="token", packed=packed, **walk))
        for decays in ("none", "head", "token", "channel"):
            yield Problem("delta_rule", Delta(length=length, decays=decays, **walk))
            yield Problem("delta_rule_step", Delta(length=1, decays=decays, **walk))
        yield Problem("delta_rule", Delta(length=length, packed=packed, **walk))
        channels = {"length": length, "channels": key_size, "dtype": dtype}
        for width in (2, 4):
            yield Problem("causal_conv1d", Convolution(width=width, **channels))
        yield Problem("causal_conv1d", Convolution(lengths=packed, dense="tokens", **channels))
        yield Problem("causal_conv1d_step", Convolution(**channels | {"length": 1}))
        for ranks, lengths in (((5, 1, 1), None), ((3, 2, 2), (length, 1))):
            yield Problem("tpa_decode", Decode(tokens=length, ranks=ranks, lengths=lengths, **sizes))
        yield Problem("output_gated_attention", Gate(queries=length, keys=length + 3, **sizes))


def settings(problem):
    """One thread and the usual schedule; of whole sequences others, too."""
    yield Setting("native")
    if problem.operator in ("linear_attention", "chunk_states", "delta_rule"):
        yield from (Setting("native", threads=3, schedule=schedule) for schedule in SCHEDULES)
    elif problem.operator == "tpa_decode":
        yield from (Setting("native", threads=3, schedule=split) for split in SPLITS)
    elif not problem.operator.endswith("_step"):
        yield Setting("native", threads=3)


def calls():
    """Problems, settings and places. Not every schedule is tried in every place."""
    for dtype in DTYPES:
        for problem in problems(dtype):
            for i, setting in enumerate(settings(problem)):
                places = PLACES if i == 0 else PLACES[i % 2 + 2 :][:1]
                yield from ((problem, setting, place) for place in places)


def products(builds):
    """Those of linear layers, whose factors may lie either way, of few rows too."""
    count, sizes = 0, (*SIZES, (5, 33, 21), (300, 300, 300))
    for dtype, (rows, depth, columns), place, isa in product(DTYPES, sizes, PLACES, builds):
        print(isa, place, "matmul", rows, depth, columns, dtype, flush=True)
        usual = [torch.randn(shape).to(dtype) for shape in ((rows, depth), (columns, depth), (columns,))]
        memory = GuardedMemory(place)
        with core.core.using(isa), memory.used():
            found = matmul(*(guarded(x, place) for x in usual))
        assert memory.holds(found)
        a, b, bias = (x.double() for x in usual)
        torch.testing.assert_close(found.double(), a @ b.T + bias, atol=0.1, rtol=0.01)
        count += 1
    return count


def norms(builds):
    """Those of layers, of which rows longer than what is kept of them in between."""
    count, gates = 0, ((None, False), ("silu", False), ("sigmoid", True))
    for dtype, size, place, isa, (gate, first) in product(DTYPES, (3, 33, 4116), PLACES[:4], builds, gates):
        print(isa, place, "rms_norm", size, dtype, gate, first, flush=True)
        usual = [torch.randn(shape).to(dtype) for shape in ((3, size), (3, size), (size,))]
        memory = GuardedMemory(place)
        dy = torch.randn(3, size).to(dtype)

        def results(compute, dy, x, z, weight, gate=gate, first=first):
            leaves = [x, weight] if gate is None else [x, weight, z]
            y = compute(x, None if gate is None else z, weight, 1e-6, gate, first)
            return y.detach(), *torch.autograd.grad(y, leaves, dy)

        with core.core.using(isa), memory.used():
            found = results(rms_norm, guarded(dy, place), *(guarded(y, place).requires_grad_() for y in usual))
        assert all(map(memory.holds, found[:2]))
        expected = results(formula, dy.double(), *(y.double().requires_grad_() for y in usual))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, atol=0.05, rtol=0.02)
        count += 1
    return count


def main(short):
    builds = core.core.builds[: 1 if short else None]
    count, operators = products(builds) + norms(builds), set()
    for problem, setting, place in islice(calls(), None, None, 8 if short else 1):
        operators.add(problem.operator)
        torch.set_num_threads(setting.threads)
        for isa in builds:
            with core.core.using(isa):
                print(isa, place, written(problem), written(setting), flush=True)
                usual = in_double(results(problem, {n: x.clone() for n, x in tensors(problem).items()}, setting))
                given = {name: guarded(x, place) for name, x in tensors(problem).items()}
                memory = GuardedMemory(place)
                with memory.used():
                    found = results(problem, given, setting)
                bare = {name for name, x in found.items() if not memory.holds(x)}
                bare -= {"state"} if problem.operator.endswith("_step") else CONVERTED
                assert not bare, f"{bare} do not lie between forbidden pages"
                assert not (wrong := deviations(found, usual, "native")), wrong
                count += 1
    assert operators == set(SUBJECTS)
    print(f"{count} calls", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["touch"]:
        x = room((3, 5), torch.float32, "rows before")
        x.fill_(1.0)
        print("all rows written", x.sum().item(), flush=True)
        print(torch.as_strided(x, (1,), (1,), x.storage_offset() + 5))  # one element after the first row
    else:
        main(short=sys.argv[1:] == ["short"])
