"""`fulmen bench`."""

from __future__ import annotations

import argparse
from typing import Any

from fulmen.arguments import output_file


def add_command(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure: backends against each other, or against the machine's limits")
    bench.add_argument(
        "suite",
        nargs="?",
        choices=("overview", "limits"),
        default="overview",
        help="overview: every backend against softmax attention (default); limits: the native kernels against what the "
        "machine can do",
    )
    bench.add_argument(
        "--lengths",
        type=length_list,
        default=[512, 1024, 2048, 4096, 8192],
        metavar="N,N,...",
        help="sequence lengths of the overview (default: 512,1024,2048,4096,8192)",
    )
    bench.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the figures, with the environment, to FILE"
    )
    bench.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> None:
    if options.suite == "limits":
        from fulmen.bench import limits

        limits.run(options.json)
    else:
        from fulmen.bench import overview

        overview.run(options.lengths, options.json)


def length_list(text: str) -> list[int]:
    """``"512,1024"`` as sorted whole numbers."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None
    if lengths[0] < 1:
        raise argparse.ArgumentTypeError(f"a length must be at least 1, got {lengths[0]}")
    return lengths
