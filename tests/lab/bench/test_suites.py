"""The suites against the published reports."""

from dataclasses import replace

import pytest
import torch

from fulmen.lab.bench import published
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.plan import Options, plan
from fulmen.lab.bench.suites import SUITES

PUBLISHED = [
    table for table in published.tables() if table.mode in ("fwd", "bwd") and table.metric in ("speed", "memory")
]


@pytest.fixture(scope="module")
def planned():
    parts = plan(Options(tuple(SUITES), "cpu", "bf16", preset="published"))
    return {(t.title, t.section): (t, part.lengths) for part in parts for t in part.tables("bf16", "cpu")}


@pytest.mark.parametrize("theirs", PUBLISHED, ids=lambda table: f"{table.title} {table.section}")
def test_every_published_table_is_in_the_plan_to_the_letter(theirs, planned):
    ours, lengths = planned[theirs.title, theirs.section]
    assert ours.columns == theirs.columns
    assert ours.axis == theirs.axis
    assert list(lengths) == [n for n, _ in theirs.rows]
    assert ours.baseline in ours.columns


def test_every_published_column_is_a_provider():
    for table in published.tables():
        assert set(table.columns) <= {column.name for column in SUITES[table.report].columns}


def test_options_replace_the_presets_sizes():
    parts = plan(Options(("lasd", "tpa_decode"), "cpu", "fp32", batch=3, dim=32, rank=4, lengths=(7,)))
    titles = [table.title for part in parts for table in part.tables("fp32", "cpu")]
    assert titles[0] == "lasd-speed-fwd-batch3-head4-dim32-fp32"
    assert titles[-1] == "tpa_decode-memory-fwd-batch3-head32-dim32-rank4-fp32"
    assert all(part.lengths == (7,) for part in parts)


def test_the_correctness_check_sees_a_nan_in_any_gradient():
    """Also where the gradients before and after it are right."""
    suite = SUITES["la3"]
    right = suite.columns[0]
    sizes = suite.presets["quick"].sizes[0]

    def not_a_number(q, k, v):
        k.register_hook(lambda grad: torch.full_like(grad, torch.nan))
        return right.function(q, k, v)

    check = CorrectnessCheck(torch.float32, "cpu")
    assert check.verdict(suite, right, sizes, "bwd").problem == ""
    assert "off by nan" in check.verdict(suite, replace(right, function=not_a_number), sizes, "bwd").problem
