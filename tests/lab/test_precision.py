"""`fulmen precision`."""

import re

import pytest
import torch

from fulmen.lab.cli import main
from fulmen.lab.precision import OURS, Comparison, errors
from fulmen.runtime.architectures import interpreted


def test_errors_are_those_of_the_worst_head():
    exact = torch.ones(1, 4, 2, 1)
    got = exact.clone()
    got[0, 0, 1] += 2**-8
    assert errors("output", Comparison("", {"output": exact}, {OURS: {"output": got}}), OURS) == "1.95, 1.00"
    assert errors("output", Comparison("", {"output": exact}, {}), OURS) == ""


@pytest.mark.one_build
@pytest.mark.skipif(
    interpreted(), reason="takes minutes in the interpreter, whose results other tests hold to the contract"
)
def test_every_operator_is_within_the_contract(capsys):
    assert main(["precision", "--quick"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| .*\d", line)]
    for operator in ("linear_attention", "chunk_states", "delta_rule", "causal_conv1d", "output_gated", "tpa_decode"):
        assert any(operator in row for row in rows), operator
    for row in rows:
        _, what, ours, *_ = row.split("|")
        norm, largest = map(float, ours.split(","))
        assert norm <= 5, what
        assert largest <= 2, what
