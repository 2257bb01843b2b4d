"""The ``fulmen`` command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("fulmen: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has stopped reading; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        print(f"fulmen: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    from fulmen import __version__
    from fulmen.gpu.architectures import ARCHITECTURES, DECAYS

    parser = argparse.ArgumentParser(prog="fulmen", description="Linear attention, and the lab that measures it.")
    parser.add_argument("--version", action="version", version=f"fulmen {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    env = commands.add_parser("env", help="this machine: versions, CPU, GPUs, backends and why one is unavailable")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=run_env)

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

    inspect = commands.add_parser("inspect", help="compile the Triton kernels for every GPU architecture; needs no GPU")
    inspect.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES), help="only this one (repeatable)")
    inspect.add_argument("--decay", action="append", choices=DECAYS, help="only this one (repeatable)")
    inspect.add_argument("--kernel", metavar="TEXT", help="only kernels whose name has TEXT in it")
    inspect.add_argument("--all", action="store_true", help="also float16 and float32, 256 channels, and D != E")
    inspect.add_argument("--json", type=output_file, metavar="FILE", help="also write the table to FILE")
    inspect.set_defaults(run=run_inspect)
    return parser


def run_env(options: argparse.Namespace) -> None:
    from fulmen.environment import describe, environment

    facts = environment()
    print(json.dumps(facts, indent=2) if options.json else describe(facts))


def run_bench(options: argparse.Namespace) -> None:
    if options.suite == "limits":
        from fulmen.bench import limits

        limits.run(options.json)
    else:
        from fulmen.bench import overview

        overview.run(options.lengths, options.json)


def run_inspect(options: argparse.Namespace) -> None:
    from fulmen.gpu import inspection
    from fulmen.gpu.architectures import ARCHITECTURES, DECAYS

    archs, decays = options.arch or list(ARCHITECTURES), options.decay or list(DECAYS)
    inspection.run(archs, decays, options.kernel, options.all, options.json)


def output_file(text: str) -> Path:
    """A path that can be written to: told now, not after minutes of work."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    return path


def length_list(text: str) -> list[int]:
    """``"512,1024"`` as sorted whole numbers."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None
    if lengths[0] < 1:
        raise argparse.ArgumentTypeError(f"a length must be at least 1, got {lengths[0]}")
    return lengths
