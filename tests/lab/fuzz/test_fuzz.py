"""`fulmen fuzz`: a bounded part of it, and that it finds what is wrong."""

import json
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
import torch

import fulmen.lab.cli
from fulmen.lab.fuzz import Problem, Setting, run, shrink, wrong
from fulmen.lab.fuzz.draw import ALL, CASES, INTERPRETED, draw_problem, number, possible
from fulmen.lab.fuzz.operators import SUBJECTS
from fulmen.lab.fuzz.problem import changed, snippet
from fulmen.lab.fuzz.run import Plan, Record
from fulmen.lab.fuzz.trial import exact, judged, nearby, summands, tensors
from fulmen.lab.fuzz.views import LAYOUTS, viewed, written_around
from fulmen.lab.operators.delta_rule.cases import Case as DeltaCase
from fulmen.lab.operators.linear_attention.cases import Case
from fulmen.lab.tolerances import relative_error
from fulmen.ops.linear_attention import torch_chunked
from fulmen.runtime.architectures import interpreted


def fuzz(*options):
    return fulmen.lab.cli.main(["fuzz", *map(str, options)])


@pytest.fixture(autouse=True)
def a_second_each(monkeypatch):
    """As many problems are tried as there are seconds, however long they take."""
    draw, drawn = run.draw, []
    monkeypatch.setattr(run, "draw", lambda plan, index: drawn.append(index) or draw(plan, index))
    for module in (run, shrink):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: len(drawn)))


@pytest.mark.either
def test_a_bounded_part(tmp_path, capsys):
    record, problems = tmp_path / "record.json", 6 if interpreted() else 40
    assert fuzz("--seconds", problems, "--seed", 22, "--resume", record) == 0, capsys.readouterr().out
    assert json.loads(record.read_text())["problems"] == problems


def test_calls_of_the_delta_rule_are_drawn_to_be_hard():
    """Also for Triton's interpreter, which has few channels otherwise."""
    cases = [draw_problem(Random(i), ["delta_rule"], INTERPRETED).case for i in range(100)]
    assert any(case.key_size >= 64 and case.value_size >= 64 and case.length > 16 for case in cases)
    alike = [case for case in cases if case.keys == "parallel" and case.betas == "near two"]
    assert sum(case.dtype == torch.bfloat16 for case in alike) > 8


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
    record = tmp_path / "record.json"
    only = ("--operator", "linear_attention", "--backend", "torch", "--seed", 1)
    assert fuzz("--seconds", 4, *only, "--resume", record) == 1
    printed = capsys.readouterr().out
    findings = json.loads(record.read_text())["findings"]
    assert findings[0]["snippet"] in printed
    assert "length=5, heads=(1, 1, 1), key_size=1, value_size=1" in findings[0]["snippet"]
    exec(findings[0]["snippet"], {})
    assert "output: off by" in capsys.readouterr().out


@pytest.mark.not_interpreted
def test_a_run_is_gone_on_with(tmp_path, capsys):
    record = tmp_path / "record.json"
    only = ("--operator", "causal_conv1d", "--backend", "torch", "--seconds", 3, "--resume", record)
    assert fuzz(*only) == 0
    before = json.loads(record.read_text())
    assert fuzz(*only) == 0
    after = json.loads(record.read_text())
    assert (before["problems"], after["problems"]) == (3, 6)
    assert after["cases"]["causal_conv1d torch"] > before["cases"]["causal_conv1d torch"]
    written = record.read_text()
    assert fuzz(*only, "--seed", 9) == 1
    assert "is the record of another run" in capsys.readouterr().err
    assert record.read_text() == written
    for damaged in ("no JSON", "[]", "{}"):
        record.write_text(damaged)
        assert fuzz(*only) == 1
        assert "is not a record of `fulmen fuzz`" in capsys.readouterr().err


@pytest.mark.not_interpreted
def test_what_failed_is_tried_again(tmp_path, capsys, monkeypatch):
    """And no longer counts if it is right; nor does it count twice if the run ended before it was saved."""
    record = tmp_path / "record.json"
    only = ("--operator", "linear_attention", "--backend", "torch", "--seed", 1, "--resume", record)
    with monkeypatch.context() as patched:
        patched.setattr(torch_chunked, "forward", lambda p, output, state: output.fill_(1.0))
        assert fuzz("--seconds", 1, *only) == 1
    before = json.loads(record.read_text())
    assert before["findings"]
    assert fuzz("--seconds", 3, *only) == 0, capsys.readouterr().out
    after = json.loads(record.read_text())
    assert after["findings"] == []
    assert (before["problems"], after["problems"]) == (1, 3)


def test_a_record_is_replaced_as_a_whole(tmp_path):
    """A run that is killed leaves the last one that was saved."""
    file, plan = tmp_path / "record", Plan(0, ["delta_rule"], ["torch"])
    record = Record(plan, file)
    record.add(0, Counter(a=8), [])
    record.save()
    record.add(1, Counter(a=8), [{"index": 1, "wrong": [], "snippet": ""}])
    again = Record(plan, file)
    assert (again.problems, again.cases, again.findings) == (1, Counter(a=8), [])
    assert list(tmp_path.iterdir()) == [file]


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


def test_values_are_drawn_too():
    drawn = [draw_problem(Random(f"7 {i}"), list(SUBJECTS), ALL) for i in range(300)]
    assert len({problem.case.seed for problem in drawn}) > 200
    assert any(problem.scales for problem in drawn)
    assert any(problem.equal == "tokens" and problem.case.dtype == torch.bfloat16 for problem in drawn)
    for operator in SUBJECTS:
        one, other = (Problem(operator, CASES[operator](Random(0), ALL)) for _ in range(2))
        other = changed(other, "case", changed(other.case, "seed", 1))
        same = [torch.equal(x, tensors(other)[name]) for name, x in tensors(one).items() if x.is_floating_point()]
        assert not all(same), operator


def test_lengths_leave_a_rest_of_every_tile():
    drawn = {number(Random(i), 35) for i in range(500)}
    assert drawn >= {1, 2, 3, 17, 18, 19, 33, 34, 35}


def off(x, size):
    """By up to ``size`` of the largest number of all."""
    sign = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    return x + size * x.abs().max() * sign


def test_the_norm_of_a_bfloat16_result_is_not_forgiven():
    """No error is above half a unit in the last place of the largest, but their norm is."""
    case = Case(length=128, key_size=32, value_size=32, decays="head", dtype=torch.bfloat16)
    problem = Problem("linear_attention", case)
    found = {name: x.to(torch.bfloat16) for name, x in exact(problem).items() if name in ("output", "dq", "dk", "dv")}
    assert judged(problem, found, Setting("native")) == []
    found["dv"] = off(exact(problem)["dv"], 2**-9).to(torch.bfloat16)
    assert [x.split(" off")[0] for x in judged(problem, found, Setting("native"))] == ["dv: norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_small_head_is_held_to_its_own_size(dtype):
    problem = Problem("linear_attention", Case(decays="token", dtype=dtype), scales=(1.0, 2.0**-9))
    found = {name: x.to(dtype) for name, x in exact(problem).items() if name in ("output", "dq")}
    assert judged(problem, found, Setting("native")) == []
    for name, x in found.items():
        assert x[:, :, 1].abs().max() < 0.01 * x[:, :, 0].abs().max()
        wrong_head = x.clone()
        wrong_head[:, :, 1] = 0
        assert [y.split(":")[0] for y in judged(problem, found | {name: wrong_head}, Setting("native"))][:1] == [name]


def test_cancelling_terms_of_one_head_do_not_excuse_another():
    """The gradient of a decay per head is a difference of sums, and held to theirs: each to its own."""
    problem = Problem("linear_attention", Case(decays="head", values="zero"), scales=(1024.0, 1.0))
    found = {name: x.float() for name, x in exact(problem).items()}
    assert judged(problem, found, Setting("native")) == []
    sums = summands(problem, 2)
    assert sums[0] > 100 * sums[1]
    large = found["dlog_decay"].abs().max()
    found["dlog_decay"] = found["dlog_decay"] + torch.tensor([0.0, 1e-4 * large + 1e-6 * sums[1]])
    assert judged(problem, found, Setting("native"))


def test_two_bfloat16_terms_excuse_terms_that_cancel():
    """The gradient of a decay in the second sample is 20 times as sensitive to inputs as in the others."""
    case = Case(batch=3, length=34, heads=(1, 1, 1), key_size=4, value_size=18, decays="token", values="mixed")
    problem = Problem("linear_attention", case.of(dtype=torch.float16, seed=672), without="output")
    want = exact(problem)["dlog_decay"]
    for sample, backend, excused in ((1, "triton", True), (1, "native", False), (0, "triton", False)):
        found = {"dlog_decay": want.float().clone()}
        found["dlog_decay"][sample] *= 1 + 3e-4
        assert (judged(problem, found, Setting(backend)) == []) == excused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_terms_do_not_excuse_a_decay_gradient_of_usual_terms(dtype):
    problem = Problem("linear_attention", Case(decays="token", dtype=dtype))
    found = {"dlog_decay": exact(problem)["dlog_decay"].float()}
    assert judged(problem, found, Setting("triton")) == []
    assert judged(problem, {"dlog_decay": found["dlog_decay"] * (1 + 2e-4)}, Setting("triton"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_of_inputs_that_differ_in_the_last_place_are_near(dtype):
    problem = Problem("linear_attention", Case(dtype=dtype))
    want = exact(problem)["output"]
    off = [relative_error(x["output"].double(), want) / torch.finfo(dtype).eps for x in nearby(problem, "torch")[2:]]
    assert all(0.1 < x < 10 for x in off)


def test_a_delta_rule_that_erases_has_the_error_of_what_it_erased():
    """What a token takes away from the state is rounded, and with one channel little may be left of it. Not so where
    there are many channels."""
    few = DeltaCase(batch=1, length=9, heads=(1, 1, 3), key_size=1, value_size=2, decays="none", seed=134)
    many = few._replace(length=64, key_size=32, value_size=32)
    for case, size, excused in ((few, 5e-2, True), (few, 1.0, False), (many, 1.2e-2, False)):
        problem = Problem("delta_rule", case._replace(dtype=torch.bfloat16))
        want = exact(problem)["state"]
        found = {"state": want.float().clone()}
        found["state"][:, 1] *= 1 + size
        assert (judged(problem, found, Setting("native")) == []) == excused


def test_the_gradient_of_one_normalized_channel_has_the_error_of_what_is_taken_away():
    one = DeltaCase(batch=1, length=1, key_size=1, value_size=49, decays="none", initial=False, packed=(1, 1))
    for case, excused in ((one._replace(seed=781), True), (one._replace(seed=781, key_size=16), False)):
        problem = Problem("delta_rule", case)
        found = {"dk": exact(problem)["dk"].float() * 1.1}
        assert (judged(problem, found, Setting("native")) == []) == excused


@pytest.mark.not_interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_to_is_found(layout, monkeypatch):
    forward = torch_chunked.forward

    def careless(p, output, state):
        forward(p, output, state)
        p.v[0, 0, 0, 0] += 1

    monkeypatch.setattr(torch_chunked, "forward", careless)
    problem, setting = Problem("linear_attention", Case()), Setting("torch", layout=layout, gradients="none")
    assert "v was written to" in wrong(problem, setting)
    monkeypatch.setattr(torch_chunked, "forward", forward)
    assert wrong(problem, setting) == []


@pytest.mark.not_interpreted
def test_what_lies_around_is_watched_in_mixed_layouts(monkeypatch):
    forward, problem = torch_chunked.forward, Problem("linear_attention", Case(length=61))
    mixed, gaps = (viewed("q", tensors(problem)["q"], layout)[0] for layout in ("mixed", "gaps"))
    assert mixed.stride() == gaps.stride()

    def careless(p, output, state):
        forward(p, output, state)
        p.q.as_strided((1,), (1,), p.q.storage_offset() + 1).zero_()

    monkeypatch.setattr(torch_chunked, "forward", careless)
    assert wrong(problem, Setting("torch", layout="mixed", gradients="none")) == ["what lies around q was written to"]


def test_a_snippet_of_triton_asks_for_the_interpreter():
    problem = Problem("linear_attention", Case())
    assert 'os.environ["TRITON_INTERPRET"] = "1"' in snippet(problem, Setting("triton"))
    assert "TRITON" not in snippet(problem, Setting("torch"))


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

    small, plain = shrink.shrink(problem, setting, fails)
    assert plain == Setting("torch", layout="gaps")
    assert small.case == Case(batch=1, length=1, heads=(1, 1, 1), key_size=17, value_size=1)
    assert "layout='gaps'" in snippet(small, plain)
