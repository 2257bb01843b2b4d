"""Results beside other results and beside the published ones."""

import copy
import shutil
from pathlib import Path

import pytest
from example import ENVIRONMENT, example_results

from fulmen.lab.bench import compare
from fulmen.lab.bench.report.side_by_side import history, labels, side_by_side
from fulmen.lab.bench.results import Cell, Results, Table
from fulmen.lab.bench.tables import NOISE
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


def timed(value, lead=0.0, n=1024, column="LASD_P"):
    """``lead``: of the fastest sitting."""
    return Cell(n, column, value, value, value * (1 + lead), [value * (1 + lead), value])


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (timed(10.0, 0.01), timed(12.0, 0.01), "worse"),
        (timed(12.0, 0.01), timed(10.0, 0.01), "better"),
        (timed(10.0, 0.30), timed(12.0, 0.01), "same"),  # it may as well have been 13
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
    assert "of 2 cells above 5 ms, 0 are marked as noisy; of the rest 1 of 2 are within 10%" in output


def test_how_far_two_runs_agree(tmp_path, capsys):
    """Of cells above 5 ms, and of these only those that neither run marks as noisy."""
    before = [timed(4.0), timed(10.0, n=2048), timed(20.0, n=4096), timed(30.0, 0.2, n=8192)]
    after = [timed(9.0), timed(10.9, n=2048), timed(23.0, n=4096), timed(31.0, n=8192)]
    found = compare.changes(results(*before), results(*after))
    assert compare.agreement(found) == (
        "of 3 cells above 5 ms, 1 are marked as noisy; of the rest 1 of 2 are within 10%"
    )


def test_noise_and_load_are_told(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("before.json", "after.json")]
    for path, value in zip(paths, (10.0, 30.0), strict=True):
        run = results(timed(value, 0.15), timed(50.0, column="Flash"))
        run.conditions.stolen = 0.1 if value > 20 else 0.0
        run.save(Path(path))
    assert main(["compare", *paths]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"{paths[1]}: Measured under load: 10% of the CPU time")
    assert output[1].endswith("10.000 -> 30.000 ms ~")
    assert output[-1] == f"~ {NOISE}"
    assert main(["compare", paths[0], paths[0]]) == 0
    assert "2 cells: 0 better, 2 same, 0 worse" in capsys.readouterr().out
    assert main(["compare", paths[1]]) == 0
    output = capsys.readouterr().out
    assert output.startswith("Measured under load")
    assert "1.67~ |    0.34" in output
    assert main(["compare", *paths, "--out", str(tmp_path)]) == 0
    assert f"{paths[1]}: Measured under load" in (tmp_path / "compare.html").read_text()


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
    runs[1].tables[0].cells = [cell for cell in runs[1].tables[0].cells if cell.n == 256]
    tables = {table.title: table for table in history([*runs, copy.deepcopy(runs[0])]).tables}  # a copy is no run
    table = tables["lasd-speed-fwd-batch4-head32-dim128-fp32-n1024"]
    assert (table.axis, table.lengths) == ("run", [2, 3])  # the oldest has no such length
    assert [table.cell(n, "LASD_P").value for n in (2, 3)] == [2.0, 3.0]  # by their time
    assert tables["lasd-speed-fwd-batch4-head32-dim128-fp32-n256"].lengths == [1, 2, 3]
    assert table.config["ticks"] == {1: "2026-01-01 0.1.0", 2: "2026-01-02 0.1.0", 3: "2026-01-03 0.1.0"}


def test_a_history_keeps_machines_apart():
    runs = [run_of(float(value), f"2026-01-0{value}") for value in (1, 2)]
    runs[1].environment = ENVIRONMENT | {"cpu": ENVIRONMENT["cpu"] | {"model": "Other CPU"}}
    table = history(runs).tables[0]
    names = [f"LASD_P [{cpu}, 2 threads]" for cpu in ("Example CPU", "Other CPU")]
    assert [name for name in table.columns if name.startswith("LASD_P ")] == names
    assert [[table.cell(n, name) is not None for n in (1, 2)] for name in names] == [[True, False], [False, True]]
    assert table.owners[names[0]].kind == "ours"


def test_runs_whose_freed_memory_was_returned_are_told_apart():
    runs = [run_of(float(value), f"2026-01-0{value}") for value in (1, 2)]
    runs[1].options = runs[1].options | {"freed_memory": "returned"}
    names = [f"LASD_P [Example CPU, 2 threads, freed memory {what}]" for what in ("kept", "returned")]
    assert [name for name in history(runs).tables[0].columns if name.startswith("LASD_P ")] == names
    told = {"a": "freed memory kept", "b": "freed memory returned"}
    assert labels({"a": runs[0], "b": runs[1]}) == told


def test_a_run_may_be_given_by_its_folder(tmp_path, capsys):
    folders = []
    for i in (1, 2):
        folders.append(tmp_path / f"run{i}")
        folders[-1].mkdir()
        run_of(10.0 * i, f"2026-01-0{i}").save(folders[-1] / "benchmark_results.json")
    first, second = map(str, folders)
    assert main(["compare", first, second]) == 0
    assert "36 of 37 are within 10%" in capsys.readouterr().out
    assert main(["compare", first]) == 0
    assert main(["compare", first, second, "--out", str(tmp_path / "both")]) == 0
    assert f"LASD_P [{first}]" in (tmp_path / "both" / "compare.html").read_text()
    assert main(["report", first]) == 0
    assert (folders[0] / "report.html").exists()
    capsys.readouterr()
    for command in ("compare", "report"):
        with pytest.raises(SystemExit, match="2"):
            main([command, str(tmp_path)])
        assert f"there is no benchmark_results.json in {tmp_path}" in capsys.readouterr().err


def test_both_are_pages(tmp_path, capsys):
    folder = tmp_path / "runs"
    folder.mkdir()
    for i in (1, 2):
        run_of(float(i), f"2026-01-0{i}").save(folder / f"{i}.json")
    files = [str(folder / f"{i}.json") for i in (1, 2)]
    assert main(["compare", *files, "--out", str(tmp_path / "both")]) == 0
    assert f"LASD_P [{files[0]}]" in (tmp_path / "both" / "compare.html").read_text()
    (folder / "kernels.json").write_text("[]")
    shutil.copy(files[0], folder / "copy.json")
    assert main(["compare", str(folder), "--out", str(tmp_path / "history")]) == 0
    output, errors = capsys.readouterr()
    assert output.splitlines()[-1] == str(tmp_path / "history" / "compare.html")
    assert "left out" in errors
    assert "kernels.json is not a result file" in errors
    for wrong in ([str(folder)], [*files, files[0]], [files[0], "--out", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            main(["compare", *wrong])
