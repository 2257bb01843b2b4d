"""Tables as text and CSV; what the published form does with cells that have no value."""

from __future__ import annotations

import csv
from io import StringIO

from example import example_results

from fulmen.lab.bench.results import Cell, Table
from fulmen.lab.bench.tables import NOISE, error_line, published_form, speedup, to_csv


def table(*cells: Cell) -> Table:
    title = "lasd-speed-fwd-batch1-head1-dim8-fp32"
    return Table("lasd", title, "", "speed", "fwd", "n", ["A", "B c"], "A", {}, list(cells))


def test_a_missing_value_has_a_mark_and_its_reason_below() -> None:
    slow = "predicted to take 9 s"
    cells = table(
        Cell(64, "A", 1.5),
        Cell(64, "B c", skipped="no GPU"),
        Cell(128, "A", 12.25),
        Cell(128, "B c", skipped=slow),
        Cell(256, "A", skipped=slow),
    )
    assert published_form(cells).splitlines() == [
        "lasd-speed-fwd-batch1-head1-dim8-fp32:",
        "       n      A  B c",
        "0   64.0   1.50  [1]",
        "1  128.0  12.25  [2]",
        "2  256.0    [2]  [3]",
        "[1] no GPU",
        "[2] predicted to take 9 s",
        "[3] not run",
    ]


def test_reasons_of_one_kind_share_a_mark() -> None:
    cells = table(
        Cell(64, "A", skipped="over the time budget: about 2 s"),
        Cell(64, "B c", skipped="over the time budget: about 3 s"),
    )
    assert published_form(cells).splitlines()[2:] == [
        "0  64.0  [1]  [1]",
        "[1] over the time budget: A at 64 about 2 s; B c at 64 about 3 s",
    ]


def test_eleven_lengths_keep_the_index_aligned() -> None:
    lines = published_form(table(*(Cell(n, "A", 1.0) for n in range(1, 12)))).splitlines()
    assert lines[1] == "       n    A  B c"
    assert lines[2] == "0    1.0  1.0  [1]"
    assert lines[12] == "10  11.0  1.0  [1]"


def test_no_cells() -> None:
    assert published_form(table()).splitlines()[1:] == ["  n  A  B c"]
    assert error_line(table()) == ""


def test_an_error_is_told_once_with_the_size_it_was_taken_at() -> None:
    cells = table(Cell(64, "A", 1.5), Cell(64, "B c", 2.0), Cell(128, "A", 2.5))
    cells.errors, cells.checked = {"A": 3e-7}, "n = 131, heads 2"
    assert error_line(cells) == "off from float64 (n = 131, heads 2): A 3e-07"


def test_values_that_cannot_be_trusted_are_marked() -> None:
    cells = table(Cell(64, "A", 1.5), Cell(64, "B c", 2.0), Cell(128, "A", 2.5))
    for cell, other in zip(cells.cells, (2.0, 2.1, 2.6), strict=True):
        cell.sittings = [other, cell.value or 0.0]
    assert published_form(cells).splitlines()[1:] == [
        "       n    A   B c",
        "0   64.0  1.5~  2.0",
        "1  128.0  2.5   [1]",
        "[1] not run",
        f"~ {NOISE}",
    ]


def test_speedup_is_over_the_baseline() -> None:
    cells = table(Cell(64, "A", 3.0), Cell(64, "B c", 2.0), Cell(128, "A", 3.0), Cell(128, "B c", skipped="no GPU"))
    assert speedup(cells, 64, "B c") == 1.5
    assert speedup(cells, 128, "B c") is None


def test_csv_has_every_cell_with_all_that_is_known() -> None:
    tables = example_results().tables
    tables[0].cells[0].sittings.pop()
    lines = list(csv.DictReader(StringIO(to_csv(tables))))
    cells = [(one, cell) for one in tables for cell in one.cells]
    assert len(lines) == len(cells)
    for line, (one, cell) in zip(lines, cells, strict=True):
        assert (line["title"], line["column"], int(line["n"])) == (one.title, cell.column, cell.n)
        assert line["value"] == ("" if cell.value is None else str(cell.value))
        assert line["skipped"] == (cell.skipped or "")
        assert line["owner"] == one.owners[cell.column].described
        assert line["error"] == str(one.errors.get(cell.column, ""))
        assert line["error_at"] == (one.checked if cell.column in one.errors else "")
        assert line["noisy"] == ("yes" if cell.noisy else "")
    assert {line["unit"] for line in lines if line["metric"] == "memory"} == {"MiB"}
