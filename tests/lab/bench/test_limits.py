"""`fulmen limits` at tiny sizes, where a forward of ours takes a second and a call of another three."""

import json

import pytest
import torch

from fulmen.lab.bench import figures, limits
from fulmen.lab.bench.figures import Figure
from fulmen.lab.bench.measure import Timing
from fulmen.lab.cli import main
from fulmen.lab.operators.causal_conv1d import limits as conv
from fulmen.lab.operators.delta_rule import limits as delta
from fulmen.lab.operators.linear_attention import limits as attention
from fulmen.lab.operators.output_gate import limits as gate
from fulmen.lab.operators.tpa import limits as tpa
from fulmen.runtime import core

pytestmark = [
    pytest.mark.skipif(core.core is None, reason=core.why_unavailable),
    pytest.mark.not_interpreted,
    pytest.mark.one_build,
]
MODULES = (attention, delta, conv, gate, tpa)
THEIRS = {"gemm", "softmax", "torch", "torch, both", "peer", "mul_", "as it is", "ton"}


def interleaved(calls, seconds, repeats):
    for call in calls.values():
        call()
    return {name: Timing(*(seconds_of(name),) * 3) for name in calls}


def seconds_of(name):
    if name in THEIRS or name.startswith(("to ", "toc ")):
        return 3.0
    return 2.0 if name.startswith("both") else 1.0  # forward and backward


@pytest.fixture
def tiny(monkeypatch):
    sizes = {"GEMM": 8, "HEADS": 2, "KEY_HEADS": 1, "DIM": 8, "LENGTH": 16, "LONG": 64, "BATCH": 1, "CHANNELS": 6}
    sizes |= {"HIDDEN": 128, "SWEEP_BYTES": (1 << 20, 8 << 20), "RANK": 2}
    for module in (*MODULES, limits, figures):
        for name in sizes.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, sizes[name])
        monkeypatch.setattr(module, "interleaved", interleaved)
        if "multiplies_bfloat16" in vars(module):
            monkeypatch.setattr(module, "multiplies_bfloat16", lambda operator: True)
    of_attention, of_decode = attention.inputs, tpa.inputs
    monkeypatch.setattr(attention, "inputs", lambda length, heads, dim=8: of_attention(16, heads, 8))
    monkeypatch.setattr(tpa, "inputs", lambda tokens, *dtype, batch=1: of_decode(16, *dtype, batch=batch))
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: function)


@pytest.mark.usefixtures("tiny")
def test_figures_compare_ours_with_theirs(tmp_path, capsys):
    pytest.importorskip("transformers")
    path, operators = tmp_path / "figures.json", [module.__name__.split(".")[-2] for module in MODULES]
    assert main(["limits", *operators, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    printed = capsys.readouterr().out
    assert all(value > 0 for value in found["machine"].values())
    values = {figure["what"]: figure["value"] for figure in found["figures"]}
    assert len(values) == len(found["figures"]) > 40  # none is of the name of another
    assert all(what in printed and value > 0 for what, value in values.items())
    against = {what: value for what, value in values.items() if " against " in what}
    assert len(against) > 20
    assert set(against.values()) == {3.0}
    assert values["decode step (B8 H2 D8) over mul_ of the state"] == pytest.approx(1 / 3)
    assert {figure["verdict"] for figure in found["figures"]} >= {"missed", "aim reached"}


@pytest.mark.parametrize(
    ("value", "less_is_better", "verdict"),
    [
        (1.9, False, "missed"),
        (2.0, False, "reached"),
        (3.0, False, "aim reached"),
        (3.1, True, "missed"),
        (3.0, True, "reached"),
        (2.0, True, "aim reached"),
    ],
)
def test_verdicts(value, less_is_better, verdict):
    must, aim = (3.0, 2.0) if less_is_better else (2.0, 3.0)
    assert Figure("", value, must, aim, "x", less_is_better).verdict == verdict


def test_figures_of_bfloat16_are_left_out_where_nothing_multiplies_it(capsys):
    if figures.multiplies_bfloat16("an operator"):
        pytest.skip("this build multiplies pairs of bfloat16")
    assert capsys.readouterr().out.startswith("left out: bf16 figures of an operator, as the build ")
    assert attention.bfloat16() == []


def test_figures_are_printed_as_they_are_measured(monkeypatch, capsys):
    """Also where a later part takes so long that somebody interrupts it."""
    monkeypatch.setattr(limits, "measure_machine", lambda: {"speed": 2.0})

    def quick() -> list[Figure]:
        return [Figure("a small call", 40.0, 50, 35, "us", True, "of nothing")]

    def long() -> list[Figure]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        limits.run([quick, long], None)
    out = capsys.readouterr().out.split("\n")
    assert ["speed", "2.00"] in [line.split() for line in out]
    row = next(i for i, line in enumerate(out) if "a small call" in line)
    assert out[row].split()[3:] == ["40.00", "50", "35", "us", "reached"]
    assert out[row + 1].split() == ["of", "nothing"]
