"""Errors name the argument, what it was and what it must be; tests/ops/linear_attention has more of shared checks."""

import pytest
import torch

import fulmen


def inputs():
    q, k = (torch.zeros(2, 5, 2, 4) for _ in range(2))
    return {"q": q, "k": k, "v": torch.zeros(2, 5, 4, 3), "beta": torch.zeros(2, 5, 4)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"beta": None}, TypeError, r"beta must be a torch.Tensor \[B, N, H\]; got None"),
        (
            {"beta": torch.zeros(2, 5, 2)},
            ValueError,
            r"shape \[B, N, H\] = \[2, 5, 4\]; got \[2, 5, 2\]",
        ),
        ({"beta": torch.zeros(2, 5, 4, dtype=torch.int64)}, TypeError, "beta must be float32"),
        ({"k": torch.zeros(2, 5, 2, 8)}, ValueError, "k must have the last dimension of q, 4"),
        (
            {"q": torch.zeros(2, 5, 3, 4)},
            ValueError,
            "q must have a number of heads that divides",
        ),
        ({"log_decay": torch.zeros(2)}, ValueError, "log_decay must have shape"),
        ({"normalize_qk": 1}, TypeError, "normalize_qk must be True or False; got 1"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"schedule": "fast"}, ValueError, "schedule must be one of"),
        (
            {"initial_state": torch.zeros(2, 4, 3, 4)},
            ValueError,
            r"^initial_state must have shape \[B, H, D, E\] = \[2, 4, 4, 3\]; got \[2, 4, 3, 4\]$",
        ),
        ({"q": [1.0]}, TypeError, r"^q must be a torch.Tensor \[B, N, H, D\]; got list"),
        ({"v": torch.zeros(2, 5, 4)}, ValueError, r"^v must have 4 dimensions, \[B, N, H, D\]; got shape \[2, 5, 4\]"),
        ({"beta": [1.0]}, TypeError, "^beta must be a torch.Tensor or None; got list"),
        ({"beta": torch.zeros(2, 5, 4, device="meta")}, ValueError, "^beta must be on the device of q, k and v, cpu"),
        ({"return_state": 1}, TypeError, "^return_state must be True or False; got 1"),
        ({"cu_seqlens": torch.zeros(2)}, TypeError, "^cu_seqlens must be int32 or int64; got torch.float32"),
        ({"normalise_qk": True}, TypeError, "unexpected keyword argument"),
    ],
)
def test_delta_rule(changes, error, message):
    with pytest.raises(error, match=message):
        fulmen.delta_rule(**inputs() | changes)


@pytest.mark.parametrize("bounds", [[1, 5], [0, 4], [0, 3, 2, 5]])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_bounds_that_are_none(bounds, backend):
    given = {name: x[:1] for name, x in inputs().items()}
    with pytest.raises(ValueError, match="cu_seqlens must"):
        fulmen.delta_rule(**given, cu_seqlens=torch.tensor(bounds), backend=backend)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"beta": torch.zeros(2)}, ValueError, r"beta must have shape \[B, H\] = \[2, 4\]; got \[2\]"),
        ({"q": [1.0]}, TypeError, r"^q must be a torch.Tensor \[B, H, D\]; got list"),
        ({"v": torch.zeros(2, 5, 4, 3)}, ValueError, r"^v must have 3 dimensions, \[B, H, D\]"),
        ({"state": None}, TypeError, r"^state must be a torch.Tensor \[B, H, D, E\]; got None$"),
        (
            {"state": torch.zeros(2, 4, 3, 4)},
            ValueError,
            r"^state must have shape \[B, H, D, E\] = \[2, 4, 4, 3\]; got",
        ),
        ({"state": torch.zeros(2, 4, 4, 3, 2)[..., 0]}, ValueError, r"^state must be dense \(stride 1\) along D or"),
        ({"state": torch.zeros(2, 4, 4, 3).int()}, TypeError, r"^state must be float32, .*; got torch.int32"),
        ({"log_decay": torch.zeros(2, 2)}, ValueError, r"log_decay must have shape \[H\] = \[4\] or \[B, H\] = "),
        ({"normalize_qk": None}, TypeError, "^normalize_qk must be True or False; got None"),
        ({"scale": "1"}, TypeError, "^scale must be a real number or None; got '1'"),
        ({"k": torch.zeros(2, 2, 8)}, ValueError, "^k must have the last dimension of q, 4"),
        ({"q": torch.zeros(2, 3, 4)}, ValueError, "^q must have a number of heads that divides"),
        ({"beta": None}, TypeError, r"^beta must be a torch.Tensor \[B, H\]; got None"),
    ],
)
def test_delta_rule_step(changes, error, message):
    token = {name: x[:, 0] for name, x in inputs().items()} | {"state": torch.zeros(2, 4, 4, 3)}
    with pytest.raises(error, match=message):
        fulmen.delta_rule_step(**token | changes)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "state", "log_decay"])
def test_a_step_has_no_gradient(name):
    given = {key: x[:, 0].clone() for key, x in inputs().items()}
    given |= {"state": torch.zeros(2, 4, 4, 3), "log_decay": torch.zeros(4)}
    given[name].requires_grad_()
    message = f"^{name} must not require grad: delta_rule_step updates .* or use delta_rule to train$"
    with pytest.raises(ValueError, match=message):
        fulmen.delta_rule_step(**given)
    with torch.no_grad():
        assert fulmen.delta_rule_step(**given).isfinite().all()


def test_states_of_packed_sequences():
    given = {name: x[:1] for name, x in inputs().items()} | {"cu_seqlens": torch.tensor([0, 2, 5])}
    assert fulmen.delta_rule(**given, initial_state=torch.zeros(2, 4, 4, 3)).shape == (1, 5, 4, 3)
    message = r"^initial_state must have shape \[sequences, H, D, E\] = \[2, 4, 4, 3\]; got \[1, 4, 4, 3\]$"
    with pytest.raises(ValueError, match=message):
        fulmen.delta_rule(**given, initial_state=torch.zeros(1, 4, 4, 3))


def test_no_size_is_taken_for_another():
    """Batch, tokens, heads of q, k and v, key and value size, all different."""
    q, k, v = torch.randn(3, 7, 2, 5), torch.randn(3, 7, 4, 5), torch.randn(3, 7, 8, 6)
    beta, decay, state = torch.rand(3, 7, 8), -torch.rand(3, 7, 8), torch.zeros(3, 8, 5, 6)
    assert fulmen.delta_rule(q, k, v, beta, log_decay=decay, initial_state=state).shape == v.shape
    token = [x[:, 0] for x in (q, k, v, beta)]
    assert fulmen.delta_rule_step(*token, state, log_decay=decay[:, 0]).shape == (3, 8, 6)
