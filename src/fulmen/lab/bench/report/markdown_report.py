"""A suite's results as Markdown, in the form of the published la3 report, section by section."""

from __future__ import annotations

from typing import Any

from fulmen.lab.bench.report.findings import WHAT, axis, key_findings, named, power
from fulmen.lab.bench.report.groups import Group
from fulmen.lab.bench.report.kernels import KernelReport, kernel_configuration, modelled_cost, shared_memory_budget
from fulmen.lab.bench.report.system import facts
from fulmen.lab.bench.results import Results
from fulmen.lab.bench.suite import Suite
from fulmen.lab.bench.tables import MARK, NOISE, error_line, kind_of, markdown, published_form, reason

NONE = "–"


def markdown_report(suite: Suite, groups: list[Group], results: Results, inspected: list[KernelReport] | None) -> str:
    """Of one suite, whose ``groups`` these are; ``inspected`` is what `fulmen inspect` wrote, if it did."""
    sections = [
        f"# {suite.text.title} Benchmark Report",
        f"**Last Updated:** {(results.finished or results.started)[:10]}",
        *results.warnings,
        *_summary(suite, groups),
        "## System Configuration",
        markdown(["Property", "Value"], [list(fact) for fact in facts(results) if not fact[0].startswith("option")]),
        "## Benchmark Configuration",
        _benchmark_configuration(groups, results.options),
        *kernel_configuration(suite, groups),
        *_detailed(groups),
        *_variants(groups),
        *_algorithm(suite, groups),
        *_memory(groups),
        *shared_memory_budget(suite, inspected),
        *modelled_cost(suite, inspected),
        *_published_tables(groups),
        "## Files",
        "Beside this one, made of the same results:\n\n"
        "- `results.csv`: one line for each cell\n"
        "- `report.html`: curves and sortable tables",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _summary(suite: Suite, groups: list[Group]) -> list[str]:
    parts = ["## Summary", suite.text.subject]
    for group in groups:
        if not group.modes:
            continue
        order = _by_speed(group)
        if len(groups) > 1:
            parts.append(f"### {group.label}")
        parts.append(f"Time, {WHAT[tuple(group.modes)]}:")
        header = ["Kernel", *(f"{axis(group)}={n}" for n in group.lengths)]
        rows = [[named(group, column), *(_time(group, n, column) for n in group.lengths)] for column in order]
        parts.append(markdown(header, _bold_first(rows)))
        parts.append(f"#### Speedup vs {group.baseline}" if len(groups) > 1 else f"### Speedup vs {group.baseline}")
        others = [column for column in order if column != group.baseline]
        rows = [[named(group, column), *(_ratio(group, n, column) for n in group.lengths)] for column in others]
        parts.append(markdown(header, _bold_first(rows)))
        if any(MARK in cell for row in rows for cell in row):
            parts.append(f"{MARK} {NOISE}")
        parts.append("**Key Findings:**\n" + "\n".join(f"- {finding}" for finding in key_findings(group)))
    return parts


def _benchmark_configuration(groups: list[Group], options: dict[str, Any]) -> str:
    names = {
        "batch": "Batch Size",
        "heads": "Attention Heads",
        "dim": "Head Dimension",
        "rank": "Rank",
        "dtype": "Data Type",
    }
    rows = []
    for key, name in names.items():
        values = dict.fromkeys(str(group.any_table.config[key]) for group in groups if group.any_table.config.get(key))
        if values:
            rows.append([name, ", ".join(values)])
    rows.append(["Lengths", ", ".join(map(str, sorted({n for group in groups for n in group.lengths})))])
    given = {name: value for name, value in options.items() if value not in (None, "", [], False)}
    rows += [[f"--{name}", ", ".join(map(str, x)) if isinstance(x, list) else str(x)] for name, x in given.items()]
    return markdown(["Parameter", "Value"], rows)


def _detailed(groups: list[Group]) -> list[str]:
    legend = (
        "Spread: p20 to p80 of the sittings as a share of the fastest, the larger of the passes; with ~ where the time "
        "is not to be trusted. First call: milliseconds of the first call of each pass, compilation included. Errors "
        "stand below the tables in the published form."
    )
    parts = ["## Detailed Results", legend]
    for group in groups:
        if len(groups) > 1:
            parts.append(f"### {group.label}")
        header = ["Kernel", "SeqLen", "Fwd (ms)", "Bwd (ms)", "Total (ms)", "Speedup", "Spread", "First call"]
        rows = [_detailed_row(group, n, column) for n in group.lengths for column in _by_speed(group)]
        parts.append(markdown(header, rows))
        parts.append("\n".join(f"- {why}" for why in _why_missing(group)))
    return parts


def _why_missing(group: Group) -> list[str]:
    """A sentence for each column that has cells without a time, and each kind of reason."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for mode in group.modes:
        for cell in group.tables["speed", mode].cells:
            if cell.value is None:
                found.setdefault((cell.column, kind_of(reason(cell))), {})[cell.n] = reason(cell)
    sentences = []
    for (column, kind), whys in found.items():
        why = whys[min(whys)] if len({*whys.values()}) == 1 else kind
        sentences.append(f"{column} at {', '.join(map(str, sorted(whys)))}: {why}")
    return sentences


def _detailed_row(group: Group, n: int, column: str) -> list[str]:
    cells = [group.cell("speed", mode, n, column) for mode in ("fwd", "bwd")]
    times = [NONE if cell is None or cell.value is None else f"{cell.value:.3f}" for cell in cells]
    spreads = [cell.spread for cell in cells if cell is not None and cell.spread is not None]
    noisy = any(cell.noisy for cell in cells if cell is not None)
    first = [cell.first_call for cell in cells if cell is not None and cell.first_call is not None]
    total, speedup = group.total(n, column), _ratio(group, n, column)
    best = min((t for one in group.columns if (t := group.total(n, one)) is not None), default=None)
    return [
        named(group, column),
        str(n),
        *times,
        NONE if total is None else f"{total:.3f}",
        f"**{speedup}**" if total is not None and total == best and speedup != NONE else speedup,
        f"{MARK if noisy else ''}{max(spreads):.0%}" if spreads else NONE,
        " + ".join(f"{time:.1f}" for time in first) or NONE,
    ]


def _variants(groups: list[Group]) -> list[str]:
    rows = {}  # each once; sections may have columns of one name that differ
    for group in groups:
        for name in group.columns:
            column = group.column(name)
            explained = (column.about, column.pros, column.cons) if column else (name, "", "")
            rows[name, explained] = [name, group.title(name), group.owner(name).described, *explained]
    header = ["Kernel", "Name", "Whose", "Description", "Pros", "Cons"]
    return ["## Kernel Variants Explained", markdown(header, rows.values())]


def _algorithm(suite: Suite, groups: list[Group]) -> list[str]:
    measured = []
    for group in groups:
        powers = [(column, power(group, column)) for column in group.columns]
        known = ", ".join(
            f"{column} {axis(group)}^{exponent:.2f}" for column, exponent in powers if exponent is not None
        )
        if known:
            measured.append(f"- {group.label}: {known}")
    return [
        f"## Algorithm: {suite.text.algorithm}",
        f"```\n{suite.text.formula}\n```",
        "**Complexity:**\n" + "\n".join(f"- {line}" for line in suite.text.complexity),
        "Measured, from the last two lengths of each:\n" + "\n".join(measured) if measured else "",
    ]


def _memory(groups: list[Group]) -> list[str]:
    parts = []
    for group in groups:
        for mode in ("fwd", "bwd"):
            table = group.tables.get(("memory", mode))
            if table is None:
                continue
            header = ["SeqLen", *table.columns, f"Least against {table.baseline}"]
            rows = []
            for n in table.lengths:
                sizes = [group.value("memory", mode, n, column) for column in table.columns]
                known, base = [size for size in sizes if size], group.value("memory", mode, n, table.baseline)
                saved = f"{100 * (1 - min(known) / base):.0f}%" if base and known else NONE
                rows.append([str(n), *(NONE if size is None else f"{size:.1f}" for size in sizes), saved])
            parts += [f"Peak MiB, {WHAT[(mode,)]}, {group.label}:", markdown(header, rows)]
    return ["## Memory Efficiency", *parts] if parts else []


def _published_tables(groups: list[Group]) -> list[str]:
    blocks = []
    for group in groups:
        for table in group.tables.values():
            blocks += [block for block in (published_form(table), error_line(table)) if block]
    return ["## Tables in the Published Form", "```\n" + "\n\n".join(blocks) + "\n```"]


def _by_speed(group: Group) -> list[str]:
    """Fastest first at the longest length; what did not run there keeps its place at the end."""
    n = group.lengths[-1]
    return sorted(group.columns, key=lambda column: group.total(n, column) or float("inf"))


def _bold_first(rows: list[list[str]]) -> list[list[str]]:
    return [[f"**{cell}**" if cell != NONE else cell for cell in row] if i == 0 else row for i, row in enumerate(rows)]


def _time(group: Group, n: int, column: str) -> str:
    value = group.total(n, column)
    return NONE if value is None else f"{value:.2f}ms{MARK if group.noisy(n, column) else ''}"


def _ratio(group: Group, n: int, column: str) -> str:
    value = group.speedup(n, column)
    return NONE if value is None else f"{value:.2f}x{MARK if group.noisy_speedup(n, column) else ''}"
