"""A call that is replayed gives the bits of one that is not, whatever changed between the two."""

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import fulmen
from fulmen.runtime import core
from fulmen.runtime.recording import recording
from fulmen.runtime.replay import Replay

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)

B, N, H, D = 2, 5, 4, 16


def normal(*shape):
    return torch.randn(shape)


# Of each function, arguments that it takes by position and others; all are drawn anew by each call.
CALLS = {
    fulmen.linear_attention: lambda: (
        [normal(B, N, H, D), normal(B, N, 2, D), normal(B, N, H, 8)],
        {"log_decay": -normal(H).abs(), "initial_state": normal(B, H, D, 8), "return_state": True, "scale": 0.5},
    ),
    fulmen.linear_attention_step: lambda: (
        [normal(B, H, D), normal(B, H, D), normal(B, H, 8), normal(B, H, 8, D).transpose(2, 3)],
        {"log_decay": -normal(B, H, D).abs()},
    ),
    fulmen.chunk_states: lambda: ([normal(B, N, H, D), normal(B, N, H, 8)], {"chunk_size": 2}),
    fulmen.delta_rule: lambda: (
        [normal(B, N, H, D), normal(B, N, H, D), normal(B, N, H, 8), torch.rand(B, N, H)],
        {"log_decay": -normal(B, N, H).abs(), "normalize_qk": True},
    ),
    fulmen.delta_rule_step: lambda: (
        [normal(B, H, D), normal(B, H, D), normal(B, H, 8), torch.rand(B, H), normal(B, H, D, 8)],
        {"log_decay": -normal(H).abs()},
    ),
    fulmen.causal_conv1d: lambda: (
        [normal(B, 12, N).transpose(1, 2), normal(12, 4), normal(12)],
        {"activation": "silu", "return_state": True},
    ),
    fulmen.causal_conv1d_step: lambda: ([normal(B, 12), normal(B, 12, 4), normal(12, 4)], {"activation": "silu"}),
    fulmen.tpa_decode: lambda: (
        [normal(B, 1, H, 3), normal(B, N, H), normal(B, N, H), normal(B, 1, 3, D), normal(B, N, D), normal(B, N, D)],
        {"seqlens": torch.tensor([N, 3])},
    ),
    fulmen.output_gated_attention: lambda: ([normal(B, N, H, D) for _ in range(4)], {}),
}


@pytest.fixture
def replays(monkeypatch):
    """The calls that were replayed."""
    made = []
    original = Replay.__call__
    monkeypatch.setattr(Replay, "__call__", lambda self, tensors: made.append(self) or original(self, tensors))
    return made


def outcome(function, args, kwargs):
    """Of a call on copies: results, and what became of the arguments."""
    args = [x.clone() for x in args]
    result = function(*args, **kwargs)
    return [*(result if isinstance(result, tuple) else [result]), *args]


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.stride() == y.stride()
        assert torch.equal(x, y)


def test_every_function_of_the_core_is_replayed():
    assert set(CALLS) == {
        function for function in map(partial(getattr, fulmen), fulmen.__all__) if hasattr(function, "__wrapped__")
    }


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_a_replay_gives_the_bits_of_the_long_way(function, replays):
    torch.manual_seed(0)
    outcome(function, *CALLS[function]())
    del replays[:]
    for _ in range(2):
        args, kwargs = CALLS[function]()
        same(outcome(function, args, kwargs), outcome(function.__wrapped__, args, kwargs))
    assert len(replays) == 2


def small(**changed):
    given = {"q": normal(1, N, 2, D), "k": normal(1, N, 2, D), "v": normal(1, N, 2, D)}
    return given | {"log_decay": torch.tensor([-0.1, -0.5]), "cu_seqlens": torch.tensor([0, 2, N])} | changed


# What makes a call another one than small(): it goes its own way, and is right.
CHANGES = {
    "strides": lambda: small(q=normal(1, 2, N, D).transpose(1, 2)),
    "not dense": lambda: small(q=normal(1, N, 2, 2 * D)[..., ::2]),
    "shape": lambda: small(v=normal(1, N, 2, 3)),
    "shared heads": lambda: small(k=normal(1, N, 1, D)),
    "dtype": lambda: {name: x.bfloat16() if name in "qkv" else x for name, x in small().items()},
    "a decay's dtype": lambda: small(log_decay=torch.tensor([-0.1, -0.5]).double()),
    "a decay's form": lambda: small(log_decay=-torch.rand(1, N, 2)),
    "no decay": lambda: small(log_decay=None),
    "offsets": lambda: small(cu_seqlens=torch.tensor([0, 2, N]).int()),
    "scale": lambda: small(scale=3.0),
    "an integer for a float": lambda: small(scale=1),
    "schedule": lambda: small(schedule="recurrent"),
    "backend": lambda: small(backend="torch"),
    "state": lambda: small(return_state=True),
    "one tensor twice": lambda: dict.fromkeys("qkv", normal(1, N, 2, D)),
    "empty": lambda: small(**{name: normal(1, 0, 2, D) for name in "qkv"}, cu_seqlens=None),
    "negated": lambda: small(q=normal(1, N, 2, D)._neg_view()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_calls_of_other_signatures(change):
    """Before and after one that is remembered, and twice."""
    torch.manual_seed(0)
    for _ in range(2):
        for given in (small(), CHANGES[change]()):
            found, expected = (f(**given) for f in (fulmen.linear_attention, fulmen.linear_attention.__wrapped__))
            for x, y in zip(found, expected, strict=True):
                assert torch.equal(x, y)


@pytest.mark.parametrize(
    "block",
    [nullcontext, torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu"), torch.profiler.profile],
)
def test_modes_of_the_thread(block):
    given = small()
    leaf = given | {"q": given["q"].clone().requires_grad_()}
    for _ in range(2):
        fulmen.linear_attention(**given)
        with block():
            found, expected = (f(**leaf) for f in (fulmen.linear_attention, fulmen.linear_attention.__wrapped__))
            assert torch.equal(found, expected)
            for name in ("dtype", "requires_grad"):
                assert getattr(found, name) == getattr(expected, name)
            assert found.is_inference() == expected.is_inference()


def test_settings_that_descriptions_read():
    """They reach the core although the arguments are those of before."""

    def described():
        with recording() as made:
            fulmen.linear_attention(**given)
        ((call, packed),) = made.calls
        return call.unpack(packed)[dict(call.offsets())["problem.deterministic"] // 8]

    given, found = small(), []
    try:
        for setting in (False, True, True, False):
            torch.use_deterministic_algorithms(setting)
            found.append(described())
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [0, 1, 1, 0]


def test_other_threads_have_other_workspaces(replays):
    given = small()
    expected = fulmen.linear_attention(**given)
    del replays[:]
    found = []
    threads = [threading.Thread(target=lambda: found.append(fulmen.linear_attention(**given))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(replays) == 4
    assert all(torch.equal(x, expected) for x in found)


def test_one_tensor_twice_spoils_nothing(replays):
    q = normal(1, 3, 1, D)
    given = q, q.clone(), q.clone()
    for first, again in ((False, 0), (True, 0), (True, 1)):
        fulmen.linear_attention(*(given if first else (q, q, q)), scale=0.123)
        assert len(replays) == again
    assert torch.equal(fulmen.linear_attention(q, q, q, scale=0.123), fulmen.linear_attention(*given, scale=0.123))


def test_a_result_that_the_call_does_not_write_is_not_replayed():
    given = normal(1, 3, 1, D), normal(1, 3, 1, D), normal(1, 3, 1, D)
    with recording() as made:
        result = fulmen.linear_attention(*given)
    assert Replay.of(made, list(given), result)
    assert Replay.of(made, list(given), (result, result.new_empty(0)))
    assert Replay.of(made, list(given), (result, result.exp())) is False


def test_offsets_that_are_wrong_later_are_named():
    fulmen.linear_attention(**small())
    with pytest.raises(ValueError, match="cu_seqlens"):
        fulmen.linear_attention(**small(cu_seqlens=torch.tensor([0, 4, 3])))


def test_a_step_that_is_replayed_is_seen_by_autograd(replays):
    q = torch.randn(1, 2, D)
    weight = torch.randn(1, 2, D, D, requires_grad=True)
    state = torch.zeros(1, 2, D, D)
    fulmen.linear_attention_step(q, q.clone(), q.clone(), state)
    product = (weight * state).sum()
    fulmen.linear_attention_step(q, q.clone(), q.clone(), state)
    assert replays
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
