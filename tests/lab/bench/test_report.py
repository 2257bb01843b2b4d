"""`fulmen report`: the files, and that every figure in them comes from the results."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from example import ENVIRONMENT, SKIPPED, example_results

import fulmen.lab.cli
from fulmen.lab.bench import suites
from fulmen.lab.bench.folder import Folder
from fulmen.lab.bench.owners import Owner
from fulmen.lab.bench.published import closest
from fulmen.lab.bench.report import kernels, plots, write
from fulmen.lab.bench.report.findings import duel, headline, key_findings
from fulmen.lab.bench.report.groups import Group, groups_of
from fulmen.lab.bench.report.kernels import shared_memory_budget
from fulmen.lab.bench.report.page import page
from fulmen.lab.bench.report.plots import why_no_plots
from fulmen.lab.bench.report.summary import summary
from fulmen.lab.bench.results import Cell, Results, Table, load
from fulmen.lab.bench.suite import describe_columns
from fulmen.lab.bench.tables import NOISE

SECTIONS = [
    "Summary", "System Configuration", "Benchmark Configuration", "Kernel Configuration", "Detailed Results",
    "Kernel Variants Explained", "Algorithm: Linear Attention", "Memory Efficiency", "Shared-Memory Budget",
    "Tables in the Published Form", "Files",
]  # fmt: skip
OURS, TORCH = "Fulmen, recomputing backward (LA3-Chunked)", "Softmax attention of torch (PyTorch-SDPA)"
KERNEL = {
    "kernel": "dq, recompute", "operator": "linear_attention", "role": "kernel", "arch": "sm_120", "dtype": "bf16",
    "D": 64, "E": 64, "decay": "none", "shared": 12288, "shared_limit": 101376, "registers": 184, "spills": 0,
}  # fmt: skip


def table(metric: str, mode: str, values: dict[int, tuple[float, float]]) -> Table:
    """Example figures of two columns."""
    title = f"la3-{metric}-{mode}-batch1-head2-dim64-fp32"
    config = {"batch": 1, "heads": 2, "dim": 64, "dtype": "fp32"}
    columns = ["LA3-Chunked", "PyTorch-SDPA"]
    cells = [Cell(n, name, value) for n, row in values.items() for name, value in zip(columns, row, strict=True)]
    owners = {"LA3-Chunked": Owner("fulmen", version="0.1.0"), "PyTorch-SDPA": Owner("torch", version="2.13.0")}
    return Table("la3", title, "", metric, mode, "n", columns, "PyTorch-SDPA", config, cells, owners=owners)


@pytest.fixture
def small() -> Results:
    results = example_results()
    results.tables = [
        table("speed", "fwd", {64: (2.0, 1.0), 128: (4.0, 8.0), 256: (8.0, 32.0)}),
        table("speed", "bwd", {64: (4.0, 3.0), 128: (8.0, 16.0), 256: (16.0, 64.0)}),
        table("memory", "bwd", {64: (10.0, 12.0), 128: (20.0, 40.0)}),
    ]
    return results


def one_size_of_each_suite() -> Results:
    results = example_results()
    first = {group.suite: group for group in reversed(groups_of(results.tables))}
    results.tables = [table for table in results.tables if table in first[table.suite].tables.values()]
    return results


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(one_size_of_each_suite(), tmp_path_factory.mktemp("report") / "new" / "folder")


def test_every_file_is_written(written: list[Path]) -> None:
    assert all(path.stat().st_size > 100 for path in written)
    names = {path.name for path in written if path.suffix != ".png"}
    markdown = {f"{name}.md" for name in suites.reports()}
    assert names == {"results.csv", "report.html", *markdown}


def test_a_report_leaves_result_files_alone(small: Results, tmp_path: Path) -> None:
    latest, kept = tmp_path / "benchmark_results.json", tmp_path / "history" / "2026-01-31.json"
    example_results().save(latest)
    kept.parent.mkdir()
    small.save(kept)
    assert fulmen.lab.cli.main(["report", str(kept)]) == 0
    assert load(latest) == example_results()
    assert (tmp_path / "history" / "2026-01-31-report" / "la3.md").exists()
    assert fulmen.lab.cli.main(["report", str(latest)]) == 0
    assert (tmp_path / "la3.md").exists()
    assert load(latest) == example_results()


def test_a_report_waits_for_the_run_in_its_folder(
    small: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.save(tmp_path / "benchmark_results.json")
    with Folder(tmp_path):
        assert fulmen.lab.cli.main(["report", str(tmp_path / "benchmark_results.json")]) == 1
    assert "is in use by process" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_nothing_is_written_unless_all_can_be(small: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError

    monkeypatch.setattr("fulmen.lab.bench.report.markdown_report", fail)
    with pytest.raises(RuntimeError):
        write(small, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(bool(why_no_plots()), reason=why_no_plots() or "matplotlib is there")
def test_every_suite_has_a_plot(written: list[Path]) -> None:
    plots = [path for path in written if path.suffix == ".png"]
    assert [path.name.partition("-")[0] for path in plots] == list(suites.reports())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)


def test_markdown_has_every_section_of_the_la3_report(small: Results, tmp_path: Path) -> None:
    write(small, tmp_path)
    text = (tmp_path / "la3.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    for line in (
        "| Kernel | N=64 | N=128 | N=256 |",
        f"| **{OURS}** | **6.00ms** | **12.00ms** | **24.00ms** |",
        f"| {TORCH} | 4.00ms | 24.00ms | 96.00ms |",
        f"| **{OURS}** | **0.67x** | **2.00x** | **4.00x** |",
        f"| {OURS} | 128 | 4.000 | 8.000 | 12.000 | **2.00x** | – | – |",
        "| 128 | 20.0 | 40.0 | 50% |",
        "| cpu model | Example CPU |",
        "| Head Dimension | 64 |",
    ):
        assert line in text.splitlines()


def test_every_suite_has_the_tiles_of_its_kernels(written: list[Path]) -> None:
    for path in written:
        if path.suffix == ".md":
            section = path.read_text().partition("## Kernel Configuration")[2].partition("\n## ")[0]
            assert "| Kernel | Architectures | Chunk |" in section, path.name
            assert "sm_120" in section, path.name


def test_without_triton_there_are_no_tiles(small: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_triton_is_missing", lambda: "triton is not installed")
    write(small, tmp_path)
    text = (tmp_path / "la3.md").read_text()
    assert "GPU: no tiles, triton is not installed." in text
    assert "| Kernel | Architectures |" not in text
    assert "CPU core:" in text


def test_findings_are_computed(small: Results) -> None:
    assert key_findings(groups_of(small.tables)[0]) == [
        f"**{OURS}** takes 24.00 ms at N=256 (forward and backward), {TORCH} (torch 2.13.0) 96.00 ms: "
        "**4.00x as fast**",
        "LA3-Chunked overtakes PyTorch-SDPA between N=64 and 128",
        "From the last two lengths measured, time grows: LA3-Chunked as N^1.00, PyTorch-SDPA as N^2.00",
        "At N=128 LA3-Chunked needs 20 MiB (backward), 0.50 times the 40 MiB of PyTorch-SDPA",
    ]


def test_a_duel_is_between_what_takes_the_same_tensors(small: Results) -> None:
    """And a card has the median of a suite's, not the best."""
    for one in small.tables:
        one.columns.append("LA3-Original")  # with a decay, which softmax attention has not
        one.owners["LA3-Original"] = one.owners["LA3-Chunked"]
        one.cells += [Cell(n, "LA3-Original", 0.5) for n in one.lengths]
    groups = groups_of(small.tables)
    found = duel(groups[0], ("fwd", "bwd"))
    assert found is not None
    assert (found.ours, found.other, found.n, found.ratio) == ("LA3-Chunked", "PyTorch-SDPA", 256, 4.0)
    many = []
    for slower in (1.0, 8.0, 2.0):
        again = copy.deepcopy(groups[0])
        for one in again.tables.values():
            for cell in one.cells:
                if cell.column == "PyTorch-SDPA" and cell.value:
                    cell.value *= slower
        many.append(again)
    chosen = headline(many)
    assert chosen is not None
    assert (chosen[0].ratio, chosen[1]) == (8.0, 3)


def test_where_all_are_ours_the_baseline_is_the_other(small: Results) -> None:
    for one in small.tables:
        one.owners["PyTorch-SDPA"] = one.owners["LA3-Chunked"]
    found = duel(next(iter(groups_of(small.filled))), ("fwd", "bwd"))
    assert found is not None
    assert (found.ours, found.other, found.ratio) == ("LA3-Chunked", "PyTorch-SDPA", 4.0)
    assert summary(small) == ""  # which is of those that are not ours


def test_whose_a_column_is_was_decided_where_it_ran(small: Results, tmp_path: Path) -> None:
    for one in small.tables:
        one.owners["PyTorch-SDPA"] = Owner("flash_attn", version="2.8")
    small.save(tmp_path / "benchmark_results.json")
    write(load(tmp_path / "benchmark_results.json"), tmp_path)
    assert "| PyTorch-SDPA | Softmax attention of torch | flash_attn 2.8 |" in (tmp_path / "la3.md").read_text()
    small.tables[0].owners.clear()
    assert groups_of(small.tables[:1])[0].owner("PyTorch-SDPA").kind == "unknown"  # and in no duel


def test_sections_describe_their_own_columns() -> None:
    """Where columns of several sections have one name."""
    groups = [Group("delta", section, "") for section in ("token gate", "decode, token gate")]
    found = [group.column("Fulmen") for group in groups]
    assert [column.about for column in found if column] == ["delta_rule, token decay", "delta_rule_step, token decay"]
    listed = [row["about"] for row in describe_columns(suites.find("delta"), "cpu") if row["name"] == "Fulmen"]
    assert listed[:3:2] == ["delta_rule, token decay", "delta_rule_step, token decay"]


@pytest.mark.skipif(bool(why_no_plots()), reason=why_no_plots() or "matplotlib is there")
def test_noise_is_marked_in_plots(small: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = small.tables[0].cell(256, "PyTorch-SDPA")
    assert cell is not None
    cell.sittings = [30.0, 60.0]
    marked: list[tuple[int, float]] = []
    monkeypatch.setattr(plots, "_mark", lambda axes, points, color: marked.extend(points))
    plots.drawn_plots(groups_of(small.tables))
    assert marked == [(256, 4.0), (256, 96.0), (256, 1.0)]  # the speedup of ours; the time, and the speedup over itself


def test_noise_is_marked_in_every_text(small: Results, tmp_path: Path) -> None:
    cell = small.tables[0].cell(256, "PyTorch-SDPA")
    assert cell is not None
    cell.sittings = [30.0, 60.0]
    write(small, tmp_path)
    text = (tmp_path / "la3.md").read_text()
    for line in (
        f"| {TORCH} | 4.00ms | 24.00ms | 96.00ms~ |",
        f"| **{OURS}** | **0.67x** | **2.00x** | **4.00x~** |",  # over a noisy baseline
        f"~ {NOISE}",
    ):
        assert line in text.splitlines()
    assert "96.00 ms~: **4.00x" in text
    lines = summary(small).splitlines()
    assert "96.00 ms~ (PyTorch-SDPA)  4.00x~" in lines[-2]
    assert lines[-1] == f"~ {NOISE}"


def test_a_phase_is_told_once(small: Results) -> None:
    small.tables = small.tables[:1]
    for one in small.tables:
        one.suite, one.section = "models", "Mamba2 training"
        one.columns = ["patched", "transformers"]
        one.owners = {"patched": Owner("fulmen"), "transformers": Owner("transformers")}
        for cell in one.cells:
            cell.column = "patched" if cell.column == "LA3-Chunked" else "transformers"
            cell.value = (cell.value or 0.0) * 100
    (row,) = (line for line in summary(small).splitlines() if line.startswith("models"))
    assert re.match(r"models Mamba2 training  training  256  800\.00 ms \(patched\)  3200 ms \(transformers\)", row)


def test_nothing_is_claimed_where_the_baseline_did_not_run(small: Results) -> None:
    for one in small.tables:
        for cell in one.cells:
            if cell.column == one.baseline:
                cell.value, cell.skipped = None, "too slow"
    assert key_findings(groups_of(small.tables)[0]) == [
        f"**{OURS}** is fastest at N=256: 24.00 ms (forward and backward)"
    ]


def test_reasons_are_in_the_markdown(written: list[Path]) -> None:
    la3 = next(path for path in written if path.name == "la3.md")
    assert f"- FlashAttn-2 at 1024, 2048, 4096, 8192: {SKIPPED['FlashAttn-2']}" in la3.read_text().splitlines()


def test_shared_memory_comes_from_inspection(small: Results, tmp_path: Path) -> None:
    write(small, tmp_path, [KERNEL, KERNEL | {"operator": "lightning2", "role": "baseline", "shared": 99999}])
    text = (tmp_path / "la3.md").read_text()
    assert "| sm_120 | recompute | dq, recompute, none, 64 channels, bf16 | 12,288 | 101,376 | 12% | 0 of 1 |" in text
    write(small, tmp_path)
    assert "fulmen inspect --json" in (tmp_path / "la3.md").read_text()


def test_a_suite_has_the_shared_memory_of_its_own_kernels() -> None:
    labels = {"linear_attention": "dv", "tpa_decode": "tpa head", "output_gated_attention": "gate dv"}
    inspected = [
        KERNEL | {"operator": operator, "kernel": kernel, "shared": 1000 * i}
        for i, (operator, kernel) in enumerate(labels.items(), 1)
    ]
    for name, kernel in (("la3", "dv"), ("tpa_decode", "tpa head"), ("flao", "gate dv")):
        budget = shared_memory_budget(suites.find(name), inspected)[-1]
        rows = [line for line in budget.splitlines() if "sm_120" in line]
        assert [row.split(" | ")[2].split(",")[0] for row in rows] == [kernel]


@pytest.mark.parametrize(
    ("suite", "batch", "gpu", "title"),
    [
        ("lasd", 4, "A100", "lasd-speed-fwd-batch4-head32-dim128-bf16"),
        ("lasd", 1, "A100", "lasd-speed-fwd-batch1-head16-dim128-bf16"),
        ("la3", 1, "NVIDIA GeForce RTX 5090", "la3-speed-fwd-batch4-head32-dim64-bf16"),
    ],
)
def test_published_curves_are_of_the_nearest_size(suite: str, batch: int, gpu: str, title: str) -> None:
    measured = table("speed", "fwd", {})
    measured.suite, measured.config = suite, {"batch": batch, "heads": 16}
    found = closest(measured)
    assert found is not None
    assert (found.gpu, found.title) == (gpu, title)


def test_the_backwards_memory_has_a_published_counterpart_in_la3() -> None:
    found = closest(table("memory", "bwd", {}))
    assert found is not None
    assert found.mode == "both"
    assert closest(table("memory", "fwd", {})) is None


def test_the_command(small: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, inspection = tmp_path / "results.json", tmp_path / "kernels.json"
    small.save(results)
    inspection.write_text(json.dumps([KERNEL]))
    out = tmp_path / "out"
    assert fulmen.lab.cli.main(["report", str(results), "--out", str(out), "--inspection", str(inspection)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert str(out / "report.html") in printed
    assert "12,288" in (out / "la3.md").read_text()


def test_a_wrong_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert fulmen.lab.cli.main(["report", str(other)]) == 1
    assert "other.json is not a result file of `fulmen bench`: it has no field 'format'" in capsys.readouterr().err
    other.write_text('{"format": 2, "environment": {}, "options": {}}')
    assert fulmen.lab.cli.main(["report", str(other)]) == 1
    assert "it has no field 'started'" in capsys.readouterr().err
    bare = {"format": 2, "environment": {}, "options": {}, "started": "2026-01-31"}
    for environment, missing in (
        ({}, "'fulmen' in environment"),
        (ENVIRONMENT | {"cpu": {}}, "'model' in environment.cpu"),
    ):
        other.write_text(json.dumps(bare | {"environment": environment}))
        assert fulmen.lab.cli.main(["report", str(other)]) == 1
        assert f"it has no field {missing}" in capsys.readouterr().err
    other.write_text("{}")
    results = tmp_path / "results.json"
    example_results().save(results)
    assert fulmen.lab.cli.main(["report", str(results), "--inspection", str(other)]) == 1
    assert "other.json is not a file of `fulmen inspect --json`" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        fulmen.lab.cli.main(["report", str(tmp_path / "none.json")])
    assert "there is no file" in capsys.readouterr().err


def test_tables_without_cells_are_left_out(small, tmp_path):
    """They belong to a run that was stopped, or failed, before they got their first."""
    small.tables[1].cells.clear()
    write(small, tmp_path / "some")
    assert "speed-bwd" not in (tmp_path / "some" / "la3.md").read_text()
    small.tables = [table("speed", "fwd", {})]
    write(small, tmp_path / "none")
    assert not (tmp_path / "none" / "la3.md").exists()


def test_a_page_shows_what_it_is_given_as_text():
    """What a result file says cannot end the script that it stands in, nor start another."""
    hostile, results = "</script><script>alert(1)</script><img src=x onerror=alert(2)>", example_results()
    results.environment = results.environment | {"cpu": results.environment["cpu"] | {"model": hostile}}
    results.tables[0].cells[0].skipped = hostile
    written = page(results)
    assert hostile not in written
    assert "<img" not in written
    assert written.count("</script>") == 2
