"""The published figures: the data files give back the text of the reports, line by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fulmen.lab.bench import suites
from fulmen.lab.bench.published import PublishedTable, find, tables
from fulmen.lab.bench.results import Cell, Table
from fulmen.lab.bench.tables import markdown, published_form

TEXTS = {path.stem: path.read_text() for path in Path(__file__).with_name("published").glob("*.txt")}
PRINTED = [report for report in suites.reports() if report != "la3"]


def measured(published: PublishedTable) -> Table:
    """The published figures as if they had been measured here."""
    cells = [Cell(n, column, value) for n, row in published.rows for column, value in row.items()]
    about = (published.title, published.section, published.metric, published.mode, published.axis, published.columns)
    return Table(published.report, *about, baseline=published.columns[0], config=published.config, cells=cells)


def test_every_report_has_its_text() -> None:
    assert set(TEXTS) == set(suites.reports())


@pytest.mark.parametrize("report", PRINTED)
def test_published_form_gives_back_the_report(report: str) -> None:
    """All that stands between the code fences, but for blank lines."""
    blocks = "\n".join(TEXTS[report].split("```")[1::2])
    printed = [line for line in blocks.splitlines() if line]
    ours = [published_form(measured(table)) for table in tables() if table.report == report]
    assert "\n".join(ours).splitlines() == printed


@pytest.mark.parametrize("report", PRINTED)
def test_data_files_hold_the_printed_digits(report: str) -> None:
    printed = re.findall(r"^\d+ +(\d.*)$", TEXTS[report], re.MULTILINE)
    ours = [row for table in suites.document(report)["tables"] for row in table["rows"]]
    assert ours == [line.split() for line in printed]


def test_la3_data_gives_back_its_tables() -> None:
    printed = [line for line in TEXTS["la3"].splitlines() if line.startswith("|")]
    ours = [markdown(table["columns"], table["rows"]) for table in suites.document("la3")["tables"]]
    assert "\n".join(ours).splitlines() == printed


@pytest.mark.parametrize(
    ("what", "section", "n", "row"),
    [
        ("speed-both", "Summary", 1024, (0.27, 0.31, 0.60, 0.44, 0.46)),
        ("speed-both", "", 8192, (2.506, 2.626, 5.492, 18.118, 18.325)),
        ("speed-bwd", "", 2048, (0.470, 0.501, 1.092, 1.027, 1.054)),
        ("speedup-both", "Summary", 8192, (7.52, 6.94, 3.32, 1.01)),
        ("memory-both", "", 2048, (640, 834)),
    ],
)
def test_la3_by_length(what: str, section: str, n: int, row: tuple[float, ...]) -> None:
    table = find(f"la3-{what}-batch4-head32-dim64-bf16", section)
    assert table is not None
    assert tuple(dict(table.rows)[n].values()) == row


def test_la3_is_complete() -> None:
    figures = sum(len(row) for table in tables() if table.report == "la3" for _, row in table.rows)
    # Summary, speedups, four figures of each detailed result, and two memories for each length.
    assert figures == 5 * 4 + 4 * 4 + 20 * 4 + 4 * 2


def test_title_and_section_name_a_table() -> None:
    keys = [(table.title, table.section) for table in tables()]
    assert len(set(keys)) == len(keys) == 4 + 8 + 7 + 4 + 12
    cached = find("flao-speed-bwd-batch12-head12-dim128-dim128-bf16", "cache kv, qkv")
    assert cached is not None
    assert cached.rows[-1][1]["Flao Tor C"] == 17.516245
    assert find("flao-speed-bwd-batch12-head12-dim128-dim128-bf16") is None


def test_source_gpu_and_configuration() -> None:
    table = find("tpa_decode-memory-fwd-batch32-head32-dim128-rank16-bf16")
    assert table is not None
    assert (table.gpu, table.metric, table.mode, table.axis) == ("A800", "memory", "fwd", "m")
    assert table.config == {"batch": 32, "heads": 32, "dim": 128, "rank": 16, "dtype": "bf16"}
    assert all(table.source and table.gpu and table.heading for table in tables())
