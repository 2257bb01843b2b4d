"""A new suite is a module and a data file, and nothing else: every command has it."""

import json

import pytest

from fulmen.lab.bench.plan import PACES, Pace
from fulmen.lab.bench.results import load
from fulmen.lab.cli import main

pytestmark = pytest.mark.usefixtures("toy")
TITLE = "toy-speed-fwd-batch1-head2-dim4"


@pytest.fixture
def measured(tmp_path, monkeypatch, capsys):
    """The folder of a run."""
    monkeypatch.setitem(PACES, "quick", Pace(0.0, 3, 2, None))
    assert main(["bench", "toy", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert f"{TITLE}-fp32:" in capsys.readouterr().out
    return tmp_path


def test_it_is_listed(capsys):
    assert main(["list", "--device", "cpu"]) == 0
    assert (
        "toy: doubling\n  Double        Double (ours): doubles\n  Sum           Sum (ours): doubles\n"
        in capsys.readouterr().out
    )


def test_it_is_measured_and_reported(measured):
    speed = load(measured / "benchmark_results.json").tables[0]
    assert (speed.suite, speed.columns, speed.baseline) == ("toy", ["Double", "Sum"], "Double")
    assert all(cell.value > 0 for cell in speed.cells)
    assert speed.errors == {"Double": 0, "Sum": 0}
    text = (measured / "toy.md").read_text()
    assert text.startswith("# Doubling Benchmark Report")
    assert "| Sum | Sum | ours | doubles | Short | Does little |" in text
    assert "Kernel Configuration" not in text  # it has none of ours
    assert "Ways to double a tensor." in (measured / "report.html").read_text()


def test_it_is_compared_with_its_published_figures(measured, capsys):
    assert main(["compare", str(measured / "benchmark_results.json")]) == 0
    output = capsys.readouterr().out
    lines = output[output.index("toy-speed") :].splitlines()  # a warning may come before
    assert f"published (A100, {TITLE}-bf16)" in lines[0]
    assert [line.split()[-1] for line in lines[2:4]] == ["0.50", "0.25"]


def test_it_has_limits(tmp_path, capsys):
    path = tmp_path / "cells.json"
    assert main(["roofline", "--report", "toy", "--json", str(path)]) == 0
    assert f"{TITLE}-bf16, limits of A100 (ms):" in capsys.readouterr().out
    cells = json.loads(path.read_text())
    assert [(cell["column"], cell["n"]) for cell in cells] == [("Double", 8), ("Sum", 8), ("Double", 16), ("Sum", 16)]
    assert cells[0]["limit"] == pytest.approx(2 * 2 * 8 * 2 * 4 / 2039e9 * 1e3)
    assert cells[0]["ours"] is None
