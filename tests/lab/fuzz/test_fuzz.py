"""`fulmen fuzz`: a bounded part of it, and that it finds what is wrong."""

import json
from random import Random

import pytest
import torch

import fulmen.lab.cli
from fulmen.lab.fuzz import Problem, Setting, wrong
from fulmen.lab.fuzz.draw import ALL, CASES, draw_problem, possible
from fulmen.lab.fuzz.operators import SUBJECTS
from fulmen.lab.fuzz.problem import snippet
from fulmen.lab.fuzz.shrink import shrink
from fulmen.lab.fuzz.trial import tensors
from fulmen.lab.fuzz.views import LAYOUTS, viewed, written_around
from fulmen.lab.operators.linear_attention.cases import Case
from fulmen.ops.linear_attention import torch_chunked
from fulmen.runtime.architectures import interpreted


def fuzz(*options):
    return fulmen.lab.cli.main(["fuzz", *map(str, options)])


@pytest.mark.either
def test_a_bounded_part(tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    assert fuzz("--seconds", 5 if interpreted() else 8, "--seed", 22, "--resume", record) == 0, capsys.readouterr().out
    assert json.loads(record.read_text().splitlines()[-1])["problems"] > 0


@pytest.fixture
def off_by_a_little(monkeypatch):
    """The torch backend is wrong in one element of sequences of more than 4 tokens."""
    forward = torch_chunked.forward

    def wrong_forward(p, output, state):
        forward(p, output, state)
        if p.q.shape[1] > 4:
            output[0, 4, 0, 0] += 0.01 * output.abs().max()

    monkeypatch.setattr(torch_chunked, "forward", wrong_forward)


@pytest.mark.not_interpreted
def test_what_is_wrong_is_found_and_made_small(off_by_a_little, tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    only = ("--operator", "linear_attention", "--backend", "torch", "--seed", 1)
    assert fuzz("--seconds", 4, *only, "--resume", record) == 1
    printed = capsys.readouterr().out
    findings = [x for x in map(json.loads, record.read_text().splitlines()) if "finding" in x]
    assert findings[0]["snippet"] in printed
    assert "length=5, heads=(1, 1, 1), key_size=1, value_size=1" in findings[0]["snippet"]
    exec(findings[0]["snippet"], {})
    assert "output: off by" in capsys.readouterr().out


@pytest.mark.not_interpreted
def test_a_run_is_gone_on_with(tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    only = ("--operator", "causal_conv1d", "--backend", "torch", "--seconds", 0.3, "--resume", record)
    assert fuzz(*only) == 0
    before = json.loads(record.read_text().splitlines()[-1])
    assert fuzz(*only) == 0
    after = json.loads(record.read_text().splitlines()[-1])
    assert after["problems"] > before["problems"]
    assert after["cases"]["causal_conv1d torch"] > before["cases"]["causal_conv1d torch"]
    written = record.read_text()
    assert fuzz(*only, "--seed", 9) == 1
    assert "is the record of another run" in capsys.readouterr().err
    assert record.read_text() == written
    record.write_text("no JSON")
    assert fuzz(*only) == 1
    assert "is not a record of `fulmen fuzz`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "-1"], "argument --seconds: must be a number of seconds above 0; got -1"),
        (["--seconds", "inf"], "argument --seconds"),
        (["--operator", "softmax"], "argument --operator: must be one of linear_attention"),
        (["--backend", "cuda"], "argument --backend: must be one of"),
    ],
)
def test_mistakes(options, message, capsys):
    with pytest.raises(SystemExit) as raised:
        fuzz(*options)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_seed_gives_the_same_problems():
    first, second = ([draw_problem(Random(f"7 {i}"), list(SUBJECTS), ALL) for i in range(200)] for _ in range(2))
    assert first == second
    assert {problem.operator for problem in first} == set(SUBJECTS) == set(CASES)
    assert all(map(possible, first))


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_has_the_same_values(layout, updated):
    x = torch.randn(2, 3, 4, 5)
    before = x.clone()
    view, base = viewed("v", x, layout, "", updated)
    assert torch.equal(view, x)
    if updated:
        view.add_(1)
        assert torch.equal(x, before)
        assert view.stride(2) == 1 or view.stride(3) == 1
    if layout in ("sliced", "gaps"):
        assert not written_around(view, base)
        base[-1] = 0.0
        assert written_around(view, base)


def test_equal_heads_are_expanded():
    problem = Problem("linear_attention", Case(heads=(4, 4, 4)), equal="heads")
    view, _ = viewed("q", tensors(problem)["q"], "expanded", "heads")
    assert view.stride(2) == 0
    assert torch.equal(view, tensors(problem)["q"])
    assert not wrong(problem, Setting("torch", layout="expanded"))


def test_shrinking_keeps_what_matters():
    problem = Problem("linear_attention", Case(length=200, key_size=77, packed=(3, 0, 197), dtype=torch.bfloat16))
    setting = Setting("torch", layout="gaps", schedule="loop")

    def fails(problem, setting):
        return problem.case.key_size >= 17 and setting.layout == "gaps"

    small, plain = shrink(problem, setting, fails)
    assert plain == Setting("torch", layout="gaps")
    assert small.case == Case(batch=1, length=1, heads=(1, 1, 1), key_size=17, value_size=1)
    assert "layout='gaps'" in snippet(small, plain)
