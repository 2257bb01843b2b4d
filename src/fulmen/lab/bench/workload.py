"""A column on tensors of one length: what is checked, timed and weighed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.suite import Column, Sizes, Suite
from fulmen.runtime.torch_private import leave_symbolic


class Material:
    """The tensors of a suite at one length. Each is made when first needed, and shared by all columns."""

    def __init__(self, suite: Suite, sizes: Sizes, n: int, dtype: torch.dtype, device: str) -> None:
        self.suite, self.sizes, self.n, self.dtype, self.device = suite, sizes, n, dtype, device
        self._made: dict[tuple[str, bool], Tensor] = {}

    def tensor(self, name: str, heads_first: bool = False) -> Tensor:
        """The same values in either layout."""
        if (name, heads_first) not in self._made:
            made = self._new(name)
            self._made[name, heads_first] = _turned(made).contiguous() if heads_first else made
        return self._made[name, heads_first]

    def _new(self, name: str) -> Tensor:
        """Head decays stay float32, as every user of a fixed one has them."""
        made = self.suite.inputs[name].make(self.sizes, self.n, _generator(name))
        return made.to(self.device, torch.float32 if made.ndim == 1 else self.dtype)

    def bytes_of(self, name: str) -> int:
        """Of a tensor that need not exist yet."""
        return prod(self.suite.inputs[name].shape(self.sizes, self.n)) * self.dtype.itemsize

    def cotangent(self, output: Tensor, heads_first: bool) -> Tensor:
        """Of an output: the same values in either layout."""
        shape = _turned(output).shape if heads_first else output.shape
        key = f"cotangent {list(shape)} {output.dtype}"
        if (key, heads_first) not in self._made:
            made = torch.randn(shape, generator=_generator("cotangent")).to(self.device, output.dtype)
            self._made[key, heads_first] = _turned(made).contiguous() if heads_first else made
        return self._made[key, heads_first]


class Workload:
    """One column on its tensors.

    The forward is recorded for a backward where the suite has one, as when the published figures were taken; the
    backward is that alone, on a graph that is kept.
    """

    def __init__(self, column: Column, material: Material) -> None:
        self.column, self.material = column, material
        differentiable = "bwd" in material.suite.modes
        self.inputs = []
        for name in column.takes:
            leaf = material.tensor(name, column.heads_first).detach()
            self.inputs.append(leaf.requires_grad_(differentiable and name not in column.fixed))
            if isinstance(column.function, Compiled) and leaf.ndim > 1 and leaf.shape[_axis(column)] == material.n:
                leave_symbolic(leaf, _axis(column))

    def forward(self) -> Tensor:
        return self.column.function(*self.inputs)

    @cached_property
    def kept_output(self) -> Tensor:
        return self.forward()

    @cached_property
    def cotangent(self) -> Tensor:
        return self.material.cotangent(self.kept_output, self.column.heads_first)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in self.inputs if x.requires_grad]

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.kept_output, self.leaves, self.cotangent, retain_graph=True)

    def call(self, mode: str) -> Callable[[], object]:
        return self.forward if mode == "fwd" else self.backward

    def results(self, mode: str) -> list[Tensor]:
        """Output, or gradients, in the suite's layout."""
        found = [self.forward().detach()] if mode == "fwd" else list(self.backward())
        return [_turned(x) if self.column.heads_first and x.ndim == 4 else x for x in found]

    def exact(self, mode: str) -> list[Tensor]:
        """The same from the specification, in float64, on the CPU."""
        column, material = self.column, self.material
        inputs = [material.tensor(name).detach().cpu().double() for name in column.takes]
        leaves = [x.requires_grad_(y.requires_grad) for x, y in zip(inputs, self.inputs, strict=True)]
        output = column.exact(*leaves)
        if mode == "fwd":
            return [output.detach()]
        cotangent = material.cotangent(self.results("fwd")[0], heads_first=False).cpu().double()
        return list(torch.autograd.grad(output, [x for x in leaves if x.requires_grad], cotangent))


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _axis(column: Column) -> int:
    """Where the length is."""
    return 2 if column.heads_first else 1


def _turned(x: Tensor) -> Tensor:
    """``[B, N, H, D]`` as ``[B, H, N, D]``, or back; head decays ``[H]`` as they are."""
    return x.transpose(1, 2) if x.ndim > 1 else x


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
