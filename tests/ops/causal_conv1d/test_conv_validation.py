"""What is refused, and in which words."""

import pytest
import torch

import fulmen

X, WEIGHT, BIAS, STATE = torch.zeros(2, 5, 3), torch.zeros(3, 4), torch.zeros(3), torch.zeros(2, 3, 4)
CONVOLUTION = {"x": X, "weight": WEIGHT, "bias": BIAS, "initial_state": STATE}
STEP = {"x": X[:, 0], "state": STATE, "weight": WEIGHT, "bias": BIAS}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"x": X.tolist()}, TypeError, r"x must be a torch.Tensor \[B, N, C\]; got list"),
        ({"x": X.int()}, TypeError, "x must be float32, bfloat16, float16 or float64; got torch.int32"),
        ({"x": X.to_sparse()}, TypeError, "x must be a dense tensor"),
        ({"x": X[0]}, ValueError, r"x must have 3 dimensions, \[B, N, C\]; got shape \[5, 3\]"),
        ({"x": X[:, :, :0]}, ValueError, "x must have at least one channel"),
        ({"weight": None}, TypeError, r"weight must be a torch.Tensor \[C, K\]; got None"),
        ({"weight": WEIGHT[:2]}, ValueError, r"weight must have shape \[C, K\] with C = 3; got \[2, 4\]"),
        ({"weight": WEIGHT[:, None]}, ValueError, r"weight must have shape \[C, K\] with C = 3; got \[3, 1, 4\]"),
        ({"weight": WEIGHT[:, :0]}, ValueError, r"weight must have K of 1 to 64; got shape \[3, 0\]"),
        ({"weight": torch.zeros(3, 65)}, ValueError, r"weight must have K of 1 to 64; got shape \[3, 65\]"),
        ({"weight": WEIGHT.to("meta")}, ValueError, "weight must be on the device of x, cpu; got meta"),
        ({"bias": BIAS[:2]}, ValueError, r"bias must have shape \[C\] = \[3\]; got \[2\]"),
        ({"bias": BIAS.long()}, TypeError, "bias must be float32, bfloat16, float16 or float64; got torch.int64"),
        ({"activation": "relu"}, ValueError, "activation must be one of None, 'silu'; got 'relu'"),
        (
            {"initial_state": STATE[:, :, :2]},
            ValueError,
            r"initial_state must have shape \[B, C, W\] = \[2, 3, W\] with W at least K - 1 = 3; got \[2, 3, 2\]",
        ),
        ({"initial_state": [1.0]}, TypeError, "^initial_state must be a torch.Tensor or None; got list$"),
        ({"initial_state": STATE.int()}, TypeError, "^initial_state must be float32, .*; got torch.int32$"),
        ({"initial_state": STATE[..., None]}, ValueError, r"^initial_state must have shape .* got \[2, 3, 4, 1\]$"),
        ({"initial_state": STATE[:1]}, ValueError, r"\[B, C, W\] = \[2, 3, W\] with W .* got \[1, 3, 4\]"),
        ({"return_state": 1}, TypeError, "return_state must be True or False; got 1"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "x must have B = 1 with cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 5])}, TypeError, "cu_seqlens must be int32 or int64"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_arguments(wrong, error, message):
    with pytest.raises(error, match=message):
        fulmen.causal_conv1d(**CONVOLUTION | wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"x": X}, ValueError, r"x must have 2 dimensions, \[B, C\]; got shape \[2, 5, 3\]"),
        ({"state": None}, TypeError, r"state must be a torch.Tensor \[B, C, W\]; got None"),
        ({"state": STATE[:, :, :2]}, ValueError, r"state must have shape \[B, C, W\] = \[2, 3, W\] with W at least"),
        ({"state": STATE.double()}, TypeError, "state must be float32, bfloat16 or float16 for torch.float32 inputs"),
        ({"state": STATE[:1].expand(2, 3, 4)}, ValueError, "state must have memory of its own for each element"),
        ({"state": torch._neg_view(STATE)}, ValueError, "state must not be a lazily negated view"),
        ({"state": STATE.clone().requires_grad_()}, ValueError, "state must not require grad: causal_conv1d_step"),
        ({"activation": "SiLU"}, ValueError, "activation must be one of None, 'silu'; got 'SiLU'"),
    ],
)
def test_arguments_of_the_step(wrong, error, message):
    with pytest.raises(error, match=message):
        fulmen.causal_conv1d_step(**STEP | wrong)


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 5], "cu_seqlens must start at 0; got 1"),
        ([0, 4], "cu_seqlens must end at N = 5; got 4"),
        ([0, 3, 2, 5], "cu_seqlens must never decrease; got 2 after 3 at entry 2"),
    ],
)
def test_values_of_cu_seqlens(bounds, message, backend):
    if not fulmen.backends()[backend].available:
        pytest.skip(fulmen.backends()[backend].reason)
    with pytest.raises(ValueError, match=message):
        fulmen.causal_conv1d(X[:1], WEIGHT, cu_seqlens=torch.tensor(bounds), backend=backend)


@pytest.mark.parametrize("name", ["x", "state", "weight", "bias"])
def test_a_step_has_no_gradient(name):
    given = {key: x.clone() for key, x in STEP.items()}
    given[name].requires_grad_()
    message = f"^{name} must not require grad: causal_conv1d_step updates .* or use causal_conv1d to train$"
    with pytest.raises(ValueError, match=message):
        fulmen.causal_conv1d_step(**given)
    with torch.no_grad():
        assert fulmen.causal_conv1d_step(**given).isfinite().all()


def test_states_of_packed_sequences():
    given = {"x": X[:1], "weight": WEIGHT, "cu_seqlens": torch.tensor([0, 2, 5])}
    assert fulmen.causal_conv1d(**given, initial_state=STATE).shape == (1, 5, 3)
    message = (
        r"^initial_state must have shape \[sequences, C, W\] = \[2, 3, W\] with W at least K - 1 = 3; got \[1, 3, 4\]$"
    )
    with pytest.raises(ValueError, match=message):
        fulmen.causal_conv1d(**given, initial_state=STATE[:1])


def test_the_narrowest_and_the_widest():
    for width in (1, 64):
        state = torch.zeros(2, 1, width - 1)
        assert fulmen.causal_conv1d(X[..., :1], torch.zeros(1, width), initial_state=state).shape == (2, 5, 1)
