"""RMSNorm against its formula in float64: on the CPU core, and what the core does not take."""

import pytest
import torch
from torch.profiler import profile

from fulmen.nn import RMSNorm
from fulmen.nn.native_norm import takes
from fulmen.runtime import core
from fulmen.runtime.recording import recording

native = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
FORMS = {
    "plain": {},
    "silu": {"gate": "silu"},
    "sigmoid": {"gate": "sigmoid"},
    "silu first": {"gate": "silu", "gate_first": True},
    "groups": {"gate": "silu", "gate_first": True, "groups": 3},
}
DTYPES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the scale


def made(form, size, dtype, weight_dtype=None):
    torch.manual_seed(0)
    norm = RMSNorm(size, **FORMS[form])
    torch.nn.init.normal_(norm.weight)
    return norm.to(weight_dtype or dtype)


def inputs(form, *shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
    return numbers[: 1 if form == "plain" else 2]


def views(form, dtype):
    """``[4, 5, 33]``, not dense, and beside what is NaN."""
    wide = (torch.full((5, 4, 70), torch.nan, dtype=dtype) for _ in range(2))
    given = inputs(form, 4, 5, 33, dtype=dtype)
    return [room[..., 20:53].transpose(0, 1).copy_(x) for room, x in zip(wide, given, strict=False)]


def expected(norm, x, gate=None):
    """By the definition, in float64 and with autograd's gradients."""
    weight = norm.weight.double()
    x, gate = x.double(), None if gate is None else gate.double()
    factor = 1.0 if gate is None else gate.sigmoid() * (gate if norm.gate == "silu" else 1.0)
    if norm.gate_first:
        x, factor = x * factor, 1.0
    rows = x.unflatten(-1, (norm.groups, -1))
    return (rows / (rows.square().mean(-1, keepdim=True) + norm.eps).sqrt()).flatten(-2) * weight * factor


def calls(function, *args):
    """The result, and the names of the core's calls that gave it."""
    with recording() as recorded:
        result = function(*args)
    return result, [call.name for call, _ in recorded.calls]


def close(found, wanted, tolerance):
    assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize(
    "shape", [(33,), (1, 1, 48), (2, 3, 33), (2, 3, 4, 9), (700, 129), (3, 4116), (2, 0, 33), (2, 3, 2, 2, 33)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients(form, dtype, shape):
    norm, given = made(form, shape[-1], dtype), inputs(form, *shape, dtype=dtype)
    with torch.no_grad():
        found = norm(*given)
        assert torch.equal(norm(*given), found)
    assert found.dtype == dtype
    differentiated = [x.requires_grad_() for x in given] + [norm.weight]
    y = norm(*given)
    wanted = expected(norm, *given)
    grads = torch.autograd.grad(y.double().cos().sum(), differentiated)
    wanted_grads = torch.autograd.grad(wanted.cos().sum(), differentiated)
    if y.numel():
        for result in (found, y):
            close(result, wanted, DTYPES[dtype])
        for grad, of in zip(grads, wanted_grads, strict=True):
            close(grad, of.double(), 10 * DTYPES[dtype])


@native
@pytest.mark.parametrize("dtype", core.DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_core_takes_any_strides_in_one_call(form, dtype):
    """Rows of what is NaN beside them, as projections leave them."""
    norm, given = made(form, 33, dtype), views(form, dtype)
    with torch.no_grad():
        found, made_calls = calls(norm, *given)
        assert made_calls == ["rms_norm_call"]
        close(found, expected(norm, *given), DTYPES[dtype])
        assert torch.equal(norm(*(x.contiguous() for x in given)), found)


@native
@pytest.mark.parametrize("dtype", core.DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_any_strides_are_one_call_each(form, dtype):
    """Rows of what is NaN beside them; and a gradient that is one number."""
    norm, given = made(form, 33, dtype), [x.requires_grad_() for x in views(form, dtype)]
    leaves = [*given, norm.weight]
    (apart,) = inputs("plain", 5, 4, 33, dtype=dtype, seed=2)
    for dy in (apart.transpose(0, 1), torch.tensor(0.5, dtype=dtype).expand(4, 5, 33)):
        found, made_calls = calls(lambda dy=dy: torch.autograd.grad(norm(*given), leaves, dy))
        assert made_calls == ["rms_norm_call", "rms_norm_backward_call"]
        wanted = torch.autograd.grad(expected(norm, *given), leaves, dy.double())
        for grad, of, leaf in zip(found, wanted, leaves, strict=True):
            assert grad.dtype == leaf.dtype
            close(grad, of.double(), 10 * DTYPES[dtype])


@native
@pytest.mark.parametrize("form", FORMS)
def test_frozen_weights_get_no_gradient(form):
    norm, given = made(form, 33, torch.float32).requires_grad_(False), inputs(form, 4, 33)
    leaves = [x.requires_grad_() for x in given]
    found = torch.autograd.grad(norm(*given).sum(), leaves)
    norm.requires_grad_()
    assert all(map(torch.equal, found, torch.autograd.grad(norm(*given).sum(), leaves)))


@native
def test_a_weight_of_float32_and_inputs_of_16_bits():
    norm, given = made("silu", 40, torch.float32), inputs("silu", 2, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        found, made_calls = calls(norm, *given)
    assert (found.dtype, made_calls) == (torch.bfloat16, ["rms_norm_call"])
    wanted = expected(norm, *given)
    close(found, wanted.detach(), DTYPES[torch.bfloat16])
    (dweight,), (of,) = (torch.autograd.grad(y.sum(), norm.weight) for y in (norm(*given), wanted))
    assert dweight.dtype == torch.float32
    close(dweight, of.double(), 1e-6)


@native
def test_bits_do_not_depend_on_threads():
    norm, given, threads = made("silu", 64, torch.float32), inputs("silu", 2000, 64), torch.get_num_threads()
    with torch.no_grad():
        try:
            results = []
            for count in (1, 3):
                torch.set_num_threads(count)
                results.append(norm(*given))
                with torch.enable_grad():
                    leaves = [*(x.requires_grad_() for x in given), norm.weight]
                    results += torch.autograd.grad(norm(*given).cos().sum(), leaves)
        finally:
            torch.set_num_threads(threads)
    assert all(map(torch.equal, results[:4], results[4:]))


@native
def test_what_the_core_does_not_take():
    x = torch.randn(3, 8)
    weight = torch.ones(8)
    assert takes(x, None, weight)
    assert takes(x, x, weight)
    for other in (x.double(), x.to("meta"), torch.randn(8, 3).T, torch.randn(1, 1, 1, 3, 8), x.long(), x[:, :7]):
        assert not takes(other, None, weight)
    for gate in (x[:1], x.bfloat16()):
        assert not takes(x, gate, weight)
    assert not takes(x, None, weight.bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_vmap(form):
    norm, given = made(form, 9, torch.float32), inputs(form, 4, 3, 9)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(norm)(*given), norm(*given))


@native
def test_numbers_that_are_none_stay_in_their_row():
    norm, (x,) = made("plain", 20, torch.float32), inputs("plain", 3, 20)
    x[1, 3] = torch.nan
    with torch.no_grad():
        found = norm(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@native
def test_the_op_is_seen_by_profilers_and_has_a_fake():
    norm, given = made("silu", 16, torch.float32), inputs("silu", 2, 16)
    with torch.no_grad():
        usual = norm(*given)
        with profile() as profiled:
            assert torch.equal(norm(*given), usual)
    assert "fulmen::rms_norm" in {event.name for event in profiled.events()}
    arguments = (*given, norm.weight.detach(), norm.eps, norm.gate, norm.gate_first)
    for rates in (True, False):
        torch.library.opcheck(torch.ops.fulmen.rms_norm.default, (*arguments, rates))
    rate, (dy,) = torch.rand(2, 1), inputs("plain", 2, 16, seed=2)
    for of_weight in (True, False):
        arguments = (dy, *given, norm.weight.detach(), rate, norm.gate, norm.gate_first, of_weight)
        torch.library.opcheck(torch.ops.fulmen.rms_norm_backward.default, arguments)


def test_a_gate_belongs_to_a_gated_norm():
    (x,) = inputs("plain", 2, 8)
    with pytest.raises(ValueError, match="gate must be None here; got Tensor"):
        RMSNorm(8)(x, x)
    with pytest.raises(ValueError, match="gate must be a tensor here; got NoneType"):
        RMSNorm(8, gate="silu")(x)
