"""Every backend against the float64 recurrence: output, final state and all gradients."""

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
    tensors,
)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 130, 257])
@pytest.mark.parametrize("decays", DECAYS)
def test_lengths(backend, decays, length):
    case = Case(decays=decays, length=length)
    assert_close(run(case, backend=backend), exact(case))


@pytest.mark.parametrize(
    ("key_size", "value_size"), [(7, 7), (60, 33), (96, 33), (33, 96), (1, 5), (128, 1), (64, 128)]
)
@pytest.mark.parametrize("decays", DECAYS)
def test_sizes(backend, decays, key_size, value_size):
    case = Case(decays=decays, length=70, key_size=key_size, value_size=value_size, scale=key_size**-0.5)
    assert_close(run(case, backend=backend), exact(case))


@pytest.mark.parametrize("values", ["zero", "tiny", "strong", "mixed", "forget"])
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_extreme_decays(backend, decays, values):
    case = Case(decays=decays, values=values, length=130)
    assert_close(run(case, backend=backend), exact(case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_dtypes(backend, decays, dtype):
    case = Case(decays=decays, dtype=dtype, length=130, scale=0.3)
    assert_close(run(case, backend=backend), exact(case))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_schedules(backend, decays, schedule):
    case = Case(decays=decays, length=199)
    assert_close(run(case, backend=backend, schedule=schedule), exact(case))


@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 1, 1), (2, 2, 4), (4, 2, 1), (6, 3, 2)])
@pytest.mark.parametrize("decays", DECAYS)
def test_shared_heads(backend, decays, heads):
    case = Case(decays=decays, heads=heads)
    assert_close(run(case, backend=backend), exact(case))


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("packed", [(5,), (64, 1, 130), (0, 70, 0, 0, 3, 0), (0, 0)])
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_packed_sequences(backend, decays, packed, initial):
    case = Case(decays=decays, packed=packed, initial=initial, heads=(1, 2, 2))
    assert_close(run(case, backend=backend), exact(case))


@pytest.mark.parametrize("decay_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_decay_of_another_dtype(backend, decay_dtype):
    case = Case(decays="channel+value", decay_dtype=decay_dtype, dtype=torch.bfloat16)
    results = run(case, backend=backend)
    assert results["dlog_decay"].dtype == results["dlog_decay_v"].dtype == decay_dtype
    # The arithmetic is float32 even where the decay and its gradient are not.
    for name in ("dlog_decay", "dlog_decay_v"):
        tolerance = max(TOLERANCE[decay_dtype], TOLERANCE[torch.float32])
        assert relative_error(results.pop(name), exact(case)[name]) <= tolerance
    assert_close(results, {name: exact(case)[name] for name in results})


@pytest.mark.parametrize("decays", DECAYS)
def test_no_tokens_and_no_samples(backend, decays):
    for case in (
        Case(decays=decays, length=0, key_size=7, value_size=5),
        Case(decays=decays, batch=0),
        Case(decays=decays, length=0, initial=False),
    ):
        assert_close(run(case, backend=backend), exact(case))


@pytest.mark.parametrize("which", ["output", "state"])
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_gradients_of_one_result_alone(backend, decays, which):
    """Whoever uses only one of the two results gets its gradient, not an error and not the other's."""
    case = Case(decays=decays)
    leaves = inputs(case)
    output, state = fulmen.linear_attention(**leaves, return_state=True, backend=backend)
    result, cotangent = (output, "grad_output") if which == "output" else (state, "grad_state")
    result.backward(tensors(case)[cotangent])

    other = "grad_state" if which == "output" else "grad_output"
    got = {f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    assert_close(got, {name: x for name, x in exact(case, without=other).items() if name in got})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_constant_decay_does_not_cancel(backend, dtype):
    """Under strong decay the terms of q·dq and k·dk are a thousand times larger than what is left of them."""
    length = 300 if backend == "reference" else 4096
    case = Case(decays="head", batch=1, heads=(1, 1, 1), length=length, dtype=dtype, initial=False)

    def gradient(dtype, name):
        leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in inputs(case).items()}
        leaves["log_decay"] = torch.tensor([-3.0], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        leaves["log_decay"].requires_grad_()
        output, state = fulmen.linear_attention(**leaves, return_state=True, backend=name)
        return differentiate(case, leaves, output, state)["dlog_decay"].item()

    want = gradient(torch.float64, "torch")
    assert abs(gradient(dtype, backend) - want) <= 1e-5 * abs(want)


def test_gentle_decay_over_a_long_time(backend):
    """e^-1e-5 is known to 6e-8 in float32; multiplied thousands of times, that becomes visible."""
    limit = 1e-4 if backend == "reference" else TOLERANCE[torch.float32]  # which multiplies token by token, and drifts
    torch.manual_seed(0)
    q, k, v = (torch.rand(1, 8192, 1, 8) for _ in range(3))
    for decay in (torch.full((1,), -1e-5), torch.full((1, 8192, 1), -1e-5), torch.full((1, 8192, 1, 8), -1e-5)):
        want = fulmen.linear_attention(*(x.double() for x in (q, k, v)), log_decay=decay.double(), backend="torch")
        got = fulmen.linear_attention(q, k, v, log_decay=decay, backend=backend)
        assert relative_error(got, want) <= limit
