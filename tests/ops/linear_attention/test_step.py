"""Decoding token by token."""

import pytest
import torch

import fulmen
from cases import BACKENDS, TOLERANCE, Case, exact, relative_error, tensors

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

DECAYS = ("none", "head", "token", "channel", "channel+value", "none+value", "head+value")


def tokens_of(case):
    """Each token's arguments for the step."""
    given = tensors(case)
    for t in range(case.length):
        yield {
            name: given[name] if given[name].ndim == 1 else given[name][:, t]
            for name in ("q", "k", "v", "log_decay", "log_decay_v")
            if name in given
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2, 2), (1, 1, 4), (4, 2, 1)])
@pytest.mark.parametrize("decays", DECAYS)
def test_steps_equal_the_whole(backend, decays, heads, dtype):
    case = Case(decays=decays, heads=heads, length=9, key_size=60, value_size=33, scale=0.4, dtype=dtype)
    state = tensors(case)["initial_state"].clone()
    for t, token in enumerate(tokens_of(case)):
        output = fulmen.linear_attention_step(**token, state=state, scale=case.scale, backend=backend)
        assert output.dtype == dtype
        assert relative_error(output, exact(case)["output"][:, t]) <= 2 * TOLERANCE[dtype]
    assert relative_error(state, exact(case)["state"]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("decays", DECAYS)
def test_a_transposed_state_is_updated_where_it_is(backend, decays):
    case = Case(decays=decays, length=3, key_size=20, value_size=36)
    cache = torch.full((2, 3, 2, 36, 20), torch.nan)  # [layers, B + 1, H, E, D]: the state is a part of it
    state = cache[1, :2].transpose(-1, -2)
    state.copy_(tensors(case)["initial_state"])
    for token in tokens_of(case):
        fulmen.linear_attention_step(**token, state=state, backend=backend)
    assert relative_error(cache[1, :2].transpose(-1, -2), exact(case)["state"]) <= TOLERANCE[torch.float32]
    assert cache[0].isnan().all()
    assert cache[1, 2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("key_size", "value_size"), [(20, 36), (1, 7), (33, 1)])
@pytest.mark.parametrize("decays", DECAYS)
def test_a_state_of_16_bits_is_rounded_once(backend, decays, key_size, value_size, transposed, dtype):
    """Computed in float32 from the state as it was, then rounded to the nearest."""
    case = Case(decays=decays, length=1, key_size=key_size, value_size=value_size)
    cache = tensors(case)["initial_state"].to(dtype)
    state = cache.mT.contiguous().mT if transposed else cache.clone()
    single, token = state.float(), next(tokens_of(case))
    output = fulmen.linear_attention_step(**token, state=state, backend=backend)
    assert torch.equal(output, fulmen.linear_attention_step(**token, state=single, backend=backend))
    assert torch.equal(state, single.to(dtype))


def test_a_state_that_was_saved_for_a_backward_is_missed_there(backend):
    case = Case(length=1)
    state, weight = tensors(case)["initial_state"].clone(), torch.ones(2, 2, 16, 16, requires_grad=True)
    loss = (weight * state).sum()
    fulmen.linear_attention_step(**next(tokens_of(case)), state=state, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_made_in_inference_mode(backend):
    with torch.inference_mode():
        state = torch.zeros(2, 2, 16, 16)
        fulmen.linear_attention_step(**next(tokens_of(Case(length=1))), state=state, backend=backend)
        assert state.any()


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 8), (8, 1), (1, 1)])
def test_the_stride_of_a_single_row_or_column_is_free(backend, key_size, value_size):
    case = Case(decays="channel+value", length=3, key_size=key_size, value_size=value_size)
    memory = torch.full((2, 2, 2 * key_size, 2 * value_size), torch.nan)
    state = memory[:, :, ::2, ::2]
    state.copy_(tensors(case)["initial_state"])
    for token in tokens_of(case):
        fulmen.linear_attention_step(**token, state=state, backend=backend)
    assert relative_error(state, exact(case)["state"]) <= TOLERANCE[torch.float32]
    assert memory.isnan().sum() == memory.numel() - state.numel()


@pytest.mark.parametrize("decays", DECAYS[1:])
def test_a_decay_of_another_dtype(backend, decays):
    case = Case(decays=decays, length=4)
    states = [tensors(case)["initial_state"].clone() for _ in range(2)]
    for token in tokens_of(case):
        wide = {name: x.double() if name.startswith("log_decay") else x for name, x in token.items()}
        outputs = [
            fulmen.linear_attention_step(**args, state=state, backend=backend)
            for args, state in zip((token, wide), states, strict=True)
        ]
        assert torch.equal(*outputs)
    assert torch.equal(*states)


def test_forgetting_is_exact(backend):
    q, k, v, state = torch.randn(1, 1, 4), torch.randn(1, 1, 4), torch.randn(1, 1, 3), torch.randn(1, 1, 4, 3)
    fulmen.linear_attention_step(q, k, v, state, log_decay=torch.tensor([-torch.inf]), backend=backend)
    assert torch.equal(state[0, 0], torch.outer(k[0, 0], v[0, 0]))


def test_views_of_q_k_and_v(backend):
    case = Case(decays="channel", length=1)
    fused = torch.cat([tensors(case)[name][:, 0] for name in ("q", "k", "v", "log_decay")], -1)
    q, k, v, decay = fused.split(16, dim=-1)
    states = [tensors(case)["initial_state"].clone() for _ in range(2)]
    output = fulmen.linear_attention_step(q, k, v, states[0], log_decay=decay, backend=backend)
    dense = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(
        output, fulmen.linear_attention_step(*dense, states[1], log_decay=decay.contiguous(), backend=backend)
    )
    assert torch.equal(*states)


def test_a_refused_call_leaves_the_state_as_it_was(backend):
    case = Case(length=1)
    token, state = next(tokens_of(case)), tensors(case)["initial_state"].clone()
    with pytest.raises(ValueError, match="v must have the same B"):
        fulmen.linear_attention_step(**token | {"v": token["v"][:1]}, state=state, backend=backend)
    assert torch.equal(state, tensors(case)["initial_state"])


def test_grad_is_refused_unless_it_is_off(backend):
    case = Case(length=1)
    token, state = next(tokens_of(case)), tensors(case)["initial_state"].clone()
    token["k"] = token["k"].clone().requires_grad_()
    with pytest.raises(ValueError, match="k must not require grad"):
        fulmen.linear_attention_step(**token, state=state, backend=backend)
    with torch.no_grad():
        assert not fulmen.linear_attention_step(**token, state=state, backend=backend).requires_grad
