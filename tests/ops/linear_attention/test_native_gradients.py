"""Digits that the CPU core must not lose: in gradients of decays, and over a long time of gentle decay."""

import pytest
import torch

import fulmen
from fulmen.lab.fuzz import Problem, Setting
from fulmen.lab.fuzz.trial import exact, results, tensors
from fulmen.lab.operators.linear_attention.cases import Case
from fulmen.lab.tolerances import deviations
from fulmen.runtime import core

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
FORMS = ("head", "token", "channel", "value")


def attend(q, k, v, log_decay, log_decay_v=None, **options):
    """The outputs and the final state."""
    decays = {"log_decay": log_decay, "log_decay_v": log_decay_v}
    return fulmen.linear_attention(q, k, v, **decays, scale=1.0, return_state=True, **options)


def states(k, v, log_decay, log_decay_v=None, **options):
    return fulmen.chunk_states(k, v, log_decay=log_decay, log_decay_v=log_decay_v, **options)


def tokens(length, heads, size, seed=0):
    """q, k and v."""
    torch.manual_seed(seed)
    return torch.randn(3, 1, length, heads, size).unbind()


def constant(form, value, length, heads, size):
    """A constant log-decay in one of its forms, or on the values, as arguments."""
    shape = {"head": (heads,), "token": (1, length, heads)}.get(form, (1, length, heads, size))
    log_decay = torch.full(shape, value)
    return {"log_decay": None, "log_decay_v": log_decay} if form == "value" else {"log_decay": log_decay}


def decay_gradient(run, inputs, decays, cotangents, **options):
    """Of the one decay that there is. ``cotangents`` has one for each result, or None."""
    given = {name: x if x is None else x.clone().requires_grad_() for name, x in decays.items()}
    results = run(*inputs, **given, **options)
    results = [results] if isinstance(results, torch.Tensor) else results
    loss = sum((x * g).sum() for x, g in zip(results, cotangents, strict=True) if g is not None)
    return torch.autograd.grad(loss, [x for x in given.values() if x is not None])[0]


def error(run, inputs, decays, cotangents, **options):
    """Relative to the largest gradient; of a decay per head, the largest of the heads' own relative errors."""

    def exact(x):
        return None if x is None else x.double()

    got = decay_gradient(run, inputs, decays, cotangents, backend="native", **options).double()
    inputs, cotangents = [exact(x) for x in inputs], [exact(x) for x in cotangents]
    decays = {name: exact(x) for name, x in decays.items()}
    want = decay_gradient(run, inputs, decays, cotangents, backend="torch", **options)
    return ((got - want).abs() / (want.abs() if want.ndim == 1 else want.abs().max())).max().item()


@pytest.mark.parametrize("length", [17, 18, 19, 33])
@pytest.mark.parametrize("form", FORMS)
def test_strong_decay_from_the_final_state(form, length):
    """The last chunk has 1 to 3 tokens: what crosses it is a thousandth of what crosses its end."""
    decays = constant(form, -6.0, length, heads=2, size=128)
    cotangents = (None, torch.randn(1, 2, 128, 128))
    assert error(attend, tokens(length, 2, 128), decays, cotangents) <= 1e-5


@pytest.mark.parametrize(("length", "chunk_size"), [(17, 16), (155, 145), (155, 146), (160, 17), (40, 40)])
@pytest.mark.parametrize("form", FORMS)
def test_strong_decay_from_the_ends_of_chunks(form, length, chunk_size):
    _, k, v = tokens(length, 2, 128)
    decays = constant(form, -6.0, length, heads=2, size=128)
    cotangent = torch.randn(1, 2, -(-length // chunk_size) + 1, 128, 128)
    assert error(states, (k, v), decays, (cotangent,), chunk_size=chunk_size) <= 1e-5


@pytest.mark.parametrize("chunk_size", [512, 4096])
def test_chunk_states_for_each_head(chunk_size):
    """An error relative to the largest head would hide those of small ones."""
    _, k, v = tokens(4096, 16, 32)
    cotangent = torch.randn(1, 16, 4096 // chunk_size + 1, 32, 32)
    assert error(states, (k, v), {"log_decay": -torch.rand(16)}, (cotangent,), chunk_size=chunk_size) <= 1e-4


@pytest.mark.parametrize("through", ["output", "state"])
def test_attention_for_each_head(through):
    inputs = tokens(4096, 16, 32)
    cotangents = (torch.randn(1, 4096, 16, 32), None) if through == "output" else (None, torch.randn(1, 16, 32, 32))
    assert error(attend, inputs, {"log_decay": -torch.rand(16)}, cotangents) <= 1e-4


def test_a_head_whose_terms_cancel():
    """From 8741 to 10.9: an error that every token of eight chunks shares would be too much of it."""
    problem = Problem("linear_attention", Case(length=200, key_size=128, value_size=128, dtype=torch.bfloat16))
    got = results(problem, tensors(problem), Setting("native"))
    assert not deviations(got, {"dlog_decay": exact(problem)["dlog_decay"]}, "native")


@pytest.mark.parametrize("form", FORMS)
def test_gentle_decay_does_not_drift(form):
    """e^-1.6e-5, what a chunk decays, is known to 3e-8 in float32; the same error 8192 times over would be 1e-4."""
    inputs = tokens(131072, 1, 8)
    decays = constant(form, -1e-6, 131072, heads=1, size=8)
    exact = {name: x if x is None else x.double() for name, x in decays.items()}
    expected = attend(*(x.double() for x in inputs), **exact, backend="torch")
    for got, want in zip(attend(*inputs, **decays, backend="native"), expected, strict=True):
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_equal_tokens_do_not_drift(form):
    """Every sum with the state is rounded the same way for a long time: once for a chunk, and not once for a token."""
    inputs = [x.expand(1, 8192, 1, 64) for x in tokens(1, 1, 64)]
    decays = constant(form, -1e-5, 8192, heads=1, size=64)
    exact = {name: x if x is None else x.double() for name, x in decays.items()}
    expected = attend(*(x.double() for x in inputs), **exact, backend="torch")
    for got, want in zip(attend(*inputs, **decays, backend="native"), expected, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.one_build  # it tries all
@pytest.mark.parametrize("isa", core.core.builds if core.core else [])
@pytest.mark.parametrize("decays", ["head", "token", "channel"])
def test_states_of_bfloat16_have_a_decay_gradient_in_float32(isa, decays):
    """Of short chunks, most of it is about the state that entered, which the forward may have of rounded products."""
    problem = Problem("chunk_states", Case(length=35, key_size=21, value_size=33, decays=decays, dtype=torch.bfloat16))
    with core.core.using(isa):
        got = results(problem, tensors(problem), Setting("native"))
        of_floats = results(problem, in_floats(tensors(problem)), Setting("native"))
        assert core.core.multiplies_pairs != torch.equal(got["states"], of_floats["states"])
    assert not deviations(got, {"dlog_decay": exact(problem)["dlog_decay"]}, "native")


def in_floats(given):
    return {name: x.float() for name, x in given.items()}
