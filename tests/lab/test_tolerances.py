"""The bounds for bfloat16: GPU-style arithmetic keeps to them, and one mistake more does not."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

import fulmen
from cases import Case, exact, tensors
from fulmen.lab.operators.linear_attention import cases
from fulmen.lab.tolerances import deviations
from fulmen.lab.yardstick import rounded_product

LARGE = Case(decays="head", dtype=torch.bfloat16, length=200, key_size=32, value_size=32, scale=1.0)
SMALL = LARGE.of(length=40)
NO_DECAY = LARGE.of(decays="none", length=1000)


def truncated(x):
    """To bfloat16, towards zero."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


def problems(case, results):
    """But of decay gradients, which nobody computes from rounded factors."""
    expected = {name: x for name, x in exact(case).items() if name != "dlog_decay"}
    return deviations(results, expected, "", lambda: cases.yardstick(case))


def with_products(case, product):
    with patch.object(torch.Tensor, "__matmul__", product):
        return cases.run(case, backend="torch")


@pytest.mark.parametrize("case", [LARGE, SMALL, NO_DECAY])
def test_rounded_factors_are_within_bounds(case):
    assert problems(case, cases.yardstick(case)) == []
    assert with_products(case, rounded_product)["output"].equal(cases.yardstick(case)["output"])


@pytest.mark.parametrize("case", [LARGE, SMALL])
def test_truncated_factors_are_not(case):
    plain = torch.Tensor.__matmul__
    results = with_products(case, lambda a, b: plain(truncated(a), truncated(b)))
    found = problems(case, results)
    assert {x.split(":")[0] for x in found} >= {"output", "dq", "dk", "dv", "dinitial_state"}, found


def test_a_state_in_bfloat16_is_not():
    """Rounded where chunks meet, as the state of a sequence in parts."""
    state, outputs, given = None, [], tensors(NO_DECAY)
    for first in range(0, NO_DECAY.length, 64):
        q, k, v = (given[name][:, first : first + 64] for name in "qkv")
        state = given["initial_state"] if state is None else state.bfloat16().float()
        output, state = fulmen.linear_attention(
            q, k, v, scale=1.0, initial_state=state, return_state=True, backend="torch"
        )
        outputs.append(output)
    results = cases.yardstick(NO_DECAY) | {"output": torch.cat(outputs, 1), "state": state}
    found = problems(NO_DECAY, results)
    assert [x.split(" ")[0] for x in found] == ["output:", "state:"], found


@pytest.mark.parametrize("name", ["output", "dq", "dk", "dv"])
def test_one_wrong_element_of_one_head_is_not(name):
    """By 2% of the largest, which the norm of all does not show."""
    yardstick = cases.yardstick(LARGE)
    results = {n: x.to(yardstick[n].dtype) for n, x in exact(LARGE).items()}
    head = results[name][1, :, 1]
    head[20, 3] += 0.02 * head.abs().max()
    assert [x.split(" off")[0] for x in problems(LARGE, results)] == [f"{name}: largest"]


def test_a_decay_gradient_of_16_bits_is_not():
    wrong = exact(LARGE)["dlog_decay"].bfloat16().float()
    results = {"output": cases.yardstick(LARGE)["output"], "dlog_decay": wrong}
    found = deviations(results, {name: exact(LARGE)[name] for name in results}, "", lambda: cases.yardstick(LARGE))
    assert [x.split(" by")[0] for x in found] == ["dlog_decay: off"]


@pytest.mark.parametrize("decays", ["head", "token", "channel"])
def test_a_decay_gradient_of_one_head_is_not(decays):
    """Wrong by a thousandth in a small head of one sample, which the norm of all does not show."""
    case = LARGE.of(decays=decays)
    expected = {"dlog_decay": exact(case)["dlog_decay"].clone()}
    axis = expected["dlog_decay"].ndim - 2 if decays == "channel" else -1
    expected["dlog_decay"].select(axis, 0).mul_(1 if decays == "head" else 1000)
    results = {"dlog_decay": expected["dlog_decay"].float()}
    check = partial(deviations, expected=expected, backend="native", inputs=torch.bfloat16)
    assert check(results) == []
    results["dlog_decay"].select(axis, 1).mul_(1.001)
    assert [x.split(" by")[0] for x in check(results)] == ["dlog_decay: off"]


def test_results_in_float32_of_bfloat16_inputs():
    """All of them float32, as the states of ``chunk_states`` without gradients."""
    states = {"states": exact(LARGE)["state"][:, :, None]}
    rounded = {"states": (states["states"] * (1 + 1e-3)).float()}
    check = partial(deviations, rounded, states, "", lambda: rounded)
    assert check(inputs=torch.bfloat16) == []
    assert check(inputs=torch.float32) != []


def test_a_decay_gradient_of_16_bits_by_request_is_measured_by_its_terms():
    """Of a decay of e^-30 next to nothing is left, which is a difference of what is not."""
    exact = torch.tensor([[[3e-13]]], dtype=torch.float64)
    for off, told in ((1e-12, 0), (1e-3, 1)):
        assert len(deviations({"dlog_decay": (exact + off).bfloat16()}, {"dlog_decay": exact}, "triton")) == told
