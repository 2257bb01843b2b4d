"""The specification itself: against the sum it abbreviates, and against finite differences."""

import pytest
import torch

import fulmen
from cases import ALL_FORMS, Case, exact, inputs, relative_error, run, tensors


@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_recurrence_is_the_weighted_sum_over_earlier_tokens(form):
    """o_i = scale · Σ_{j≤i} q_i·(Π_{j<t≤i} e^{a_t} ⊙ k_j) (Π e^{c_t} ⊙ v_j), written out with three loops."""
    case = Case(form=form, batch=1, heads=(1, 1, 1), length=5, key_dim=3, value_dim=2, dtype=torch.float64, scale=0.6)
    given = {name: x[0] if name == "initial_state" else x for name, x in tensors(case).items()}
    q, k, v = (given[name][0, :, 0] for name in "qkv")
    decay, decay_v = given.get("decay"), given.get("decay_v")
    for i in range(case.length):
        total = torch.zeros(2, dtype=torch.float64)
        for j in range(-1, i + 1):
            weight_k, weight_v = torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
            for t in range(j + 1, i + 1):
                if decay is not None:
                    weight_k = weight_k * (decay[0] if decay.ndim == 1 else decay[0, t, 0]).exp()
                if decay_v is not None:
                    weight_v = weight_v * decay_v[0, t, 0].exp()
            state = given["initial_state"][0] if j < 0 else torch.outer(k[j], v[j])
            total += case.scale * (q[i] * weight_k) @ (state * weight_v)
        assert relative_error(exact(case)["output"][0, i, 0], total) < 1e-14


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_gradcheck(backend, form):
    case = Case(form=form, batch=1, heads=(1, 2, 1), length=5, key_dim=3, value_dim=2, dtype=torch.float64, scale=0.6)
    leaves = inputs(case)

    def call(*values):
        named = dict(zip(leaves, values, strict=True))
        return fulmen.linear_attention(**named, scale=case.scale, return_state=True, backend=backend)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_gradcheck_of_chunk_states(backend, form):
    case = Case(form=form, batch=1, heads=(1, 1, 2), length=5, key_dim=3, value_dim=2, dtype=torch.float64)
    leaves = inputs(case)
    del leaves["q"]

    def call(*values):
        return fulmen.chunk_states(**dict(zip(leaves, values, strict=True)), chunk_size=2, backend=backend)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("form", ALL_FORMS)
def test_a_sample_does_not_depend_on_the_batch_around_it(form):
    case = Case(form=form, batch=3, length=20)
    whole = run(case, backend="reference")
    given = tensors(case)
    alone = fulmen.linear_attention(
        *(given[name][1:2] for name in "qkv"),
        **{
            name: given[name] if given[name].ndim == 1 else given[name][1:2]
            for name in ("decay", "decay_v", "initial_state")
            if name in given
        },
        backend="reference",
    )
    assert torch.equal(alone, whole["output"][1:2])
