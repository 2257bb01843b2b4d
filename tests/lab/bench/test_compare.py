"""Results beside other results and beside the published ones."""

import copy

import pytest
from example import ENVIRONMENT, example_results

from fulmen.lab.bench import compare
from fulmen.lab.bench.report.side_by_side import history, side_by_side
from fulmen.lab.bench.results import Cell, Results, Table
from fulmen.lab.cli import main


def results(*cells):
    table = Table(
        suite="lasd",
        title="lasd-speed-fwd-batch1-head4-dim128-fp32",
        section="",
        metric="speed",
        mode="fwd",
        axis="n",
        columns=["LASD_P", "Flash"],
        baseline="Flash",
        config={"batch": 1, "heads": 4, "dim": 128, "dtype": "fp32", "device": "cpu"},
        cells=list(cells),
    )
    return Results(ENVIRONMENT, {}, "2026-01-01T00:00:00+00:00", tables=[table])


def timed(value, spread=0.0, n=1024, column="LASD_P"):
    return Cell(n, column, value, value * (1 - spread), value * (1 + spread))


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (timed(10.0, 0.01), timed(12.0, 0.01), "worse"),
        (timed(12.0, 0.01), timed(10.0, 0.01), "better"),
        (timed(10.0, 0.20), timed(12.0, 0.20), "same"),  # the spreads overlap
        (timed(10.0), timed(10.2), "same"),  # apart, but by less than noise
        (Cell(1024, "LASD_P", 10.0), Cell(1024, "LASD_P", 11.0), "worse"),  # memory has no spread
    ],
)
def test_verdicts_know_the_noise(before, after, verdict):
    (change,) = compare.changes(results(before), results(after))
    assert change.verdict == verdict
    assert change.worse_by == (pytest.approx(after.value / before.value - 1) if verdict == "worse" else 0.0)


@pytest.mark.parametrize(("limit", "status"), [([], 0), (["--fail-over", "10%"], 1), (["--fail-over", "30%"], 0)])
def test_exit_codes_for_ci(tmp_path, capsys, limit, status):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    results(timed(10.0), timed(50.0, column="Flash")).save(before)
    results(timed(12.0), timed(50.0, column="Flash")).save(after)
    assert main(["compare", str(before), str(after), *limit]) == status
    output = capsys.readouterr().out
    assert "worse    +20.0%  lasd-speed-fwd-batch1-head4-dim128-fp32 n = 1024 LASD_P: 10.000 -> 12.000 ms" in output
    assert "2 cells: 0 better, 1 same, 1 worse" in output


@pytest.mark.parametrize(("reason", "status"), [("wrong: off by nan", 1), ("over the time budget: 3 s", 0)])
def test_a_cell_that_broke_is_worse(tmp_path, capsys, reason, status):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    results(timed(10.0), timed(50.0, column="Flash")).save(before)
    results(Cell(1024, "LASD_P", skipped=reason), timed(50.0, column="Flash")).save(after)
    assert main(["compare", str(before), str(after), "--fail-over", "10%"]) == status
    assert ("10.000 ms -> wrong: off by nan" in capsys.readouterr().out) == bool(status)


def test_measured_ratios_stand_beside_the_published_ones(tmp_path, capsys):
    path = tmp_path / "results.json"
    results(timed(10.0), timed(25.0, column="Flash")).save(path)
    assert main(["compare", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "measured | published (A100, lasd-speed-fwd-batch1-head16-dim128-bf16)" in lines[0]
    # Published at n = 1024: Flash 0.071591, LASD_P 0.210293.
    assert [line.split() for line in lines if line.split()[0] == "1024"] == [["1024", "2.50", "|", "0.34"]]
    assert len(lines) == 2 + 8  # every published length has a line


def test_results_without_a_common_cell_are_refused():
    other = copy.deepcopy(results(timed(1.0)))
    other.tables[0].title = "lasd-speed-fwd-batch9-head4-dim128-fp32"
    with pytest.raises(ValueError, match="no cell in common"):
        compare.changes(results(timed(1.0)), other)


def run_of(value, started, **changes):
    made = example_results((256, 1024))
    made.tables = [table for table in made.tables if table.suite == "lasd"][:2]
    made.tables[0].cell(1024, "LASD_P").value = value
    made.started = started
    made.options = made.options | changes
    return made


def test_runs_side_by_side_have_their_columns_once_each():
    runs = {"a.json": run_of(1.0, "2026-01-01"), "b.json": run_of(2.0, "2026-01-02", dtype="bf16")}
    for table in runs["b.json"].tables:
        table.title, table.config = table.title.replace("fp32", "bf16"), table.config | {"dtype": "bf16"}
    table = side_by_side(runs).tables[0]
    assert table.columns[:4] == ["LASD_R [fp32]", "LASD_R [bf16]", "LASD_P [fp32]", "LASD_P [bf16]"]
    assert [table.cell(1024, f"LASD_P [{dtype}]").value for dtype in ("fp32", "bf16")] == [1.0, 2.0]
    assert table.baseline == "Flash [fp32]"
    assert table.title.endswith("-dim128")


def test_a_history_has_a_point_for_each_run():
    runs = [run_of(float(value), f"2026-01-0{value}") for value in (3, 1, 2)]
    table = history(runs).tables[0]
    assert (table.axis, table.lengths) == ("run", [1, 2, 3])
    assert [table.cell(n, "LASD_P").value for n in (1, 2, 3)] == [1.0, 2.0, 3.0]  # by their time, at the longest length


def test_both_are_pages(tmp_path, capsys):
    folder = tmp_path / "runs"
    folder.mkdir()
    for i in (1, 2):
        run_of(float(i), f"2026-01-0{i}").save(folder / f"{i}.json")
    files = [str(folder / f"{i}.json") for i in (1, 2)]
    assert main(["compare", *files, "--out", str(tmp_path / "both")]) == 0
    assert f"LASD_P [{files[0]}]" in (tmp_path / "both" / "report.html").read_text()
    assert main(["compare", str(folder), "--out", str(tmp_path / "history")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "history" / "report.html")
    for wrong in ([str(folder)], [*files, files[0]], [files[0], "--out", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            main(["compare", *wrong])
