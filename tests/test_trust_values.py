"""NaN and infinity stay where they belong: what does not depend on a token, a head or a sample has the same bits."""

import pytest
import torch

from cases import BACKENDS
from fulmen.lab.fuzz.problem import Problem, Setting
from fulmen.lab.fuzz.trial import results, tensors
from fulmen.lab.operators.delta_rule.cases import Case as Delta
from fulmen.lab.operators.linear_attention.cases import Case as Attention

pytestmark = pytest.mark.not_interpreted
TOKEN = 80
PROBLEMS = [
    Problem("linear_attention", Attention(length=100, decays="token")),
    Problem("linear_attention", Attention(length=100, decays="channel", dtype=torch.bfloat16)),
    Problem("delta_rule", Delta(length=100)),
    Problem("delta_rule", Delta(length=100, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.operator}-{problem.case.dtype}")
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_what_is_not_finite_stays_in_its_head(backend, problem, value):
    """In v, of one token, head and sample: the other head and the other sample do not see it, nor do earlier chunks, of
    up to 64 tokens. (Inside a chunk, what is masked is 0 times it.)"""
    setting, given = Setting(backend, gradients="none"), tensors(problem)
    wrong = given | {"v": given["v"].clone()}
    wrong["v"][1, TOKEN, 1, 3] = value
    clean, found = results(problem, given, setting), results(problem, wrong, setting)
    assert not torch.isfinite(found["output"][1, TOKEN, 1]).all()
    for name in ("output", "state"):
        heads = 2 if name == "output" else 1
        assert torch.equal(found[name][0], clean[name][0])
        assert torch.equal(found[name].select(heads, 0), clean[name].select(heads, 0))
    assert torch.equal(found["output"][:, :64], clean["output"][:, :64])
