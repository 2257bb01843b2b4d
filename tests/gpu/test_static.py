"""Kernels compiled and launches recorded, without a GPU."""

import json
import subprocess
import sys

import pytest
import torch

from fulmen.gpu.architectures import ARCHITECTURES, DECAYS, interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile")
pytest.importorskip("triton")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("arch", ["sm_80", "gfx950"])
def test_one_architecture_of_each_vendor(arch):
    from fulmen.gpu.inspection import Task, run_task

    reports = run_task(Task(arch, "bf16", "token", 64, 64))
    assert {"output", "dq", "dk", "dv", "summarise", "fold", "recur", "recur, step"} <= {r.kernel for r in reports}
    for report in reports:
        assert report.spills == 0, report
        assert report.shared <= report.shared_limit, report
    assert all(r.tensor_core_ops > 0 for r in reports if r.kernel in ("output", "dq", "dk", "dv"))


@pytest.mark.parametrize("decay", DECAYS)
def test_workspace_at_the_published_size(decay):
    """Beyond inputs and results, at batch 4, 32 heads, 128 channels, 32768 tokens: the issue's 64 and 128 MiB."""
    from fulmen.gpu.workloads import workspace

    forward, backward = workspace(ARCHITECTURES["sm_80"], decay)
    assert forward <= 64 << 20
    assert backward <= 128 << 20


def test_memory_counts_what_is_alive():
    from fulmen.gpu.dry_run import dry_run

    with dry_run(ARCHITECTURES["sm_80"]) as (_, memory), memory.workspace() as bytes_used:
        kept = torch.empty(1000)
        torch.empty(500)
        torch.empty(500)
        del kept
    assert bytes_used == [6000]


def test_traffic_of_the_default_forward():
    """Bytes that all programs request, over reading q, k, v and writing the output once."""
    from fulmen.gpu.dry_run import dry_run
    from fulmen.gpu.workloads import _backend, attention

    with dry_run(ARCHITECTURES["sm_80"]) as (launches, _):
        p = attention("constant", torch.bfloat16, 128, 128)
        _backend.forward(p, torch.empty(p.output_shape, dtype=torch.bfloat16), None)
    assert [launch.kernel for launch in launches] == ["scan"]
    tiles = launches[0].grid[0] // (4 * 32)
    assert (2 * tiles + 2) / 4 <= 1.6


def test_the_command(tmp_path):
    path = tmp_path / "table.json"
    command = ["inspect", "--arch", "sm_120", "--decay", "none", "--kernel", "recur", "--json", str(path)]
    result = subprocess.run([sys.executable, "-m", "fulmen", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    reports = json.loads(path.read_text())
    assert {(r["arch"], r["decay"], r["role"]) for r in reports} == {("sm_120", "none", "kernel")}
    assert {(r["D"], r["E"]) for r in reports} == {(64, 64), (128, 128)}
    assert {r["shared_limit"] for r in reports} == {101_376}
    assert "0 spill" in result.stdout
