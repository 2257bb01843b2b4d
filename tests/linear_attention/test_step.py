"""Decoding token by token."""

import pytest
import torch

import fulmen
from cases import BACKENDS, TOLERANCE, Case, exact, relative_error, tensors

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

FORMS = ("none", "head", "token", "key", "key+value", "value", "head+value")


def tokens_of(case):
    """Each token's arguments for the step."""
    given = tensors(case)
    for t in range(case.length):
        yield {
            name: given[name] if given[name].ndim == 1 else given[name][:, t]
            for name in ("q", "k", "v", "decay", "decay_v")
            if name in given
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2, 2), (1, 1, 4), (4, 2, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_steps_equal_the_whole(backend, form, heads, dtype):
    case = Case(form=form, heads=heads, length=9, key_dim=60, value_dim=33, scale=0.4, dtype=dtype)
    state = tensors(case)["initial_state"].clone()
    for t, token in enumerate(tokens_of(case)):
        output = fulmen.linear_attention_step(**token, state=state, scale=case.scale, backend=backend)
        assert output.dtype == dtype
        assert relative_error(output, exact(case)["output"][:, t]) <= 2 * TOLERANCE[dtype]
    assert relative_error(state, exact(case)["state"]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("form", FORMS)
def test_a_transposed_state_is_updated_where_it_is(backend, form):
    case = Case(form=form, length=3, key_dim=20, value_dim=36)
    cache = torch.full((2, 3, 2, 36, 20), torch.nan)  # [layers, B + 1, H, E, D]: the state is a part of it
    state = cache[1, :2].transpose(-1, -2)
    state.copy_(tensors(case)["initial_state"])
    for token in tokens_of(case):
        fulmen.linear_attention_step(**token, state=state, backend=backend)
    assert relative_error(cache[1, :2].transpose(-1, -2), exact(case)["state"]) <= TOLERANCE[torch.float32]
    assert cache[0].isnan().all()
    assert cache[1, 2].isnan().all()


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 8), (8, 1), (1, 1)])
def test_the_stride_of_a_single_row_or_column_is_free(backend, key_dim, value_dim):
    case = Case(form="key+value", length=3, key_dim=key_dim, value_dim=value_dim)
    memory = torch.full((2, 2, 2 * key_dim, 2 * value_dim), torch.nan)
    state = memory[:, :, ::2, ::2]
    state.copy_(tensors(case)["initial_state"])
    for token in tokens_of(case):
        fulmen.linear_attention_step(**token, state=state, backend=backend)
    assert relative_error(state, exact(case)["state"]) <= TOLERANCE[torch.float32]
    assert memory.isnan().sum() == memory.numel() - state.numel()


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_decay_of_another_dtype(backend, form):
    case = Case(form=form, length=4)
    states = [tensors(case)["initial_state"].clone() for _ in range(2)]
    for token in tokens_of(case):
        wide = {name: x.double() if name.startswith("decay") else x for name, x in token.items()}
        outputs = [
            fulmen.linear_attention_step(**args, state=state, backend=backend)
            for args, state in zip((token, wide), states, strict=True)
        ]
        assert torch.equal(*outputs)
    assert torch.equal(*states)


def test_forgetting_is_exact(backend):
    q, k, v, state = torch.randn(1, 1, 4), torch.randn(1, 1, 4), torch.randn(1, 1, 3), torch.randn(1, 1, 4, 3)
    fulmen.linear_attention_step(q, k, v, state, decay=torch.tensor([-torch.inf]), backend=backend)
    assert torch.equal(state[0, 0], torch.outer(k[0, 0], v[0, 0]))


def test_views_of_q_k_and_v(backend):
    case = Case(form="key", length=1)
    fused = torch.cat([tensors(case)[name][:, 0] for name in ("q", "k", "v", "decay")], -1)
    q, k, v, decay = fused.split(16, dim=-1)
    states = [tensors(case)["initial_state"].clone() for _ in range(2)]
    output = fulmen.linear_attention_step(q, k, v, states[0], decay=decay, backend=backend)
    dense = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(
        output, fulmen.linear_attention_step(*dense, states[1], decay=decay.contiguous(), backend=backend)
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
