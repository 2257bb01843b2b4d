"""The ``fulmen`` command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fulmen.lab.environment import seconds_since_start


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    options.spent = 0.0 if argv is not None else seconds_since_start()
    # It would say of every torch function of its own that there are faster ones: here these are meant.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        status = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("fulmen: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has stopped reading; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        print(f"fulmen: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    return status or 0


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; a screen of usage before it would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    from fulmen import __version__
    from fulmen.lab import precision, scaling
    from fulmen.lab.bench import cli as bench
    from fulmen.lab.bench import report_cli as report
    from fulmen.lab.fuzz import cli as fuzz
    from fulmen.lab.inspect import cli as gpu
    from fulmen.lab.verify import cli as verify

    parser = Parser(prog="fulmen", description="Linear attention, and the lab that measures it.")
    parser.add_argument("--version", action="version", version=f"fulmen {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")

    env = commands.add_parser("env", help="this machine: versions, CPU, GPUs, backends and why one is unavailable")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=run_env)

    bench.add_commands(commands)
    report.add_command(commands)
    gpu.add_command(commands)
    verify.add_command(commands)
    precision.add_command(commands)
    scaling.add_command(commands)
    fuzz.add_command(commands)
    there = ", ".join(commands.choices)
    parser.set_defaults(run=lambda _: parser.error(f"no command; there are {there}, which `fulmen --help` explains"))
    return parser


def run_env(options: argparse.Namespace) -> None:
    from fulmen.lab.environment import describe, environment

    facts = environment()
    print(json.dumps(facts, indent=2) if options.json else describe(facts))
