"""Checks that several operators have, by themselves: whole messages, and sizes and strides at the edges."""

import re

import pytest
import torch

from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.chunks.validation import (
    SCHEDULES,
    check_decay,
    check_in_place,
    check_key_size,
    check_state,
    check_updatable,
    refuse_gradients,
)

LIKE = torch.randn(2, 6, 3, 8)
TOKEN = LIKE[:, 0]
KEY_FORMS = (DecayForm.HEAD, DecayForm.TOKEN, DecayForm.CHANNEL)


def strided(shape, strides, dtype=torch.float32):
    return torch.zeros(1000, dtype=dtype).as_strided(shape, strides)


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def test_schedules():
    assert SCHEDULES == ("auto", "recurrent", "loop", "parallel", "recompute")


def test_keys_of_another_size():
    check_key_size(LIKE, LIKE[:, :, :1])
    with refused(ValueError, "k must have the last dimension of q, 8; got shape [2, 6, 3, 7]"):
        check_key_size(LIKE, LIKE[..., 1:])


@pytest.mark.parametrize("shape", [(4,), (2, 6, 4), (2, 6, 4, 8)])
def test_a_decay_of_every_form(shape):
    check_decay("log_decay", torch.zeros(shape), LIKE, 4, KEY_FORMS)
    wanted = "log_decay must have shape [H] = [4] or [B, N, H] = [2, 6, 4] or [B, N, H, D] = [2, 6, 4, 8]; got "
    for axis in range(len(shape)):
        other = [*shape[:axis], 5, *shape[axis + 1 :]]
        with refused(ValueError, wanted + str(other)):
            check_decay("log_decay", torch.zeros(other), LIKE, 4, KEY_FORMS)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 4, 8)])
def test_a_decay_of_a_step(shape):
    check_decay("log_decay", torch.zeros(shape), TOKEN, 4, KEY_FORMS)
    wanted = "log_decay must have shape [H] = [4] or [B, H] = [2, 4] or [B, H, D] = [2, 4, 8]; got "
    with refused(ValueError, wanted + str([*shape, 1])):
        check_decay("log_decay", torch.zeros(*shape, 1), TOKEN, 4, KEY_FORMS)


def test_a_decay_of_values():
    check_decay("log_decay_v", None, LIKE, 3, (DecayForm.CHANNEL,), "E")
    with refused(ValueError, "log_decay_v must have shape [B, N, H, E] = [2, 6, 3, 8]; got [3]"):
        check_decay("log_decay_v", torch.zeros(3), LIKE, 3, (DecayForm.CHANNEL,), "E")


def test_what_is_no_decay_and_no_state():
    """Nor on another device, nor of integers."""
    wanted = "must be float32, bfloat16, float16 or float64; got torch.int32"
    with refused(TypeError, f"log_decay {wanted}"):
        check_decay("log_decay", torch.zeros(3).int(), LIKE, 3, KEY_FORMS)
    with pytest.raises(TypeError, match=r"^log_decay must be a torch\.Tensor"):
        check_decay("log_decay", [0.0] * 3, LIKE, 3, KEY_FORMS)
    with refused(TypeError, f"initial_state {wanted}"):
        check_state("initial_state", torch.zeros(2, 3).int(), "[B, H]", (2, 3), LIKE)
    with pytest.raises(ValueError, match=r"^initial_state must be on the device of .*; got meta$"):
        check_state("initial_state", torch.zeros(2, 3, device="meta"), "[B, H]", (2, 3), LIKE)
    with refused(ValueError, "initial_state must have shape [B, H] = [2, 3]; got [2, 4]"):
        check_state("initial_state", torch.zeros(2, 4), "[B, H]", (2, 3), LIKE)


def test_a_state_that_is_updated_has_the_digits_of_its_inputs():
    state, double = torch.zeros(2, 3, 8, 5), torch.zeros(2, 3, 8, 5).double()
    check_in_place(state, TOKEN)
    check_in_place(double, TOKEN.double())
    wanted = "state must be float32, bfloat16 or float16 for torch.float32 inputs; got torch.float64"
    with refused(TypeError, wanted):
        check_in_place(double, TOKEN)
    with refused(TypeError, "state must be float64 for torch.float64 inputs; got torch.float32"):
        check_in_place(state, TOKEN.double())


@pytest.mark.parametrize(
    ("shape", "strides", "shared"),
    [
        ((2, 3, 4), (12, 4, 1), False),
        ((2, 3, 4), (12, 3, 1), True),
        ((2, 3, 4), (11, 4, 1), True),
        ((2, 3, 4), (21, 7, 2), False),
        ((2, 3, 4), (21, 6, 2), True),
        ((2, 3, 4), (1, 2, 6), False),
        ((2, 3, 4), (1, 2, 5), True),
        ((2, 3, 4), (1, 1, 6), True),
        ((2, 3, 4), (0, 4, 1), True),
        ((1, 3, 4), (0, 4, 1), False),
        ((2, 1, 4), (4, 2, 1), False),
    ],
)
def test_every_element_of_a_state_has_its_own_place(shape, strides, shared):
    """Of axes of one element the stride does not matter."""
    places = [sum(i * n for i, n in zip(at, strides, strict=True)) for at in torch.ones(shape).nonzero().tolist()]
    assert shared == (len(set(places)) < len(places))
    state = strided(shape, strides)
    if not shared:
        check_in_place(state, TOKEN)
        return
    wanted = "state must have memory of its own for each element, to be updated in place; got shape "
    with refused(ValueError, f"{wanted}{list(shape)} with strides {list(strides)}"):
        check_in_place(state, TOKEN)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3, 8, 5), (120, 40, 5, 1), True),
        ((2, 3, 8, 5), (120, 40, 1, 8), True),
        ((2, 3, 8, 5), (240, 80, 10, 2), False),
        ((2, 3, 8, 5), (1, 2, 6, 48), False),
        ((2, 3, 1, 5), (30, 10, 7, 2), True),
        ((2, 3, 8, 1), (48, 16, 2, 7), True),
        ((2, 3, 2, 2), (24, 8, 4, 2), False),
        ((1, 1, 8, 5), (1, 1, 10, 2), False),
    ],
)
def test_a_state_is_dense_along_keys_or_values(shape, strides, dense):
    state = strided(shape, strides)
    if dense:
        check_updatable(state, TOKEN)
        return
    with refused(ValueError, f"state must be dense (stride 1) along D or along E; got strides {list(strides)}"):
        check_updatable(state, TOKEN)


def test_a_negated_view():
    state = torch._neg_view(torch.zeros(2, 3, 8, 5))
    check_in_place(state.resolve_neg(), TOKEN)
    with refused(ValueError, "state must not be a lazily negated view; pass state.resolve_neg()"):
        check_in_place(state, TOKEN)


def test_gradients_are_refused_where_they_would_be_recorded():
    x = torch.zeros(1, requires_grad=True)
    wanted = (
        "k must not require grad: a_step updates the state in place and has no gradient; call it under "
        "torch.no_grad(), or use a_sequence to train"
    )
    refuse_gradients("a_step", "a_sequence", {"q": x.detach(), "k": None})
    with refused(ValueError, wanted):
        refuse_gradients("a_step", "a_sequence", {"q": x.detach(), "v": None, "k": x})
    with torch.no_grad():
        refuse_gradients("a_step", "a_sequence", {"k": x})
