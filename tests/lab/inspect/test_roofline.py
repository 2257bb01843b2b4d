"""`fulmen roofline`: limits of published cells."""

import json

import pytest

from fulmen.lab import roofline
from fulmen.lab.bench.published import tables
from fulmen.lab.inspect import cli
from fulmen.runtime.architectures import interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not record")


def test_the_commands_choices_are_what_there_is():
    assert set(cli.GPUS) == set(roofline.CARDS)


def test_work_by_hand():
    """Causal linear attention at batch 4, 32 heads, 128 channels, 1024 tokens."""
    forward = next(t for t in tables() if t.title == "lasd-speed-fwd-batch4-head32-dim128-bf16")
    tensor = 4 * 1024 * 32 * 128 * 2
    assert roofline.work(forward, "LASD_P", 1024) == (4 * tensor, 4 * 4 * 1024 * 32 * 128 * 128)
    assert roofline.work(forward, "GLA_K", 1024).bytes == 5 * tensor
    assert roofline.work(forward, "Flash", 1024).flops == 2 * 4 * 32 * 1024 * 1024 * 128


def test_every_published_time_has_a_limit(tmp_path, capsys):
    path = tmp_path / "cells.json"
    roofline.run(["la3", "tpa_decode", "flao"], None, path, model=False)
    cells = json.loads(path.read_text())
    published = [t for t in tables() if t.metric == "speed" and t.report in ("la3", "tpa_decode", "flao")]
    assert len(cells) == sum(len(row) for table in published for _, row in table.rows)
    for cell in cells:
        # Softmax attention on the RTX 5090 passes 100%: the card clocks higher than its data sheet.
        assert 0 < cell["reached"] < (1.1 if cell["gpu"] == "RTX 5090" else 1), cell
    ours = [cell for cell in cells if cell["column"].startswith("LA3")]
    assert all(cell["ours"] >= cell["limit"] for cell in ours)
    assert "la3-speed-fwd-batch4-head32-dim64-bf16, limits of RTX 5090 (ms):" in capsys.readouterr().out


def test_limits_of_another_card():
    cells = roofline.cells(["tpa_decode"], "H100", model=False)
    assert {cell.gpu for cell in cells} == {"H100"}
    assert {cell.reached for cell in cells} == {None}


@pytest.mark.usefixtures("empty_inspection_cache")
def test_our_kernels_are_modelled_where_the_card_is(monkeypatch):
    one = next(t for t in tables() if t.report == "tpa_decode" and t.metric == "speed")
    monkeypatch.setattr(roofline, "tables", lambda: [one])
    on_a100 = roofline.cells(["tpa_decode"], "A100")
    assert all(cell.modelled > cell.limit for cell in on_a100)
    assert {cell.modelled for cell in roofline.cells(["tpa_decode"], "RTX 5090")} == {None}
