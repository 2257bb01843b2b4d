"""The Triton kernels in Triton's interpreter, against the float64 recurrence.

On a GPU where there is one. Triton decides at import whether it interprets, so `make` runs this file in a process of
its own with TRITON_INTERPRET=1; in any other process without a GPU it is skipped. There, `pytest -k triton` also runs
every test that is parametrised over backends on these kernels; `make test-gpu-static` does so.
"""

import pytest
import torch

import fulmen
from cases import (
    ALL_DECAYS,
    BACKENDS,
    DECAYS,
    SCHEDULES,
    TOLERANCE,
    Case,
    assert_close,
    differentiate,
    exact,
    inputs,
    relative_error,
    run,
)
from fulmen.lab.fuzz import Problem, Setting
from fulmen.lab.fuzz.trial import exact as exact_results
from fulmen.lab.fuzz.trial import results, tensors
from fulmen.lab.tolerances import DECAY_GRADIENT_NORM, LARGE, STATE, deviations
from fulmen.runtime.architectures import ARCHITECTURES, interpreted, pretend

WALK_TILES = "FULMEN_WALK_TILES"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "triton" not in BACKENDS, reason="no GPU, and Triton's interpreter must be chosen before triton is imported"
    ),
]

# Ragged, not a multiple of anything, and more than one chunk of every kernel.
RAGGED = Case(length=67, key_size=20, value_size=9, scale=0.3)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = pytest.mark.long  # of kernels that take seconds in the interpreter, all but some of the combinations


@pytest.mark.parametrize(
    ("decays", "dtype"),
    [
        pytest.param(decays, dtype, marks=LONG if decays not in DECAYS and dtype.itemsize == 2 else ())
        for decays in ALL_DECAYS
        for dtype in DTYPES
    ],
)
def test_every_decay_and_dtype(decays, dtype):
    case = RAGGED.of(decays=decays, dtype=dtype, batch=1)
    assert_close(run(case, backend="triton"), exact(case))


@pytest.mark.parametrize("decays", ["head", "token"])
def test_states_of_bfloat16_have_a_decay_gradient_in_float32(decays):
    """Of few tokens, most of it is about the state that they leave, which the forward has of rounded products."""
    case = Case(batch=1, length=16, heads=(1, 1, 1), key_size=33, value_size=33, decays=decays, dtype=torch.bfloat16)
    problem = Problem("chunk_states", case)
    got = results(problem, tensors(problem), Setting("triton"))
    assert not deviations(got, {"dlog_decay": exact_results(problem)["dlog_decay"]}, "triton", inputs=case.dtype)


def test_the_decay_gradient_of_few_channels_keeps_its_digits():
    """Of one channel and five tokens it was off by 2e-4 of its norm with two terms."""
    case = Case(batch=2, length=5, heads=(1, 1, 1), key_size=1, value_size=34, decays="channel", scale=1.0, seed=447)
    problem = Problem("chunk_states", case.of(dtype=torch.bfloat16), chunk_size=56)
    got = results(problem, tensors(problem), Setting("triton"))
    assert not deviations(got, {"dlog_decay": exact_results(problem)["dlog_decay"]}, "triton", inputs=torch.bfloat16)


@pytest.mark.skipif(not interpreted(), reason="a GPU runs what was made for it")
@pytest.mark.parametrize(
    ("decays", "tiles", "dtype"),
    [(decays, tiles, torch.bfloat16) for decays in ("none", "head", "token") for tiles in ("sm_90", "sm_90_short")]
    + [("channel", "sm_90", torch.float16)],
)
def test_walks_as_hopper_runs_them(decays, tiles, dtype, monkeypatch):
    """Chunks of 64 tokens, and matrices that are not held as their transposes; the interpreter's default is an A100."""
    monkeypatch.setenv(WALK_TILES, tiles)
    case = RAGGED.of(decays=decays, dtype=dtype, length=150, batch=1, heads=(1, 1, 1))
    with pretend(ARCHITECTURES["sm_90"]):
        assert_close(run(case, backend="triton"), exact(case))


@pytest.mark.parametrize("decays", ["none", "token"])
def test_states_of_float16_inputs_are_as_good_as_those_of_float32(decays):
    case = RAGGED.of(decays=decays, dtype=torch.float16)
    assert relative_error(run(case, backend="triton")["state"], exact(case)["state"]) < 1e-6


def test_tiles_that_there_are_not(monkeypatch):
    monkeypatch.setenv(WALK_TILES, "sm90")
    with pytest.raises(ValueError, match=f"{WALK_TILES} must be one of sm_80, .*; got 'sm90'"):
        run(RAGGED, backend="triton")


@pytest.mark.parametrize(
    ("decays", "schedule"),
    [
        pytest.param(decays, schedule, marks=LONG if "value" in decays and schedule not in ("auto", "loop") else ())
        for decays in ("head", "channel+value")
        for schedule in SCHEDULES
    ],
)
def test_segments(decays, schedule):
    """300 tokens are three segments of the schedules that partition the sequence."""
    case = RAGGED.of(decays=decays, length=300, batch=1, heads=(1, 1, 1))
    assert_close(run(case, backend="triton", schedule=schedule), exact(case))


@pytest.mark.parametrize("decays", ["token", "channel", "token+value"])
def test_a_decay_gradient_starts_again_with_every_segment(decays, monkeypatch):
    """Where the schedule has one segment, they are walked one after the other."""
    monkeypatch.setattr("fulmen.ops.linear_attention.triton.walks.LONGEST_SEGMENT", 128)
    case = RAGGED.of(decays=decays, length=200, batch=1, heads=(1, 1, 1))
    assert_close(run(case, backend="triton", schedule="loop"), exact(case))


@pytest.mark.parametrize("schedule", ["auto", "parallel"])
@pytest.mark.parametrize("decays", ["token", "channel", "head+value"])
def test_packed_sequences_with_shared_heads(decays, schedule):
    case = RAGGED.of(decays=decays, packed=(0, 33, 150, 0, 1), heads=(1, 2, 2))
    assert_close(run(case, backend="triton", schedule=schedule), exact(case))


@pytest.fixture
def nan_in_new_tensors():
    """As torch fills memory that is not initialised while algorithms must be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("schedule", ["auto", "recurrent"])
@pytest.mark.parametrize("decays", ["head", "token", "channel"])
def test_tokens_after_the_last_packed_sequence_count_as_nothing(decays, schedule, nan_in_new_tensors):
    """On a GPU nobody looks at the values of cu_seqlens, as that would wait for the device; so the kernels must."""
    case = RAGGED.of(decays=decays, packed=(20, 0, 9), heads=(1, 2, 2), initial=False)
    rest = 40
    q, k, v, decay = (
        torch.cat([x.detach(), torch.randn(1, rest, *x.shape[2:])], 1).requires_grad_() if x.ndim > 1 else x
        for x in inputs(case).values()
    )
    operator = torch.ops.fulmen.linear_attention  # the public function does look, for tensors on a CPU
    output, _ = operator(
        q, k, v, decay, None, case.factor, None, torch.tensor(case.bounds), schedule, False, "triton"
    )  # fmt: skip
    gradients = torch.autograd.grad(output, [q, k, v, decay], torch.randn_like(output))
    for result in (output, *gradients):
        if result.ndim > 1:
            assert not result[:, -rest:].any()
            assert result[:, :-rest].any()


@pytest.mark.parametrize("decays", ["none", "token", "channel+value"])
def test_memory_outside_of_the_tokens_is_never_read(decays):
    """The tensors are views into larger ones full of NaN, and the last chunk is incomplete."""
    case = RAGGED.of(decays=decays, batch=1)
    leaves = {
        name: amid_nan(x.detach()).requires_grad_() if x.ndim == 4 and name != "initial_state" else x
        for name, x in inputs(case).items()
    }
    output, state = fulmen.linear_attention(**leaves, scale=case.scale, return_state=True, backend="triton")
    assert_close(differentiate(case, leaves, output, state), exact(case))


def amid_nan(x):
    batch, length, heads, size = x.shape
    around = torch.full((batch, length + 64, heads + 1, size + 7), torch.nan, dtype=x.dtype)
    inside = around[:, :length, :heads, :size]
    inside.copy_(x)
    return inside


@pytest.mark.parametrize("decays", ["head", "token", "channel"])
def test_the_final_state_at_130_tokens(decays):
    case = Case(decays=decays, length=130, batch=1, heads=(1, 1, 1))
    results = run(case, backend="triton")
    assert_close({"state": results["state"]}, {"state": exact(case)["state"]})


def test_float16_states_and_scores_beyond_its_range():
    """Without decay a state grows; 65504 is the end of float16, but not of what is computed from it."""
    q, k, v = (torch.full((1, 80, 1, 16), value, dtype=torch.float16) for value in (0.01, 40.0, 40.0))
    output, state = fulmen.linear_attention(q, k, v, scale=1e-3, return_state=True, backend="triton")
    expected = fulmen.linear_attention(*(x.double() for x in (q, k, v)), scale=1e-3, return_state=True)
    assert state.max() > 1.5 * 65504
    assert relative_error(output, expected[0]) <= TOLERANCE[torch.float16]
    assert relative_error(state, expected[1]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("values", ["forget", "mixed"])
@pytest.mark.parametrize("decays", ["token", "channel", "none+value"])
def test_extreme_decays(decays, values):
    case = RAGGED.of(decays=decays, values=values, batch=1)
    assert_close(run(case, backend="triton"), exact(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_chunk_that_decays_too_much_for_one_product(dtype):
    """Its pairs are found by other kernels than those of the chunks around it."""
    case = RAGGED.of(decays="channel", dtype=dtype, length=160, batch=1, heads=(1, 1, 1))
    log_decay = inputs(case)["log_decay"].detach() / 8
    log_decay[:, 70:75, :, 3] = -40.0
    results, expected = results_and_exact(case, log_decay)
    for name, got in results.items():
        if dtype == torch.bfloat16:
            bounds = {"state": STATE.norm, "dinitial_state": STATE.norm, "dlog_decay": DECAY_GRADIENT_NORM}
            error = (got.double() - expected[name]).norm() / expected[name].norm()
            assert error <= bounds.get(name, LARGE.norm), name
        else:
            assert relative_error(got, expected[name]) <= TOLERANCE[dtype], name


def test_a_decay_gradient_does_not_collect_the_errors_of_all_tokens():
    """Those of pairs within a chunk are not carried to the next one: the gradient would be off by 9e-5."""
    case = Case(
        decays="channel", dtype=torch.bfloat16, length=416, key_size=16, value_size=16, batch=1, heads=(1, 1, 1)
    )
    log_decay = -torch.rand(inputs(case)["log_decay"].shape, generator=torch.Generator().manual_seed(0)) * 0.8
    results, expected = (found["dlog_decay"].double() for found in results_and_exact(case, log_decay))
    assert (results - expected).norm() <= DECAY_GRADIENT_NORM / 2 * expected.norm()


def results_and_exact(case, log_decay):
    """Of the case's other inputs."""

    def results(backend, dtype=None):
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
        outputs = fulmen.linear_attention(**leaves, scale=case.scale, return_state=True, backend=backend)
        return differentiate(case, leaves, *outputs)

    given = inputs(case) | {"log_decay": log_decay}
    return results("triton"), results("reference", torch.float64)


@pytest.mark.parametrize(("decays", "name"), [("channel", "log_decay"), ("none+value", "log_decay_v")])
def test_a_forgotten_state_has_no_gradient(decays, name):
    """Where a decay is -inf, its gradient is exactly 0."""
    case = RAGGED.of(decays=decays, values="forget", batch=1)
    gradient = run(case, backend="triton")[f"d{name}"]
    forgotten = inputs(case)[name].isinf()
    assert forgotten.any()
    assert not gradient[forgotten].any()


@pytest.mark.parametrize("decays", ["token", "channel", "channel+value"])
def test_the_first_decay_of_an_empty_state_has_no_gradient(decays):
    """Nothing is there to decay, so the gradient is exactly 0, and not what is left of a difference."""
    results = run(RAGGED.of(decays=decays, batch=1, initial=False), backend="triton")
    for name in {"dlog_decay", "dlog_decay_v"} & set(results):
        assert not results[name][:, 0].any()
        assert results[name][:, 1].any()


@pytest.mark.skipif(not interpreted(), reason="it is about the interpreter")
def test_bfloat16_in_the_interpreter_rounds_as_torch_does():
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, result, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(result + i, tl.load(x + i) + tl.load(y + i))

    x, y = (torch.randn(64, generator=torch.Generator().manual_seed(i), device="cpu").bfloat16() for i in range(2))
    result = torch.empty_like(x)
    add[(1,)](x, y, result, 64)
    assert torch.equal(result, x + y)
