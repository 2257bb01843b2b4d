import pytest
import torch

from cases import ALL_DECAYS
from fulmen.ops.chunks.decay_form import DecayForm, Decays, as_sequence, tokens_of

SIZES = {"batch": 2, "length": 5, "heads": 3, "size": 4}
FORMS = list(DecayForm)


def a_log_decay(form):
    shape = form.shape(**SIZES)
    return None if shape is None else -torch.rand(shape, dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_recognised_by_its_shape(form):
    log_decay = a_log_decay(form)
    assert DecayForm.of(log_decay) is form
    assert DecayForm.of(tokens_of(log_decay, 0), step=True) is form
    if log_decay is not None:
        assert form.heads(log_decay) == 3
        assert len(form.axes()) == log_decay.ndim
        assert len(form.axes(step=True)) == tokens_of(log_decay, 0).ndim


@pytest.mark.parametrize("form", FORMS[1:])
def test_the_gradient_of_a_form_is_that_of_its_spreading(form):
    like = torch.empty(2, 5, 3, 4, dtype=torch.float64)
    log_decay, cotangent = a_log_decay(form).requires_grad_(), torch.randn_like(like)
    spread = form.by_token(log_decay, like).expand_as(like)
    (expected,) = torch.autograd.grad(spread, log_decay, cotangent)
    torch.testing.assert_close(form.reduced(cotangent), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_a_sequence_of_one_token(form):
    log_decay = a_log_decay(form)
    sequence = as_sequence(tokens_of(log_decay, 2))
    if log_decay is None:
        assert sequence is None
    else:
        assert torch.equal(sequence, tokens_of(log_decay, slice(2, 3)))
        assert DecayForm.of(sequence) is form


@pytest.mark.parametrize("name", ALL_DECAYS)
def test_decays_have_a_name(name):
    decays = Decays.named(name)
    assert str(decays) == name
    shapes = decays.shapes(2, 5, 3, 4, 6)
    assert ("log_decay" in shapes) == (decays.key is not DecayForm.NONE)
    assert shapes.get("log_decay_v", (2, 5, 3, 6)) == (2, 5, 3, 6)
    assert decays.channel_axes == sum(len(shape) == 4 for shape in shapes.values())


def test_the_numbers_are_those_of_the_core():
    assert [form.value for form in FORMS] == [0, 1, 2, 3]
