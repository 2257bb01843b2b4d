"""`fulmen bench` and `fulmen list` as a user meets them."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from fulmen.lab.bench.results import load
from fulmen.lab.cli import main

TINY = (
    "lasd",
    "--columns",
    "LASD_P,Flash",
    "--heads",
    "2",
    "--dim",
    "16",
    "--metric",
    "speed",
    "--preset",
    "laptop",
    "--budget",
    "6",
)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("fulmen",), "no suite 'fulmen'; there are flao, la3, lasd, models, state, tpa_decode and limits"),
        (("limits", "lasd"), "limits runs alone"),
        (("limits", "--threads", "1"), "limits takes no option but --json; got --threads"),
        (("lasd", "--columns", ","), "expected names separated by commas, got ','"),
        (("lasd", "--out", __file__), "is not a folder"),
        (("lasd", "--columns", "LASD_Q"), "no column 'LASD_Q' in lasd; there are LASD_R, LASD_P"),
        (("state", "--mode", "bwd"), "state has no bwd"),
        (("lasd", "--rank", "4"), "lasd has no rank"),
        (("--lengths", "many"), "expected whole numbers separated by commas, got 'many'"),
        (("--lengths", "0"), "a length must be at least 1, got 0"),
        (("--batch", "-1"), "must be at least 1, got -1"),
        (("--heads", "0"), "must be at least 1, got 0"),
        (("--dim", "513"), "argument --dim: must be at most 512, got 513"),
        (("--dim", "0"), "must be at least 1, got 0"),
        (("tpa_decode", "--rank", "513"), "argument --rank: must be at most 512, got 513"),
        (("--budget", "0"), "must be more than 0 seconds, got 0"),
        (("--budget", "soon"), "expected a number of seconds, got 'soon'"),
        (("--dtype", "fp8"), "invalid choice: 'fp8'"),
        (("--json", "no/such/folder/results.json"), "there is no folder no/such/folder"),
        (("--colums", "LASD_P"), "unrecognized arguments: --colums"),
    ],
)
def test_a_wrong_option_exits_with_2_and_says_why(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *args])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_cuda_needs_a_device_or_a_dry_run(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "lasd", "--device", "cuda"])
    assert stop.value.code == 2
    assert "--dry-run" in capsys.readouterr().err


def test_list_says_what_runs_here(capsys):
    assert main(["list", "--json", "--device", "cpu"]) == 0
    suites = json.loads(capsys.readouterr().out)["suites"]
    assert list(suites) == ["flao", "la3", "lasd", "models", "state", "tpa_decode", "limits"]
    columns = {column["name"]: column for column in suites["la3"]["columns"]}
    assert columns["PyTorch-SDPA"]["available"] is True
    assert columns["PyTorch-SDPA"]["reason"] == ""
    assert columns["FlashAttn-2"]["available"] is False
    assert columns["FlashAttn-2"]["reason"] == "flash_attn runs on CUDA only"


def test_list_for_people(capsys):
    assert main(["list", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "GLA_K         channel decay: fla's chunk_gla on CUDA; on CPU our torch form" in output
    assert "not here: flash_attn runs on CUDA only" in output


def start(*args):
    command = [sys.executable, "-m", "fulmen", "bench", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_cells(path, process):
    """Until the first length is on disk, and more are to come."""
    while process.poll() is None:
        if path.exists():
            results = load(path)  # a file is whole at any moment
            if any(table.cells for table in results.tables):
                return results
        time.sleep(0.02)
    raise AssertionError(f"ended before it could be stopped: {process.communicate()}")


def test_a_killed_run_is_resumed(tmp_path):
    args = (*TINY, "--lengths", "8,16,24", "--out", str(tmp_path))
    process = start(*args)
    wait_for_cells(tmp_path / "benchmark_results.json", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = load(tmp_path / "benchmark_results.json")
    assert before.finished is None

    assert main(["bench", *args, "--resume", "--json", str(tmp_path / "copy.json")]) == 0
    after = load(tmp_path / "copy.json")
    assert after.finished is not None
    assert after.started == before.started
    assert [table.lengths for table in after.tables] == [[8, 16, 24]] * 2
    for table in before.tables:
        now = next(other for other in after.tables if other.title == table.title)
        assert all(now.cell(cell.n, cell.column) == cell for cell in table.cells)


def test_resuming_with_other_options_is_refused(tmp_path, capsys):
    args = ["bench", *TINY[:-4], "--budget", "1", "--lengths", "8", "--mode", "fwd", "--out", str(tmp_path)]
    assert main(args) == 0
    with pytest.raises(SystemExit) as stop:
        main([*args, "--batch", "3", "--resume"])
    assert stop.value.code == 2
    assert "was begun with batch = None, now it is 3; give the same options" in capsys.readouterr().err


def test_resuming_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *TINY, "--out", str(tmp_path / "new"), "--resume"])
    assert stop.value.code == 2
    assert (
        "benchmark_results.json to go on with; leave out --resume, or give the run's --out" in capsys.readouterr().err
    )
    assert not (tmp_path / "new").exists()


def test_a_dry_run_has_nothing_to_resume(capsys):
    with pytest.raises(SystemExit):
        main(["bench", *TINY, "--dry-run", "--resume"])
    assert "a --dry-run measures nothing" in capsys.readouterr().err


def test_ctrl_c_leaves_results_and_a_report(tmp_path):
    lengths = ",".join(map(str, range(8, 648, 8)))  # more than it has measured when the signal comes
    process = start(*TINY, "--lengths", lengths, "--out", str(tmp_path))
    wait_for_cells(tmp_path / "benchmark_results.json", process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "lasd-speed-fwd-batch1-head2-dim16-fp32:" in output
    results = load(tmp_path / "benchmark_results.json")
    assert results.finished is None
    assert results.tables[0].cells
    assert (tmp_path / "report.html").exists()


def test_bench_prints_tables_and_keeps_the_previous_run(tmp_path, capsys):
    args = ["bench", *TINY[:-4], "--budget", "2", "--lengths", "8", "--mode", "fwd", "--out", str(tmp_path)]
    assert main(args) == 0
    first = load(tmp_path / "benchmark_results.json")
    output, errors = capsys.readouterr()
    assert re.search(r"^lasd-speed-fwd-batch1-head2-dim16-fp32:\n +n +LASD_P +Flash\n0  8.0 ", output, re.MULTILINE)
    assert "error of fwd against float64" in output
    line = json.loads(errors.splitlines()[-1])  # no terminal here: progress for programs
    assert (line["suite"], line["n"]) == ("lasd", 8)
    assert main(args) == 0
    assert load(tmp_path / "benchmark_results.previous.json") == first


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="dry runs need Triton's compiler")
def test_gpu_memory_tables_need_no_gpu(tmp_path, capsys):
    sizes = ("--batch", "4", "--heads", "32", "--dim", "128", "--lengths", "2048", "--dtype", "bf16")
    args = ("lasd", "--columns", "LASD_R,Flash,LC,GLA_K", "--device", "cuda", "--dry-run", *sizes)
    assert main(["bench", *args, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^  LASD_R +runs$", output, re.MULTILINE)  # on a GPU, of which this machine may have none
    assert re.search(r"^  GLA_K +(runs|not here: fla is not installed.*)$", output, re.MULTILINE)
    assert "lasd-memory-fwd-batch4-head32-dim128-bf16:" in output
    table = load(tmp_path / "benchmark_results.json").tables[0]
    tensor = 4 * 2048 * 32 * 128 * 2 / 2**20
    assert table.cell(2048, "LASD_R").inputs == pytest.approx(3 * tensor, abs=0.01)
    assert table.cell(2048, "LASD_R").value == pytest.approx(4 * tensor, abs=0.01)
    assert table.cell(2048, "LC").value == pytest.approx(4 * tensor, abs=0.01)
    assert "fla" in table.cell(2048, "GLA_K").skipped
