"""The suites against the published reports."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fulmen.lab.bench import published, suites
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.plan import Options, plan
from fulmen.lab.bench.report.groups import Group
from fulmen.lab.bench.report.kernels import kernel_configuration
from fulmen.lab.bench.results import Table
from fulmen.lab.inspect.inspection import workloads
from fulmen.runtime.availability import why_triton_is_missing

CSRC = Path(__file__).parents[3] / "csrc"
PUBLISHED = [
    table for table in published.tables() if table.mode in ("fwd", "bwd") and table.metric in ("speed", "memory")
]


@pytest.fixture(scope="module")
def planned():
    parts = plan(Options(suites.names(), "cpu", "bf16", preset="published"))
    return {(t.title, t.section): (t, part.lengths) for part in parts for t in part.tables("bf16", "cpu")}


@pytest.mark.parametrize("theirs", PUBLISHED, ids=lambda table: f"{table.title} {table.section}")
def test_every_published_table_is_in_the_plan_to_the_letter(theirs, planned):
    ours, lengths = planned[theirs.title, theirs.section]
    assert ours.columns[: len(theirs.columns)] == theirs.columns  # what is not published comes after
    assert ours.axis == theirs.axis
    assert list(lengths) == [n for n, _ in theirs.rows]
    assert ours.baseline in ours.columns


def test_every_published_column_is_a_provider():
    for table in published.tables():
        assert set(table.columns) <= {column.name for column in suites.find(table.report).columns}


def test_a_suite_is_called_like_its_module_and_its_titles():
    for name in suites.names():
        assert suites.find(name).name == name
    for name in suites.reports():
        assert {table.report for table in published.tables_of(name)} == {name}


def test_an_unknown_suite_is_named():
    with pytest.raises(ValueError, match="no suite 'lasd2'; there are delta, flao, la3"):
        suites.find("lasd2")


def test_the_command_line_imports_no_suite():
    """It knows them by name, and stays quick."""
    code = "import sys; from fulmen.lab.cli import build_parser; build_parser(); print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "fulmen.lab.bench.suites" in imported
    assert not [name for name in imported if name.startswith("fulmen.lab.bench.suites.")]


@pytest.mark.skipif(bool(why_triton_is_missing()), reason=why_triton_is_missing() or "Triton is there")
def test_suites_show_kernels_that_are_inspected():
    inspected = {workload.name for workload in workloads() if workload.role == "kernel"}
    shown = (suites.find(name).kernels for name in suites.names())
    assert {kernels.operator for kernels in shown if kernels} <= inspected


@pytest.mark.parametrize(
    ("suite", "file", "constants"),
    [
        ("flao", "output_gate.cpp", ("kRowsInVectors", "kTogether", "kShortestSegment")),
        ("tpa_decode", "tpa_decode.cpp", ("kSlice",)),
        ("tpa_decode", "tpa_decoder.h", ("kTokens", "kColumns")),
        ("delta", "decay.h", ("kChunk",)),
        ("la3", "decay.h", ("kChunk",)),
    ],
)
def test_the_cores_parameters_are_those_of_its_source(suite, file, constants):
    source = "".join((CSRC / name).read_text() for name in (file, "panels.h", "decay.h"))
    values = dict(re.findall(r"constexpr \w+ (\w+) = (\w+);", source))
    shown = [value.split()[0] for _, value, _ in suites.find(suite).kernels.core]
    for name in constants:
        assert values.get(values[name], values[name]) in shown, name


@pytest.mark.skipif(bool(why_triton_is_missing()), reason=why_triton_is_missing() or "Triton is there")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_delta_rules_tiles_are_shown(dtype):
    config = {"batch": 1, "heads": 8, "dim": 128, "dtype": dtype}
    table = Table("delta", "", "", "speed", "fwd", "n", [], "", config)
    text = "\n".join(kernel_configuration(suites.find("delta"), [Group("delta", "", "", {("speed", "fwd"): table})]))
    assert text.index("CPU core:") < text.index("GPU, 128 channels")
    assert "Inverses, channel decay" in text


def test_a_column_is_called_with_its_decays():
    taken = {column.name: (column.takes[3:], column.fixed) for column in suites.find("lasd").columns}
    assert taken["LASD_P"] == (("head",), ("head",))
    assert taken["LASD_PL"] == (("head",), ())
    assert taken["LAND_P"] == taken["Flash"] == ((), ())
    assert taken["GLA_S_K"] == (("token",), ())
    assert suites.find("state").column("LAVD_KV").takes == ("k", "v", "channel", "channel_v")


def test_options_replace_the_presets_sizes():
    parts = plan(Options(("lasd", "tpa_decode"), "cpu", "fp32", batch=3, dim=32, rank=4, lengths=(7,)))
    titles = [table.title for part in parts for table in part.tables("fp32", "cpu")]
    assert titles[0] == "lasd-speed-fwd-batch3-head4-dim32-fp32"
    assert titles[-1] == "tpa_decode-memory-fwd-batch3-head32-dim32-rank4-fp32"
    assert all(part.lengths == (7,) for part in parts)


def test_the_correctness_check_sees_a_nan_in_any_gradient():
    """Also where the gradients before and after it are right."""
    suite = suites.find("la3")
    right = suite.columns[0]
    sizes = suite.presets["quick"].sizes[0]

    def not_a_number(q, k, v):
        k.register_hook(lambda grad: torch.full_like(grad, torch.nan))
        return right.function(q, k, v)

    check = CorrectnessCheck(torch.float32, "cpu")
    assert check.verdict(suite, right, sizes, "bwd").problem == ""
    assert "off by nan" in check.verdict(suite, replace(right, function=not_a_number), sizes, "bwd").problem
