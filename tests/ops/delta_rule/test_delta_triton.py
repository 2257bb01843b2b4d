"""The Triton kernels in Triton's interpreter; see tests/ops/linear_attention/test_triton.py."""

from functools import partial

import pytest
import torch

import fulmen
from cases import BACKENDS, Results, assert_close
from fulmen.lab.fuzz import Problem, Setting, wrong
from fulmen.lab.operators.delta_rule.cases import Case, exact, options, run, tensors, yardstick
from fulmen.lab.tolerances import DECAY_GRADIENT_NORM, DELTA_RULE, TOLERANCE, relative_error
from fulmen.ops.chunks.decay_form import tokens_of
from fulmen.runtime.architectures import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "triton" not in BACKENDS, reason="no GPU, and Triton's interpreter must be chosen before triton is imported"
    ),
]

# Ragged, not a multiple of anything, more than one chunk of every kernel, and enough channels for one term of bfloat16.
RAGGED = Case(batch=1, length=39, key_size=20, value_size=18, heads=(1, 1, 1), scale=0.3)


def check(case, given=None, **arguments):
    results = run(case, tensors(case) if given is None else given, "triton", **arguments)
    assert_close(Results(results, "triton", partial(yardstick, case), DELTA_RULE), exact(case))


@pytest.mark.parametrize("decays", ["none", "head", "token", "channel"])
def test_every_decay(decays):
    check(RAGGED._replace(decays=decays, normalizes=decays != "head"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decays", ["token", "channel"])
def test_dtypes(decays, dtype):
    check(RAGGED._replace(decays=decays, dtype=dtype, length=45))


def test_a_head_decay_has_a_gradient_in_float32_from_bfloat16():
    """It is a tenth of what it is a difference of, summed over all tokens: two terms of factors are not enough."""
    case = Case(batch=1, length=16, heads=(1, 1, 2), key_size=2, decays="head", values="far", scale=1.0, seed=206)
    case = case._replace(dtype=torch.bfloat16)
    got = run(case, tensors(case), "triton")["dlog_decay"]
    assert relative_error(got, exact(case)["dlog_decay"]) <= DECAY_GRADIENT_NORM


@pytest.mark.parametrize("values", ["far", "forget"])
@pytest.mark.parametrize("decays", ["token", "channel"])
def test_extreme_decays(decays, values):
    check(RAGGED._replace(decays=decays, values=values))


@pytest.mark.parametrize(
    ("dtype", "value_size"),
    [(torch.float32, 18), (torch.bfloat16, 9), (torch.bfloat16, 18), (torch.bfloat16, 32)],
)
def test_parallel_keys(dtype, value_size):
    """Where rounding before the inverse has taken away what keys have in common would cost several times the error."""
    case = RAGGED._replace(keys="parallel", betas="near two", normalizes=False, length=66, decays="none", dtype=dtype)
    check(case._replace(value_size=value_size))


def test_the_gradient_of_beta_is_no_difference():
    """Of dU, which parallel keys leave little of: with its rounding dβ was off by 0.11."""
    case = Case(length=32, heads=(3, 3, 3), decays="none", keys="parallel", betas="near two", scale=1.0, initial=False)
    case = case._replace(dtype=torch.bfloat16)
    want = exact(case)["dbeta"]
    got = run(case, tensors(case), "triton")["dbeta"].double()
    assert (got - want).norm() <= 0.04 * want.norm()


# Named after the results that were beyond their limits while factors of a chunk's tokens had one term, and by how much.
HARD = Case(batch=1, heads=(1, 1, 1), betas="near two", dtype=torch.bfloat16)
ALIKE = {
    "output 1.6": Problem(
        "delta_rule", HARD._replace(length=5, key_size=19, value_size=33, decays="none", keys="parallel", scale=1.0,
        initial=False, seed=20562), without="output",
    ),
    "state 1.9, dq 1.5": Problem(
        "delta_rule", HARD._replace(length=31, key_size=26, value_size=25, decays="none", initial=False, seed=16257),
        equal="tokens",
    ),
    "dk 2.6": Problem(
        "delta_rule", HARD._replace(length=33, key_size=66, value_size=81, decays="none", keys="parallel",
        normalizes=False, scale=1.0, initial=False, seed=50696), without="output",
    ),
    "dv 1.7": Problem(
        "delta_rule", HARD._replace(length=12, key_size=22, value_size=30, decays="none", keys="repeated", scale=-0.5,
        seed=85534), without="state",
    ),
    "dbeta 1.7": Problem(
        "delta_rule", HARD._replace(length=35, key_size=71, value_size=94, values="zero", seed=82489), equal="tokens",
    ),
    "state 1.5, a decay per channel": Problem(
        "delta_rule", HARD._replace(length=10, key_size=32, value_size=25, decays="channel", values="far",
        keys="repeated", seed=85504),
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", ALIKE.values(), ids=ALIKE)
def test_tokens_that_are_alike(problem):
    """What a chunk's tokens leave of each other would be mostly the rounding of X, M, U, Y and dU."""
    assert wrong(problem, Setting("triton", gradients="inputs")) == []


def test_the_decay_gradient_of_equal_tokens():
    """It is what is left of sums a thousand times as large: with two terms of X, Y and dV, 1.9 times what it may be."""
    case = HARD._replace(length=15, key_size=19, value_size=32, values="tiny", betas="random", normalizes=False)
    case = case._replace(scale=1.0, initial=False, seed=9447)
    assert wrong(Problem("delta_rule", case, equal="tokens"), Setting("triton")) == []


@pytest.mark.parametrize(("key_size", "value_size", "decays"), [(19, 8, "channel"), (4, 35, "none")])
def test_few_channels_keep_their_digits(key_size, value_size, decays):
    """Their few roundings would not average out: in bfloat16 a state was off by 5.5e-3 of its norm, dβ by 3.5e-2."""
    case = RAGGED._replace(key_size=key_size, value_size=value_size, decays=decays, keys="parallel")
    case = case._replace(dtype=torch.bfloat16)
    got, want = run(case, tensors(case), "triton"), exact(case)
    for name in ("state", "dbeta", "dinitial_state"):
        assert relative_error(got[name], want[name]) <= 1e-4, name


def test_packed_sequences_with_shared_heads():
    check(RAGGED._replace(decays="token", packed=(0, 33, 1, 0, 16), heads=(1, 2, 2), dtype=torch.bfloat16))


def test_more_channels_than_one_tile():
    """Of the walks, the gradients and the preparation."""
    check(RAGGED._replace(decays="channel", length=5, key_size=70, value_size=66, heads=(1, 1, 2)))


def test_several_segments(monkeypatch):
    from fulmen.ops.delta_rule import triton

    monkeypatch.setattr(triton, "SEGMENT_BYTES", 0)
    monkeypatch.setattr(triton, "SHORTEST_SEGMENT", 128)
    case = RAGGED._replace(decays="head", length=260, key_size=8, initial=False)
    assert len(triton.segments(delta_rule_of(case))) == 3
    check(case)


def delta_rule_of(case):
    from fulmen.ops.delta_rule.problem import DeltaRule

    x = tensors(case)
    return DeltaRule(x["q"], x["k"], x["v"], x["beta"], x["log_decay"], True, 0.3, None, None, "auto")


@pytest.fixture
def nan_in_new_tensors():
    """As torch fills memory that is not initialised while algorithms must be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("decays", ["head", "token", "channel"])
def test_tokens_after_the_last_packed_sequence_count_as_nothing(decays, nan_in_new_tensors):
    """On a GPU nobody looks at the values of cu_seqlens, as that would wait for the device; so the kernels must."""
    case = RAGGED._replace(decays=decays, packed=(20, 0, 9), heads=(1, 2, 2), initial=False)
    given, rest = tensors(case), 40
    names = ("q", "k", "v", "beta", "log_decay")
    leaves = [
        torch.cat([given[name], torch.randn(1, rest, *given[name].shape[2:])], 1)
        if given[name].ndim > 1
        else given[name]
        for name in names
    ]
    leaves = [x.clone().requires_grad_() for x in leaves]
    operator = torch.ops.fulmen.delta_rule  # the public function does look, for tensors on a CPU
    output, _ = operator(*leaves, True, 0.3, None, options(case)["cu_seqlens"], "auto", False, "triton")
    gradients = torch.autograd.grad(output, leaves, torch.randn_like(output))
    for result in (output, *gradients):
        assert torch.isfinite(result).all()
        if result.ndim > 1:
            assert not result[:, -rest:].any()
            assert result[:, :-rest].any()


@pytest.mark.parametrize("decays", ["token", "channel"])
def test_memory_outside_of_the_tokens_is_never_read(decays):
    """The tensors are views into larger ones full of NaN, and the last chunk is incomplete."""
    case = RAGGED._replace(decays=decays)
    given = {name: amid_nan(x) if x.ndim == 4 and "state" not in name else x for name, x in tensors(case).items()}
    check(case, given)


def amid_nan(x):
    batch, length, heads, size = x.shape
    around = torch.full((batch, length + 64, heads + 1, size + 7), torch.nan, dtype=x.dtype)
    inside = around[:, :length, :heads, :size]
    inside.copy_(x)
    return inside


def test_float16_states_and_scores_beyond_its_range():
    """65504 is the end of float16, but not of what is computed from it."""
    q, k, v = (torch.full((1, 40, 1, 16), value, dtype=torch.float16) for value in (100.0, 0.25, 60000.0))
    k = k * (torch.arange(16) == torch.arange(40)[:, None, None] % 16)  # one channel each, written once or twice
    beta, initial = torch.full((1, 40, 1), 0.5), torch.full((1, 1, 16, 16), 1e6)
    arguments = {"scale": 1e-6, "initial_state": initial, "return_state": True}
    output, state = fulmen.delta_rule(q, k, v, beta, **arguments, backend="triton")
    expected = fulmen.delta_rule(*(x.double() for x in (q, k, v, beta)), **arguments, backend="reference")
    assert expected[1].abs().max() > 65504
    assert relative_error(output, expected[0]) <= TOLERANCE[torch.float16]
    assert relative_error(state, expected[1]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("decays", ["none", "head", "token", "channel"])
def test_steps(decays):
    case = RAGGED._replace(decays=decays, length=3, heads=(1, 1, 2))
    given, arguments = tensors(case), options(case)
    del arguments["cu_seqlens"]
    state = given["initial_state"].mT.contiguous().mT
    for t in range(case.length):
        token = {n: tokens_of(given[n], t) for n in ("q", "k", "v", "beta", "log_decay") if n in given}
        output = fulmen.delta_rule_step(**token, state=state, **arguments, backend="triton")
        assert relative_error(output, exact(case)["output"][:, t]) <= TOLERANCE[torch.float32]
    assert relative_error(state, exact(case)["state"]) <= TOLERANCE[torch.float32]


@pytest.mark.skipif(not interpreted(), reason="the same bits on a card are verify's to see")
def test_bits_do_not_depend_on_what_else_is_in_the_batch():
    case = RAGGED._replace(decays="token", dtype=torch.bfloat16, batch=2)
    x = tensors(case)
    both = run(case, x, "triton")
    alone = run(case, {name: y[1:] for name, y in x.items()}, "triton")
    for name in ("output", "state", "dq", "dk", "dv", "dbeta", "dlog_decay", "dinitial_state"):
        assert torch.equal(both[name][1:], alone[name]), name
