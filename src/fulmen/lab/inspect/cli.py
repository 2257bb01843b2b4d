"""`fulmen inspect` and `fulmen roofline`."""

from __future__ import annotations

import argparse
from typing import Any

from fulmen.lab.arguments import output_file
from fulmen.lab.bench import suites
from fulmen.lab.inspect.inspection import DECAYS
from fulmen.runtime.architectures import ARCHITECTURES

GPUS = ("A100", "A800", "H100", "RTX 5090")


def add_command(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="compile the Triton kernels for every GPU architecture; needs no GPU")
    inspect.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES), help="only this one (repeatable)")
    inspect.add_argument("--decay", action="append", choices=list(DECAYS), help="only this one (repeatable)")
    inspect.add_argument("--kernel", metavar="TEXT", help="only kernels whose name has TEXT in it")
    inspect.add_argument("--all", action="store_true", help="also float16 and float32, 256 channels, and D != E")
    inspect.add_argument("--json", type=output_file, metavar="FILE", help="also write the table to FILE")
    inspect.set_defaults(run=run_inspect, parser=inspect)

    roofline = commands.add_parser(
        "roofline", help="the least time each published cell can take, and what ours requests"
    )
    roofline.add_argument("--report", action="append", choices=suites.reports(), help="only this one (repeatable)")
    roofline.add_argument("--gpu", choices=GPUS, help="limits of this card (default: the one that was measured)")
    roofline.add_argument(
        "--limits-only", action="store_true", help="do not compile our kernels and model what they cost"
    )
    roofline.add_argument("--json", type=output_file, metavar="FILE", help="also write the cells to FILE")
    roofline.set_defaults(run=run_roofline)


def run_inspect(options: argparse.Namespace) -> None:
    from fulmen.lab.inspect import inspection

    archs, decays = options.arch or list(ARCHITECTURES), options.decay or list(DECAYS)
    try:
        inspection.run(archs, decays, options.kernel, options.all, options.json)
    except ValueError as error:
        options.parser.error(str(error))


def run_roofline(options: argparse.Namespace) -> None:
    from fulmen.lab import roofline

    roofline.run(options.report or list(suites.reports()), options.gpu, options.json, not options.limits_only)
