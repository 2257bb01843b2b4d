"""`fulmen inspect`."""

from __future__ import annotations

import argparse
from typing import Any

from fulmen.arguments import output_file
from fulmen.gpu.architectures import ARCHITECTURES, DECAYS, GATE


def add_command(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="compile the Triton kernels for every GPU architecture; needs no GPU")
    inspect.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES), help="only this one (repeatable)")
    inspect.add_argument("--decay", action="append", choices=(*DECAYS, GATE), help="only this one (repeatable)")
    inspect.add_argument("--kernel", metavar="TEXT", help="only kernels whose name has TEXT in it")
    inspect.add_argument("--all", action="store_true", help="also float16 and float32, 256 channels, and D != E")
    inspect.add_argument("--json", type=output_file, metavar="FILE", help="also write the table to FILE")
    inspect.set_defaults(run=run_inspect)


def run_inspect(options: argparse.Namespace) -> None:
    from fulmen.gpu import inspection

    archs, decays = options.arch or list(ARCHITECTURES), options.decay or [*DECAYS, GATE]
    inspection.run(archs, decays, options.kernel, options.all, options.json)
