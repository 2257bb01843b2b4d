"""The specification itself: against the sum it abbreviates, and against finite differences."""

import pytest
import torch

import fulmen
from cases import ALL_DECAYS, Case, differentiate, exact, inputs, relative_error, run, tensors


@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_the_recurrence_is_the_weighted_sum_over_earlier_tokens(decays):
    """o_i = scale · Σ_{j≤i} q_i·(Π_{j<t≤i} e^{a_t} ⊙ k_j) (Π e^{c_t} ⊙ v_j), written out with three loops."""
    case = Case(
        decays=decays, batch=1, heads=(1, 1, 1), length=5, key_size=3, value_size=2, dtype=torch.float64, scale=0.6
    )
    given = {name: x[0] if name == "initial_state" else x for name, x in tensors(case).items()}
    q, k, v = (given[name][0, :, 0] for name in "qkv")
    log_decay, log_decay_v = given.get("log_decay"), given.get("log_decay_v")
    for i in range(case.length):
        total = torch.zeros(2, dtype=torch.float64)
        for j in range(-1, i + 1):
            weight_k, weight_v = torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
            for t in range(j + 1, i + 1):
                if log_decay is not None:
                    weight_k = weight_k * (log_decay[0] if log_decay.ndim == 1 else log_decay[0, t, 0]).exp()
                if log_decay_v is not None:
                    weight_v = weight_v * log_decay_v[0, t, 0].exp()
            state = given["initial_state"][0] if j < 0 else torch.outer(k[j], v[j])
            total += case.scale * (q[i] * weight_k) @ (state * weight_v)
        assert relative_error(exact(case)["output"][0, i, 0], total) < 1e-14


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_gradcheck(backend, decays):
    case = Case(
        decays=decays, batch=1, heads=(1, 2, 1), length=5, key_size=3, value_size=2, dtype=torch.float64, scale=0.6
    )
    leaves = inputs(case)

    def call(*values):
        named = dict(zip(leaves, values, strict=True))
        return fulmen.linear_attention(**named, scale=case.scale, return_state=True, backend=backend)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_gradcheck_of_chunk_states(backend, decays):
    case = Case(decays=decays, batch=1, heads=(1, 1, 2), length=5, key_size=3, value_size=2, dtype=torch.float64)
    leaves = inputs(case)
    del leaves["q"]

    def call(*values):
        return fulmen.chunk_states(**dict(zip(leaves, values, strict=True)), chunk_size=2, backend=backend)

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_a_sample_does_not_depend_on_the_batch_around_it(decays):
    case = Case(decays=decays, batch=3, length=20)
    whole = run(case, backend="reference")
    given = tensors(case)
    alone = fulmen.linear_attention(
        *(given[name][1:2] for name in "qkv"),
        **{
            name: given[name] if given[name].ndim == 1 else given[name][1:2]
            for name in ("log_decay", "log_decay_v", "initial_state")
            if name in given
        },
        backend="reference",
    )
    assert torch.equal(alone, whole["output"][1:2])


@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_results_of_16_bits_are_rounded_once(decays):
    """After heads that share q, k or v have added up their gradients."""
    case = Case(decays=decays, length=9, heads=(1, 2, 4), dtype=torch.bfloat16, scale=0.3)
    leaves = {name: x.detach().float().requires_grad_() for name, x in inputs(case).items()}
    wide = fulmen.linear_attention(**leaves, scale=case.scale, return_state=True, backend="reference")
    expected = differentiate(case, leaves, *wide)
    for name, x in run(case, backend="reference").items():
        assert torch.equal(x, expected[name].to(x.dtype)), name
