"""`fulmen bench`, `fulmen limits`, `fulmen list` and `fulmen compare`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen.lab.arguments import input_path, output_file, output_folder, unknown, whole
from fulmen.lab.bench import suites
from fulmen.lab.files import write_text
from fulmen.runtime.checks import MAX_SIZE

if TYPE_CHECKING:
    from fulmen.lab.bench.results import Results

RESULTS = "benchmark_results.json"
FOLDER = Path("bench-results")


def add_commands(commands: Any) -> None:
    _add_bench(commands)
    _add_limits(commands)
    _add_list(commands)
    _add_compare(commands)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure: the tables of the published reports, on this machine",
        description="Without a suite: the quick preset of all, a few minutes.",
    )
    bench.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(suites.names())}; see `fulmen list`")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    bench.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: fp32 on cpu, bf16 on cuda")
    bench.add_argument("--mode", choices=("fwd", "bwd", "both"), default="both", help="default: both")
    bench.add_argument("--metric", choices=("speed", "memory", "both"), default="both", help="default: both")
    bench.add_argument(
        "--preset",
        choices=("published", "laptop", "quick"),
        default="quick",
        help="sizes and lengths: published (those of the reports), laptop (minutes), quick (all suites in less than 5 "
        "minutes on two cores; default)",
    )
    for name, kind in (("batch", whole), ("heads", whole), ("dim", channels), ("rank", channels)):
        bench.add_argument(f"--{name}", type=kind, metavar="N", help=f"{name}, instead of the preset's")
    bench.add_argument("--lengths", type=length_list, metavar="N,N,...", help="lengths, instead of the preset's")
    bench.add_argument("--columns", type=name_list, metavar="NAME,NAME,...", help="only these columns")
    bench.add_argument(
        "--sections", type=name_list, metavar="NAME,NAME,...", help="only these sections, where a suite has some"
    )
    bench.add_argument(
        "--budget", type=seconds, metavar="SECONDS", help="cells expected to take more than their share are left out"
    )
    bench.add_argument("--threads", type=whole, metavar="N", help="CPU threads")
    bench.add_argument(
        "--freed-memory",
        choices=("kept", "returned"),
        default="kept",
        help="kept for the next call (default), or returned to the system as the C library sees fit, as in any Python "
        "process: then calls that take much memory also pay for its pages",
    )
    bench.add_argument(
        "--out",
        type=output_folder,
        metavar="DIR",
        help=f"for all files (default: {FOLDER}; for a dry run {FOLDER / 'dry-run'})",
    )
    bench.add_argument("--json", type=output_file, metavar="FILE", help="also write the results to FILE")
    bench.add_argument(
        "--dry-run",
        action="store_true",
        help="measure nothing: print the plan; with --device cuda also the memory tables, which need no GPU",
    )
    bench.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run that was stopped in --out; its options are the run's own",
    )
    _add_progress(bench)
    bench.set_defaults(run=run_bench, parser=bench)


def _add_progress(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--progress",
        choices=("auto", "json"),
        default="auto",
        help="auto: a bar on a terminal, elsewhere a line every few seconds; json: lines for programs",
    )


def _add_limits(commands: Any) -> None:
    limits = commands.add_parser(
        "limits",
        help="measure: the CPU core against what the machine can do",
        description="Every figure beside what it must reach; some minutes.",
    )
    limits.add_argument("names", nargs="*", metavar="NAME", help="operators, or layers: theirs alone; default: all")
    limits.add_argument("--json", type=output_file, metavar="FILE", help="also write the figures to FILE")
    _add_progress(limits)
    limits.set_defaults(run=run_limits, parser=limits)


def _add_list(commands: Any) -> None:
    listing = commands.add_parser("list", help="suites and columns: what each is, whose, and whether it can run here")
    listing.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(suites.names())}; default: all")
    listing.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list, parser=listing)


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="results beside the published figures, or beside other results",
        description="One run: its speedups over each suite's baseline beside the published ones. Two runs: "
        "the second against the first, cell by cell, with a verdict that knows the noise. With --out a page: of two or "
        "more runs side by side, or of all runs of one folder one after the other, as a history.",
    )
    compare.add_argument(
        "results",
        type=input_path,
        nargs="+",
        metavar="RUN",
        help=f"the folder of a run, or its {RESULTS}",
    )
    compare.add_argument("--out", type=output_folder, metavar="DIR", help="where to write the page, compare.html")
    compare.add_argument(
        "--fail-over",
        type=percentage,
        metavar="10%",
        help="with two runs: exit with 1 if a cell got worse by more than this, beyond the noise",
    )
    compare.set_defaults(run=run_compare, parser=compare)


def run_bench(asked: argparse.Namespace) -> None:
    _check_suites(asked)
    if asked.resume:
        for name in vars(asked).keys() - {"out", "json", "progress", "resume", "run", "parser", "spent"}:
            if getattr(asked, name) not in (asked.parser.get_default(name), []):
                asked.parser.error(f"--resume takes the options of the run it goes on with; got {_option(name)}")
    from fulmen.lab.bench import session

    out = asked.out or (FOLDER / "dry-run" if asked.dry_run else FOLDER)  # a dry run leaves alone what was measured
    try:
        if asked.dry_run:
            session.rehearse(session.options_of(asked), out, asked.json)
            return
        run = session.resumed(out) if asked.resume else session.begun(session.options_of(asked), out)
    except ValueError as error:
        asked.parser.error(str(error))
    with run:
        run.measure(asked.json, asked.progress, asked.spent)


def _option(name: str) -> str:
    return "a suite" if name == "suites" else f"--{name.replace('_', '-')}"


def _check_suites(asked: argparse.Namespace) -> None:
    for name in asked.suites:
        if name not in suites.names():
            hint = "; `fulmen limits` is a command of its own" if name == "limits" else ""
            asked.parser.error(unknown(f"suite {name!r}", name, suites.names()) + hint)


def run_limits(asked: argparse.Namespace) -> None:
    from fulmen.lab.bench import limits

    try:
        parts = limits.parts_of(asked.names)
    except ValueError as error:
        asked.parser.error(str(error))
    limits.run(parts, asked.json, asked.progress)


def run_list(asked: argparse.Namespace) -> None:
    from fulmen.lab.bench.session import default_device
    from fulmen.lab.bench.suite import describe_columns

    _check_suites(asked)
    device = asked.device or default_device()
    described: dict[str, dict[str, Any]] = {
        suite.name: {
            "about": suite.about,
            "sections": [section for section in suite.sections if section],
            "columns": describe_columns(suite, device),
        }
        for suite in map(suites.find, asked.suites or suites.names())
    }
    if asked.json:
        print(json.dumps({"device": device, "suites": described}, indent=2))
        return
    for name, suite in described.items():
        print(f"{name}: {suite['about']}")
        if suite["sections"]:
            sections = f"sections: {', '.join(suite['sections'])}"
            print(textwrap.fill(sections, 120, initial_indent="  ", subsequent_indent="    "))
        width = max(12, *(len(column["name"]) for column in suite["columns"])) + 2
        for column in suite["columns"]:
            print(f"  {column['name']:<{width}}{column['title']} ({column['owner']}): {column['about']}")
            if not column["available"]:
                print(f"  {'':{width}}not here: {column['reason']}")


def run_compare(asked: argparse.Namespace) -> int:
    from fulmen.lab.bench import compare
    from fulmen.lab.bench.results import load

    given: list[Path] = asked.results
    if asked.fail_over is not None and (len(given) != 2 or asked.out):
        asked.parser.error("--fail-over needs two runs, and no --out")
    if asked.out:
        print(_compared_on_a_page(given, asked.out, asked.parser))
        return 0
    if len(given) > 2:
        asked.parser.error("more than two runs are compared on a page: give --out DIR")
    paths = [results_of(path, asked.parser) for path in given]
    if len(paths) == 1:
        run = load(paths[0])
        print("\n\n".join((*run.warnings, compare.with_published(run))))
        return 0
    before, after = map(load, paths)
    for path, run in zip(paths, (before, after), strict=True):
        for warning in run.warnings:
            print(f"{path}: {warning}")
    changes = compare.changes(before, after)
    print(compare.describe(changes))
    return int(asked.fail_over is not None and any(change.worse_by > asked.fail_over for change in changes))


def results_of(path: Path, parser: argparse.ArgumentParser) -> Path:
    """The file of a run, which may be given by its folder."""
    if not path.is_dir():
        return path
    if not (path / RESULTS).is_file():
        parser.error(f"there is no {RESULTS} in {path}; with --out DIR, all runs in one folder make a history")
    return path / RESULTS


def _compared_on_a_page(paths: list[Path], out: Path, parser: argparse.ArgumentParser) -> Path:
    from fulmen.lab.bench.report import side_by_side
    from fulmen.lab.bench.report.page import page
    from fulmen.lab.bench.results import load

    if len(paths) > 1:
        together = side_by_side.side_by_side({str(path): load(results_of(path, parser)) for path in paths})
    elif not paths[0].is_dir():
        parser.error("--out needs two or more runs, or a folder of them")
    else:
        found = _results_in(paths[0])
        if not found:
            parser.error(f"there is no result file in {paths[0]}")
        together = side_by_side.history(found)
    text = page(together)
    out.mkdir(parents=True, exist_ok=True)
    written = out / "compare.html"  # the folder may be a run's, with a report of its own
    write_text(written, text)
    return written


def _results_in(folder: Path) -> list[Results]:
    """Other files that lie there are left out, and named."""
    from fulmen.lab.bench.results import load

    def loaded(path: Path) -> Results | None:
        try:
            return load(path)
        except ValueError as error:
            print(f"fulmen: left out: {error}", file=sys.stderr)
            return None

    return [run for path in sorted(folder.glob("**/*.json")) if (run := loaded(path))]


def channels(text: str) -> int:
    """A whole number that the operators take as the size of a last dimension."""
    number = whole(text)
    if number > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_SIZE}, got {number}")
    return number


def length_list(text: str) -> tuple[int, ...]:
    """``"512,1024"`` as sorted whole numbers."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None
    if lengths[0] < 1:
        raise argparse.ArgumentTypeError(f"a length must be at least 1, got {lengths[0]}")
    return tuple(lengths)


def name_list(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return names


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text}")
    return number


def percentage(text: str) -> float:
    """``"10%"`` as 0.1."""
    try:
        number = float(text.removesuffix("%")) / 100
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a percentage such as 10%, got {text!r}") from None
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return number
