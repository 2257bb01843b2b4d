"""Wrong input: the error names the argument, what it was and what it must be."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import fulmen

B, N, H, D, E = 2, 6, 4, 8, 5


def attention(**changes):
    given = {"q": torch.randn(B, N, H, D), "k": torch.randn(B, N, H, D), "v": torch.randn(B, N, H, E)}
    return fulmen.linear_attention(**given | changes)


def packed(bounds, **changes):
    given = {"q": torch.randn(1, N, H, D), "k": torch.randn(1, N, H, D), "v": torch.randn(1, N, H, E)}
    return fulmen.linear_attention(**given | {"cu_seqlens": torch.tensor(bounds)} | changes)


def step(**changes):
    given = {"q": torch.randn(B, H, D), "k": torch.randn(B, H, D), "v": torch.randn(B, H, E)}
    return fulmen.linear_attention_step(**given | {"state": torch.randn(B, H, D, E)} | changes)


def states(**changes):
    return fulmen.chunk_states(**{"k": torch.randn(B, N, H, D), "v": torch.randn(B, N, H, E)} | changes)


ATTENTION = [
    ({"q": [1.0]}, TypeError, r"q must be a torch.Tensor \[B, N, H, D\]; got list"),
    ({"k": None}, TypeError, r"k must be a torch.Tensor .* got NoneType"),
    ({"q": torch.randn(B, N, D)}, ValueError, r"q must have 4 dimensions, \[B, N, H, D\]; got shape \[2, 6, 8\]"),
    ({"v": torch.randn(B, N, H, E).long()}, TypeError, r"v must be float32, .*; got torch.int64"),
    ({"k": torch.randn(B, N, H, D).half()}, TypeError, r"k must have the dtype of q, torch.float32; got torch.float16"),
    ({"k": torch.randn(B, N, H, D, device="meta")}, ValueError, r"k must be on the device of q, cpu; got meta"),
    ({"k": torch.randn(B, N, H, D).to_sparse()}, TypeError, r"k must be a dense tensor; got layout"),
    (
        {"v": torch.randn(B, N + 1, H, E)},
        ValueError,
        r"v must have the same B and N as q, .*; got shape \[2, 7, 4, 5\]",
    ),
    ({"v": torch.randn(1, N, H, E)}, ValueError, r"v must have the same B and N as q"),
    ({"k": torch.randn(B, N, H, D + 1)}, ValueError, r"k must have the last dimension of q, 8; got shape"),
    ({"v": torch.randn(B, N, H, 513)}, ValueError, r"v must have a last dimension of 1 to 512"),
    ({"v": torch.randn(B, N, H, 0)}, ValueError, r"v must have a last dimension of 1 to 512"),
    (
        {"k": torch.randn(B, N, 3, D)},
        ValueError,
        r"k must have a number of heads that divides .* got 3 \(q: 4, k: 3, v: 4\)",
    ),
    ({"k": torch.randn(B, N, 0, D)}, ValueError, r"k must have a number of heads that divides"),
    ({"log_decay": -0.5}, TypeError, r"log_decay must be a torch.Tensor or None; got float"),
    (
        {"log_decay": torch.randn(H, device="meta")},
        ValueError,
        r"log_decay must be on the device of q, k and v, cpu; got meta",
    ),
    ({"log_decay": torch.ones(H).int()}, TypeError, r"log_decay must be float32, .*; got torch.int32"),
    (
        {"log_decay": torch.randn(H + 1)},
        ValueError,
        r"log_decay must have shape \[H\] = \[4\] or \[B, N, H\] = \[2, 6, 4\] or \[B, N, H, D\] = .*; got \[5\]",
    ),
    ({"log_decay": torch.randn(1)}, ValueError, r"log_decay must have shape .* got \[1\]"),
    ({"log_decay": torch.randn(B, H)}, ValueError, r"log_decay must have shape .* got \[2, 4\]"),
    ({"log_decay": torch.randn(B, N, H, 1)}, ValueError, r"log_decay must have shape .* got \[2, 6, 4, 1\]"),
    (
        {"log_decay_v": torch.randn(B, N, H)},
        ValueError,
        r"log_decay_v must have shape \[B, N, H, E\] = \[2, 6, 4, 5\]; got",
    ),
    ({"log_decay_v": torch.randn(B, N, H, D)}, ValueError, r"log_decay_v must have shape"),
    ({"scale": "1"}, TypeError, r"scale must be a real number or None; got '1'"),
    ({"scale": float("nan")}, ValueError, r"scale must be finite; got nan"),
    ({"scale": 10**400}, ValueError, r"scale must be finite; got 1000"),
    ({"scale": torch.tensor(1.0)}, TypeError, r"scale must be a real number"),
    ({"scale": True}, TypeError, r"scale must be a real number or None; got True"),
    ({"scale": np.bool_(True)}, TypeError, r"scale must be a real number"),
    ({"scale": 1j}, TypeError, r"scale must be a real number"),
    (
        {"initial_state": torch.randn(B, H, E, D)},
        ValueError,
        r"initial_state must have shape \[B, H, D, E\] = .*; got \[2, 4, 5, 8\]",
    ),
    ({"initial_state": torch.ones(B, H, D, E).int()}, TypeError, r"initial_state must be float32, .*; got torch.int32"),
    ({"return_state": 1}, TypeError, r"return_state must be True or False; got 1"),
    ({"schedule": "fast"}, ValueError, r"schedule must be one of 'auto', .*; got 'fast'"),
    ({"schedule": None}, ValueError, r"schedule must be one of"),
    ({"backend": "cuda"}, ValueError, r"backend must be one of 'auto', .*; got 'cuda'"),
    ({"cu_seqlens": torch.tensor([0, N])}, ValueError, r"q, k and v must have B = 1 with cu_seqlens .*; got 2"),
]


@pytest.mark.parametrize(("changes", "error", "message"), ATTENTION)
def test_linear_attention(changes, error, message):
    with pytest.raises(error, match=message):
        attention(**changes)


@pytest.mark.parametrize("number", [np.float32, np.float16, np.float64, Fraction])
def test_numbers_of_other_libraries(number):
    q, k, v, state = torch.randn(B, N, H, D), torch.randn(B, N, H, D), torch.randn(B, N, H, E), torch.zeros(B, H, D, E)
    assert torch.equal(attention(q=q, k=k, v=v, scale=number(0.5)), attention(q=q, k=k, v=v, scale=0.5))
    token = {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0]}
    outputs = [step(**token, state=state.clone(), scale=scale) for scale in (number(0.5), 0.5)]
    assert torch.equal(*outputs)
    assert torch.equal(states(k=k, v=v, chunk_size=np.int64(4)), states(k=k, v=v, chunk_size=4))


def test_an_unknown_option_is_a_type_error():
    for name in ("decays", "decay", "decay_v"):
        for call in (attention, step, states):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                call(**{name: torch.randn(H)})
    with pytest.raises(TypeError, match="positional"):
        fulmen.linear_attention(*[torch.randn(B, N, H, D)] * 4)


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ([1, N], ValueError, r"cu_seqlens must start at 0; got 1"),
        ([0, N - 1], ValueError, r"cu_seqlens must end at N = 6; got 5"),
        ([0, 4, 2, N], ValueError, r"cu_seqlens must never decrease; got 2 after 4 at entry 2"),
        ([0], ValueError, r"cu_seqlens must have one dimension and at least 2 entries"),
        ([[0, N]], ValueError, r"cu_seqlens must have one dimension"),
        ([0.0, float(N)], TypeError, r"cu_seqlens must be int32 or int64; got torch.float32"),
    ],
)
def test_cu_seqlens(bounds, error, message):
    with pytest.raises(error, match=message):
        packed(bounds)


def test_cu_seqlens_with_states_of_the_wrong_number():
    with pytest.raises(ValueError, match=r"initial_state must have shape \[sequences, H, D, E\] = \[2, 4, 8, 5\]"):
        packed([0, 2, N], initial_state=torch.randn(1, H, D, E))
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch.Tensor"):
        packed([0, N], cu_seqlens=[0, N])


STEP = [
    ({"scale": "1"}, TypeError, r"^scale must be a real number or None; got '1'$"),
    ({"k": torch.randn(B, H, D + 1)}, ValueError, r"^k must have the last dimension of q, 8; got shape \[2, 4, 9\]$"),
    ({"q": torch.randn(B, 1, H, D)}, ValueError, r"q must have 3 dimensions, \[B, H, D\]"),
    ({"v": torch.randn(B + 1, H, E)}, ValueError, r"v must have the same B as q"),
    ({"state": None}, TypeError, r"state must be a torch.Tensor \[B, H, D, E\]; got None"),
    ({"state": torch.randn(B, H, E, D)}, ValueError, r"state must have shape \[B, H, D, E\]"),
    ({"state": torch.randn(B, H, D, E).double()}, TypeError, r"state must be float32, bfloat16 or float16 for torch"),
    ({"state": torch.randn(B, H, D, E).int()}, TypeError, r"state must be float32, .*; got torch.int32"),
    ({"state": torch.complex(*torch.randn(2, B, H, D, E)).conj().imag}, ValueError, r"state must not be a lazily neg"),
    ({"state": torch.randn(1, H, D, E).expand(B, -1, -1, -1)}, ValueError, r"state must have memory of its own"),
    (
        {"state": torch.randn(D, E, B, H).permute(2, 3, 0, 1)},
        ValueError,
        r"state must be dense \(stride 1\) along D or",
    ),
    (
        {"log_decay": torch.randn(B, H, E)},
        ValueError,
        r"log_decay must have shape \[H\] = \[4\] or \[B, H\] = \[2, 4\] or",
    ),
    ({"log_decay_v": torch.randn(B, H)}, ValueError, r"log_decay_v must have shape \[B, H, E\]"),
]


@pytest.mark.parametrize(("changes", "error", "message"), STEP)
def test_linear_attention_step(changes, error, message):
    with pytest.raises(error, match=message):
        step(**changes)


STATES = [
    (
        {"v": torch.randn(B, N, 3, E)},
        ValueError,
        r"^v must have a number of heads that divides .* got 3 \(k: 4, v: 3\)",
    ),
    ({"k": [1.0]}, TypeError, r"^k must be a torch.Tensor \[B, N, H, D\]; got list"),
    ({"v": torch.randn(B, N + 1, H, E)}, ValueError, r"^v must have the same B and N as k, "),
    ({"k": torch.randn(B, N, 3, D)}, ValueError, r"k must have a number of heads that divides"),
    ({"log_decay": torch.randn(6)}, ValueError, r"k must have a number of heads that divides .*log_decay: 6"),
    ({"log_decay": torch.randn(2)}, ValueError, r"log_decay must have shape \[H\] = \[4\]"),
    ({"log_decay": torch.randn(B, H)}, ValueError, r"log_decay must have shape \[H\] = \[4\] or .*; got \[2, 4\]"),
    (
        {"log_decay_v": torch.randn(B, N, H)},
        ValueError,
        r"^log_decay_v must have shape \[B, N, H, E\] = \[2, 6, 4, 5\]; got \[2, 6, 4\]",
    ),
    (
        {"log_decay_v": torch.randn(B, N, 6, E)},
        ValueError,
        r"k must have a number of heads that divides .*log_decay_v: 6",
    ),
    ({"chunk_size": 0}, ValueError, r"chunk_size must be at least 1; got 0"),
    ({"chunk_size": 16.0}, TypeError, r"chunk_size must be an integer; got 16.0"),
    ({"chunk_size": True}, TypeError, r"chunk_size must be an integer; got True"),
    ({"chunk_size": np.float64(16)}, TypeError, r"chunk_size must be an integer"),
    ({"schedule": "scan"}, ValueError, r"schedule must be one of"),
    (
        {"initial_state": torch.randn(B, H, D)},
        ValueError,
        r"^initial_state must have shape \[B, H, D, E\] = \[2, 4, 8, 5\]; got \[2, 4, 8\]$",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), STATES)
def test_chunk_states(changes, error, message):
    with pytest.raises(error, match=message):
        states(**changes)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("log_decay", (H,)),
        ("log_decay", (B, N, H)),
        ("log_decay", (B, N, H, D)),
        ("log_decay_v", (B, N, H, E)),
    ],
)
def test_a_decay_may_have_more_heads_than_keys_and_values(name, shape):
    found = states(k=torch.randn(B, N, 1, D), v=torch.randn(B, N, 1, E), **{name: -torch.rand(shape)})
    assert found.shape[:2] == (B, H)


@pytest.mark.parametrize("name", ["q", "k", "v", "state", "log_decay", "log_decay_v"])
def test_a_step_has_no_gradient(name):
    given = {"q": torch.randn(B, H, D), "k": torch.randn(B, H, D), "v": torch.randn(B, H, E)}
    given |= {"state": torch.zeros(B, H, D, E), "log_decay": -torch.rand(H), "log_decay_v": -torch.rand(B, H, E)}
    given[name].requires_grad_()
    message = f"^{name} must not require grad: linear_attention_step updates .* or use linear_attention to train$"
    with pytest.raises(ValueError, match=message):
        step(**given)
    with torch.no_grad():
        assert step(**given).isfinite().all()


@pytest.mark.parametrize("size", [1, 512])
def test_the_smallest_and_the_largest_sizes(size):
    q, v = torch.randn(1, 2, 1, size), torch.randn(1, 2, 1, 513 - size)
    assert attention(q=q, k=q, v=v).shape == v.shape


def test_an_error_inside_a_compiled_call_is_the_same():
    call = torch.compile(packed, backend="eager")
    with pytest.raises(ValueError, match="cu_seqlens must never decrease"):
        call([0, 4, 2, N])
