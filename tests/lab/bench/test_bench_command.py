"""`fulmen bench` and `fulmen list` as a user meets them."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from example import example_results

from fulmen.lab.bench import session
from fulmen.lab.bench.folder import Folder
from fulmen.lab.bench.plan import PACES, Options, Pace
from fulmen.lab.bench.results import load
from fulmen.lab.bench.runner import new_results
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
)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("fulmen",), "no suite 'fulmen'; there are delta, flao, la3, lasd, models, sp, state, tpa_decode"),
        (("limits",), "`fulmen limits` is a command of its own"),
        (("--resume", "--threads", "1"), "--resume takes the options of the run it goes on with; got --threads"),
        (("--resume", "lasd"), "--resume takes the options of the run it goes on with; got a suite"),
        (("--resume", "--dry-run"), "--resume takes the options of the run it goes on with; got --dry-run"),
        (("lasd", "--columns", ","), "expected names separated by commas, got ','"),
        (("lasd", "--out", __file__), "is not a folder"),
        (("lasd", "--columns", "LASD_Q"), "no column 'LASD_Q' in lasd; did you mean LASD_R, LASD_P, LASD_PL?"),
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
    assert list(suites) == ["delta", "flao", "la3", "lasd", "models", "sp", "state", "tpa_decode"]
    columns = {column["name"]: column for column in suites["la3"]["columns"]}
    assert columns["PyTorch-SDPA"]["available"] is True
    assert columns["PyTorch-SDPA"]["reason"] == ""
    assert columns["FlashAttn-2"]["available"] is False
    assert columns["FlashAttn-2"]["reason"] == "flash_attn runs on CUDA only"
    assert [columns[name]["owner"].split()[0] for name in ("LA3-Chunked", "PyTorch-SDPA")] == ["ours", "torch"]


def test_list_for_people(capsys):
    assert main(["list", "la3", "lasd", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "  LASD_P        Fulmen, head decay (ours): head decay" in output
    assert "  GLA_K         GLA (our rendering of fla): channel decay: fla's chunk_gla on CUDA; on CPU our" in output
    assert "not here: flash_attn runs on CUDA only" in output
    assert "tpa_decode:" not in output
    assert main(["list", "models", "sp", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "  sections: Mamba2 prefill, Mamba2 decode, " in output
    assert output.count("as transformers runs it") == 1
    assert "  entering gradient  Fulmen" in output
    with pytest.raises(SystemExit, match="2"):
        main(["list", "lasd2"])


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


@pytest.fixture
def fast(monkeypatch):
    """Each cell a few calls, however long these take; a run that is to be stopped keeps its pace, a second for each."""
    monkeypatch.setitem(PACES, "laptop", Pace(0.0, 3, 2, None))


@pytest.fixture
def threads():
    """A run that goes on takes the number of its threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads", "fast")
def test_a_killed_run_is_resumed(tmp_path):
    args = (*TINY, "--lengths", "8,16,24", "--out", str(tmp_path))
    process = start(*args)
    wait_for_cells(tmp_path / "benchmark_results.json", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = load(tmp_path / "benchmark_results.json")
    assert before.finished is None

    assert main(["bench", "--resume", "--out", str(tmp_path), "--json", str(tmp_path / "copy.json")]) == 0
    after = load(tmp_path / "copy.json")
    assert after.finished is not None
    assert after.started == before.started
    assert [table.lengths for table in after.tables] == [[8, 16, 24]] * 2
    for table in before.tables:
        now = next(other for other in after.tables if other.title == table.title)
        for cell in (cell for cell in table.cells if cell.value is not None):
            again = now.cell(cell.n, cell.column)
            assert again.first_call == cell.first_call
            assert again.sittings[: len(cell.sittings)] == cell.sittings  # others may have come
            assert again.value <= cell.value


def test_a_folder_has_one_writer(tmp_path, capsys):
    holder = Folder(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["bench", *TINY, "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert f"is in use by process {os.getpid()}, started 20" in capsys.readouterr().err
    holder.close()
    Folder(tmp_path).close()


def test_reports_of_an_earlier_run_do_not_stay(tmp_path):
    (tmp_path / "plots").mkdir()
    stale = [tmp_path / name for name in ("report.html", "state.md", "plots/la3-batch1.png")]
    others = [tmp_path / name for name in ("notes.md", "plots/my.png", "benchmark_results.json")]
    for path in (*stale, *others):
        path.write_text("{}")
    with Folder(tmp_path) as folder:
        folder.begin()
    assert not any(path.exists() for path in stale)
    assert [path.exists() for path in others] == [True, True, False]


def test_no_earlier_run_is_lost(tmp_path):
    """Nor where two ended in the same millisecond."""
    for run in ("first", "second", "third"):
        with Folder(tmp_path) as folder:
            folder.begin()
        folder.results.write_text(run)
        os.utime(folder.results, (1e9, 1e9))
    kept = sorted((tmp_path / "history").iterdir())
    assert [path.read_text() for path in kept] == ["first", "second"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}\.json", kept[0].name)


def test_a_folder_without_locks_is_not_said_to_be_in_use(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        Folder(tmp_path)


def test_resuming_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--out", str(tmp_path / "new"), "--resume"])
    assert stop.value.code == 2
    assert "new; leave out --resume, or give the run's --out" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ctrl_c_leaves_results_and_a_report(tmp_path):
    lengths = ",".join(map(str, range(8, 648, 8)))  # more than it has measured when the signal comes
    folder = tmp_path / "a run"
    command = [sys.executable, "-m", "fulmen", "bench", *TINY, "--lengths", lengths, "--out", str(folder)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    wait_for_cells(folder / "benchmark_results.json", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "lasd-speed-fwd-batch1-head2-dim16-fp32:" in output
    last = output.splitlines()[-2:]  # below all tables, where it is seen
    assert last == [f"fulmen: stopped; to go on: fulmen bench --resume --out '{folder}'", "fulmen: interrupted"]
    results = load(folder / "benchmark_results.json")
    assert results.finished is None
    assert results.tables[0].cells
    assert (folder / "report.html").exists()


@pytest.mark.usefixtures("threads")
def test_a_run_is_not_resumed_on_another_machine(tmp_path, capsys):
    results = example_results()
    results.options = Options(("lasd",), "cpu", "fp32").as_json()
    results.save(tmp_path / "benchmark_results.json")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--resume", "--out", str(tmp_path)])
    assert "--resume: the run was begun with fulmen 0.1.0 (now" in capsys.readouterr().err
    Folder(tmp_path).close()  # it was let go


def test_what_there_was_no_time_for_is_tried_again(tmp_path):
    options = Options(("lasd",), "cpu", "fp32")
    results = new_results(options)
    results.tables = [table for table in example_results((256, 4096)).tables if table.suite == "lasd"][:1]
    results.tables[0].cells[0].value, results.tables[0].cells[0].skipped = None, "over the time budget: 3 s"
    results.save(tmp_path / "benchmark_results.json")
    with session.resumed(tmp_path) as run:
        (again,) = run.results.tables
    assert again.cells == results.tables[0].cells[1:]


@pytest.mark.usefixtures("fast")
def test_bench_prints_tables_and_keeps_the_previous_run(tmp_path, capsys):
    args = ["bench", *TINY, "--lengths", "8", "--mode", "fwd", "--out", str(tmp_path)]
    assert main([*args, "--progress", "json"]) == 0
    first = load(tmp_path / "benchmark_results.json")
    output, errors = capsys.readouterr()
    assert re.search(r"^lasd-speed-fwd-batch1-head2-dim16-fp32:\n +n +LASD_P +Flash *\n0  8.0 ", output, re.MULTILINE)
    assert re.search(r"^off from float64 \(n = 131, batch 2, heads 2, dim 16\): LASD_P \d", output, re.MULTILINE)
    assert re.search(
        r"^lasd  forward  8  \S+ ms~? \(LASD_P\)  \S+ ms~? \(Flash\)  \S+x~? +torch 2", output, re.MULTILINE
    )
    assert output.index("Ours against the best") < output.index("lasd-speed-fwd")
    line = json.loads(errors.splitlines()[-1])
    assert (line["suite"], line["n"]) == ("lasd", 8)
    assert main(args) == 0
    assert re.match(r"\d+:\d\d lasd LASD_P n = 8", capsys.readouterr().err)  # no terminal here, but readable
    (previous,) = (tmp_path / "history").iterdir()
    assert load(previous) == first


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
