"""The figures of small models of layers, `fulmen limits layers`, at a tiny size."""

import pytest
import torch
from torch.profiler import profile

from fulmen.lab import layers
from fulmen.lab.bench import measure
from fulmen.lab.cli import main
from fulmen.nn import RMSNorm
from fulmen.runtime import core


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
    """Where gradients are recorded as well: linear layers, steps of operators and norms, as many as a step makes."""
    made = {}
    for what, call in layers.decode_step(name).items():
        with profile() as profiled:
            call()
        names = [event.name for event in profiled.events()]
        made[what] = {
            "linears": names.count("aten::linear"),
            "operators": sum(n.removeprefix("fulmen::") in layers.STEPS for n in names),
            "norms": names.count("fulmen::rms_norm") or names.count("aten::linalg_vector_norm"),
        }
    modules = [*layers.model(name).modules()]
    linears = sum(isinstance(module, torch.nn.Linear) for module in modules)
    norms = sum(isinstance(module, RMSNorm) for module in modules)
    steps = made["step"]["operators"]
    assert steps >= 2
    assert (
        made["step"]
        == made["modules"]
        == made["with norms"]
        == {"linears": linears, "operators": steps, "norms": norms}
    )
    assert made["parts"] == {"linears": linears, "operators": steps, "norms": 0}
    assert made["linears"] == {"linears": linears, "operators": 0, "norms": 0}


def test_the_figure_says_what_the_rest_is(monkeypatch):
    monkeypatch.setattr(layers, "interleaved", lambda calls, **_: measure.interleaved(calls, seconds=0.0))
    for figure in layers.training():
        assert "operators" in figure.note
        assert "aten::" in figure.note
    for figure in layers.decoding():
        assert "norms" in figure.note
        assert "whose modules are called" in figure.note


def test_figures_that_there_are_not(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["limits", "layer"])
    assert "no figures of layer; there are" in capsys.readouterr().err


@pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
def test_products_of_linear_layers(monkeypatch, capsys):
    monkeypatch.setattr(layers, "PRODUCT", (24, 32, 40))
    monkeypatch.setattr(layers, "interleaved", lambda calls, **_: measure.interleaved(calls, seconds=0.0))
    monkeypatch.setattr(layers, "SLOW", {torch.bfloat16})
    figures = layers.products()
    assert [figure.what.split(", ")[2] for figure in figures] == ["forward", "gradient of x", "gradient of the weight"]
    assert all("GFLOP/s, torch's float32" in figure.note for figure in figures)
    monkeypatch.setattr(layers, "SLOW", {torch.float32})
    assert [figure.what.split(", ")[2] for figure in layers.float_products()] == [
        "forward", "gradient of x", "gradient of the weight",
    ]  # fmt: skip
    assert layers.products() == []
    assert "torch has fast ones" in capsys.readouterr().out
    monkeypatch.setattr(layers, "SLOW", set())
    assert layers.float_products() == []
    assert "which are torch's" in capsys.readouterr().out
