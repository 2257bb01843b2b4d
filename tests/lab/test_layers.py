"""The figures of small models of layers, `fulmen limits layers`, at a tiny size."""

import pytest
import torch
from torch.profiler import profile

from fulmen.lab import layers
from fulmen.lab.cli import main


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, size in {"HIDDEN": 32, "LAYERS": 2, "LENGTH": 16}.items():
        monkeypatch.setattr(layers, name, size)


@pytest.mark.parametrize("name", layers.MIXERS)
def test_shares_are_parts_of_a_step(name):
    found = layers.shares(layers.training_step(name), repeats=2)
    assert sum(found.values()) == pytest.approx(1)
    assert 0 < found["products"] < 1
    assert 0 < found["operators"] < 1
    assert 0 < found["Python"] < 1
    assert found["aten::mul"] > 0
    assert not [what for what in found if what.startswith("fulmen::") or what in layers.PRODUCTS]


@pytest.mark.parametrize("name", layers.MIXERS)
def test_the_parts_of_a_decode_step(name):
    """Where gradients are recorded as well: linear layers and steps of our operators, as many as a step makes."""
    calls = layers.decode_step(name)
    made = {}
    for what, call in calls.items():
        with profile() as profiled:
            call()
        names = [event.name for event in profiled.events()]
        made[what] = {key: sum(n.startswith(key) for n in names) for key in ("aten::linear", "fulmen::", "aten::silu")}
    linears = sum(isinstance(module, torch.nn.Linear) for module in layers.model(name).modules())
    assert made["step"]["aten::linear"] == made["parts"]["aten::linear"] == linears
    assert made["step"]["fulmen::"] == made["parts"]["fulmen::"] >= 2
    assert made["step"]["aten::silu"] == 2
    assert made["parts"]["aten::silu"] == 0


def test_the_figure_says_what_the_rest_is():
    for figure in layers.training():
        assert "operators" in figure.note
        assert "aten::" in figure.note


def test_figures_that_there_are_not(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["limits", "layer"])
    assert "no figures of layer; there are" in capsys.readouterr().err
