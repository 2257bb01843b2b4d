"""`fulmen precision`: how far results of bfloat16 inputs are from float64, beside what others would make of them.

An operator's ``checks`` may give ``comparisons(target)``: calls in our arithmetic, in that of GPU kernels
(:mod:`fulmen.lab.yardstick`), and in plain bfloat16 torch where torch has the operator.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from fulmen.lab.arguments import add_device
from fulmen.lab.tolerances import Results, largest, norm
from fulmen.lab.verify.check import Target

OURS, GPU_STYLE, TORCH = "ours", "GPU-style", "torch's own"


class Comparison(NamedTuple):
    """
    Attributes:
        what: the operator and the case, for people.
        exact: results in float64, by name.
        found: the same results (or some of them), by whose arithmetic made them.
    """

    what: str
    exact: Results
    found: Mapping[str, Results]


def add_command(commands: Any) -> None:
    precision = commands.add_parser(
        "precision", help="errors of bfloat16 inputs, beside the arithmetic of GPU kernels and of torch"
    )
    add_device(precision)
    precision.add_argument("--quick", action="store_true", help="80 tokens in place of 1024, in seconds")
    precision.set_defaults(run=run_precision)


def run_precision(options: argparse.Namespace) -> None:
    from fulmen.lab.environment import describe, environment
    from fulmen.lab.verify.run import target_for

    target = target_for(options.device, options.quick)
    print(describe(environment()))
    print("\nErrors of the worst head: the norm, in 1e-3 of its own; the largest, in 2^-8 of the largest magnitude.\n")
    columns = (OURS, GPU_STYLE, TORCH)
    print(f"| | {target.backend} | {' | '.join(columns[1:])} |", "|---" * 4 + "|", sep="\n")
    for comparison in all_comparisons(target):
        for i, name in enumerate(comparison.exact):
            cells = [errors(name, comparison, column) for column in columns]
            print(
                f"| {comparison.what if i == 0 else ''}: {name} | {' | '.join(cells)} |".replace("| : ", "| "),
                flush=True,
            )


def all_comparisons(target: Target) -> Iterator[Comparison]:
    from fulmen.runtime.operators import operators

    for operator in operators():
        if target.backend in operator.backends:
            checks = import_module(operator.checks)
            if hasattr(checks, "comparisons"):
                yield from checks.comparisons(target)


def errors(name: str, comparison: Comparison, column: str) -> str:
    """As the table shows them; nothing where this column has no such result."""
    got = comparison.found.get(column, {}).get(name)
    if got is None:
        return ""
    want = comparison.exact[name]
    return f"{norm(name, want)(got).max() * 1e3:.2f}, {largest(name, want)(got).max() * 2**8:.2f}"
