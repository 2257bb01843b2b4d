"""A small suite to run the lab on: doubling a tensor, well and badly."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from fulmen.lab.bench.plan import Options
from fulmen.lab.bench.suite import Column, Input, Preset, Sizes, Suite, batch_head_dim


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


def column(name, function=double, **changes):
    return replace(Column(name, "doubles", ("x",), function, double), **changes)


def suite(*columns):
    return Suite(
        name="toy",
        about="doubling",
        axis="n",
        baseline=columns[0].name,
        modes=("fwd", "bwd"),
        sections={"": columns},
        inputs={"x": Input("B N H D")},
        presets={"quick": Preset((Sizes(1, 2, 4),), (8, 16))},
        check_sizes=lambda sizes: sizes,
        sizes_in_title=batch_head_dim,
    )


def options(**changes):
    return replace(Options(suites=("toy",), device="cpu", dtype="fp32"), **changes)
