"""`fulmen verify`."""

from __future__ import annotations

import argparse
from typing import Any

from fulmen.lab.arguments import add_device, output_file


def add_command(commands: Any) -> None:
    verify = commands.add_parser(
        "verify", help="check this machine's results against float64, its memory and its speed"
    )
    add_device(verify)
    verify.add_argument("--quick", action="store_true", help="a few small cases, in seconds")
    verify.add_argument("--json", type=output_file, metavar="FILE", help="also write everything found to FILE")
    verify.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace) -> None:
    from fulmen.lab.verify.run import run

    run(options.device, options.quick, options.json)
