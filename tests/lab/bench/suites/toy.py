"""A small suite, as somebody would add it: doubling a tensor. With columns that do it badly, for tests of the lab."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from fulmen.lab.bench.plan import Options
from fulmen.lab.bench.suite import Column, Input, Preset, Sizes, Suite, Text, Work, tensor_bytes


def double(x):
    return 2 * x


def slow(x):
    time.sleep(x.shape[1] / 1e3)  # a millisecond for each token
    return 2 * x


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def least(sizes, n):
    return dict.fromkeys(("fwd", "bwd"), Work(2 * tensor_bytes(sizes, n), 0))


def column(name, function=double, **changes):
    return replace(Column(name, name, "doubles", "Short", "Does little", ("x",), function, double, least), **changes)


def suite(*columns):
    return Suite(
        name="toy",
        about="doubling",
        text=Text("Doubling", "Ways to double a tensor.", "Doubling", "y = 2 x", ("O(n)",)),
        axis="n",
        baseline=columns[0].name,
        modes=("fwd", "bwd"),
        sections={"": columns},
        inputs={"x": Input("B N H D")},
        presets={"quick": Preset((Sizes(1, 2, 4),), (8, 16))},
    )


def options(**changes):
    return replace(Options(suites=("toy",), device="cpu", dtype="fp32"), **changes)


SUITE = suite(column("Double"), column("Sum", lambda x: x + x))
