"""`fulmen fuzz`."""

from __future__ import annotations

import argparse
from math import isfinite
from typing import Any

from fulmen.lab.arguments import output_file


def add_command(commands: Any) -> None:
    fuzz = commands.add_parser(
        "fuzz",
        help="random calls of every operator against float64, for as long as you like",
        description="A failure prints Python that reproduces it, made as small as it gets. With TRITON_INTERPRET=1 the "
        "Triton kernels run, in Triton's interpreter.",
    )
    fuzz.add_argument("--seconds", type=duration, default=600.0, metavar="N", help="default: 600")
    fuzz.add_argument("--seed", type=int, default=0, metavar="S", help="another one tries other calls; default: 0")
    fuzz.add_argument("--operator", metavar="NAME", help="only this public function")
    fuzz.add_argument("--backend", metavar="NAME", help="only this backend")
    fuzz.add_argument(
        "--resume",
        type=output_file,
        metavar="FILE",
        help="keep counts and findings in FILE, and go on from there; what failed is tried again first",
    )
    fuzz.set_defaults(run=run_fuzz, parser=fuzz)


def duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds > 0 and isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0; got {text}")
    return seconds


def run_fuzz(options: argparse.Namespace) -> int:
    from fulmen.lab.fuzz.operators import SUBJECTS
    from fulmen.lab.fuzz.run import Plan, available, fuzz, serves

    chosen = {"operator": list(SUBJECTS), "backend": available()}
    for name, there in chosen.items():
        wanted = getattr(options, name)
        if wanted is not None and wanted not in there:
            options.parser.error(f"argument --{name}: must be one of {', '.join(there)}; got {wanted}")
        if wanted is not None:
            chosen[name] = [wanted]
    chosen["operator"] = [name for name in chosen["operator"] if serves(name, chosen["backend"])]
    done = fuzz(Plan(options.seed, chosen["operator"], chosen["backend"]), options.seconds, options.resume)
    for name, count in sorted(done.cases.items()):
        print(f"{count:>8} {name}")
    print(f"{done.problems} problems, {done.cases.total()} cases, {len(done.findings)} findings (seed {options.seed})")
    return 1 if done.findings else 0
