"""What must not change a result: cutting, packing, views, repeating, and NaN elsewhere."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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

BACKEND = pytest.mark.parametrize("backend", BACKENDS)
FORM = pytest.mark.parametrize("decays", ALL_DECAYS)
MULTIPLIED_AS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # floats, and pairs where there are


@st.composite
def cases(draw):
    unit = draw(st.integers(1, 3))
    heads = draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 2)]))
    packed = draw(st.none() | st.lists(st.integers(0, 90), min_size=1, max_size=4).map(tuple))
    return Case(
        batch=draw(st.integers(1, 3)),
        length=draw(st.integers(0, 150)),
        heads=tuple(unit * h for h in heads),
        key_size=draw(st.integers(1, 40)),
        value_size=draw(st.integers(1, 40)),
        decays=draw(st.sampled_from(ALL_DECAYS)),
        values=draw(st.sampled_from(["random", "zero", "tiny", "strong", "mixed", "forget"])),
        scale=draw(st.sampled_from([1.0, 0.25, -2.0])),
        initial=draw(st.booleans()),
        packed=packed,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )


@BACKEND
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), schedule=st.sampled_from(SCHEDULES))
def test_any_shape_and_option(backend, case, schedule):
    assert_close(run(case, backend=backend, schedule=schedule), exact(case), f"{case} {schedule}")


@BACKEND
@FORM
@pytest.mark.parametrize("split", [1, 64, 100])
def test_two_halves_with_the_state_passed_on_equal_the_whole(backend, decays, split):
    case = Case(decays=decays, length=130)

    def in_two(**leaves):
        state, outputs = leaves.pop("initial_state"), []
        for tokens in (slice(0, split), slice(split, None)):
            part = {name: x if x.ndim == 1 else x[:, tokens] for name, x in leaves.items()}
            output, state = fulmen.linear_attention(**part, initial_state=state, return_state=True, backend=backend)
            outputs.append(output)
        return torch.cat(outputs, 1), state

    leaves = inputs(case)
    assert_close(differentiate(case, leaves, *in_two(**leaves)), exact(case))


@BACKEND
@pytest.mark.parametrize("decays", DECAYS)
def test_packed_equals_separate(backend, decays):
    case = Case(decays=decays, packed=(70, 0, 3, 64))
    packed = run(case, backend=backend)
    leaves, bounds, given = inputs(case), case.bounds, tensors(case)
    shared = torch.zeros(max(case.heads))  # the gradient of a decay that all sequences share
    for i in range(len(case.packed)):

        def part_of(name, x, row=slice(i, i + 1), tokens=slice(bounds[i], bounds[i + 1])):
            return x if x.ndim == 1 else x[row] if name.endswith("state") else x[:, tokens]

        part = {name: part_of(name, x.detach()).requires_grad_() for name, x in leaves.items()}
        output, state = fulmen.linear_attention(**part, return_state=True, backend=backend)
        cotangents = [part_of(name, given[name]) for name in ("grad_output", "grad_state")]
        grads = torch.autograd.grad((output, state), list(part.values()), cotangents)
        found = {"output": output, "state": state} | {f"d{name}": x for name, x in zip(part, grads, strict=True)}
        for name, x in found.items():
            if x.ndim == 1:
                shared += x
            else:
                assert torch.equal(x, part_of(name, packed[name])), (i, name)
    if decays.startswith("head"):
        assert relative_error(packed["dlog_decay"], shared.double()) <= TOLERANCE[torch.float32]


@BACKEND
@FORM
def test_repeating_a_call_gives_the_same_bits(backend, decays):
    case = Case(decays=decays, length=130, heads=(1, 2, 2))
    first, again = run(case, backend=backend), run(case, backend=backend)
    for name, x in first.items():
        assert torch.equal(x, again[name]), name


@BACKEND
def test_views_into_a_fused_projection(backend):
    """q, k, v and the decay as slices of one tensor give the bits of contiguous ones, and leave it as it was."""
    torch.manual_seed(0)
    fused = torch.randn(2, 70, 3, 4 * 16)
    kept = fused.clone()
    q, k, v, decay = fused.split(16, dim=-1)
    decay = -decay.abs()
    results = fulmen.linear_attention(q, k, v, log_decay=decay, return_state=True, backend=backend)
    dense = [x.contiguous() for x in (q, k, v, decay)]
    expected = fulmen.linear_attention(*dense[:3], log_decay=dense[3], return_state=True, backend=backend)
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])
    assert torch.equal(fused, kept)


@BACKEND
def test_inputs_with_any_strides(backend):
    case = Case(decays="channel+value", length=66)
    odd = {
        name: x.transpose(1, -1).contiguous().transpose(1, -1) if x.ndim == 4 else x for name, x in inputs(case).items()
    }
    for x in odd.values():
        x.retain_grad()
    output, state = fulmen.linear_attention(**odd, return_state=True, backend=backend)
    assert_close(differentiate(case, odd, output, state), exact(case))


@BACKEND
@MULTIPLIED_AS
@pytest.mark.parametrize("decays", DECAYS)
def test_nan_stays_where_it_is(backend, decays, dtype):
    """NaN never crosses heads, samples or packed sequences; in q or k it never reaches earlier outputs."""
    case = Case(decays=decays, batch=2, length=200, heads=(2, 2, 2), dtype=dtype)
    at = 150
    clean = run(case, backend=backend)
    for name in "qkv":
        given = {n: x.clone() for n, x in tensors(case).items() if n not in ("grad_output", "grad_state")}
        given[name][1, at, 0] = torch.nan
        output, state = fulmen.linear_attention(**given, return_state=True, backend=backend)
        for sample, head in ((0, 0), (0, 1), (1, 1)):
            assert torch.equal(output[sample, :, head], clean["output"][sample, :, head])
            assert torch.equal(state[sample, head], clean["state"][sample, head])
        assert output[1, at, 0].isnan().all()
        # v may spoil its own chunk, which is at most 128 tokens long
        untouched = at if name in "qk" else at - 128
        assert torch.equal(output[1, :untouched, 0], clean["output"][1, :untouched, 0])
        assert state[1, 0].isnan().any() == (name != "q")
        if name == "q":
            assert torch.equal(output[1, at + 1 :, 0], clean["output"][1, at + 1 :, 0])


@BACKEND
def test_nan_does_not_cross_packed_sequences(backend):
    case = Case(decays="token", packed=(40, 30, 50))
    clean = run(case, backend=backend)
    given = {n: x.clone() for n, x in tensors(case).items() if n not in ("grad_output", "grad_state")}
    for name in "qkv":
        given[name][:, 40:70] = torch.nan
    cu_seqlens = torch.tensor(case.bounds, dtype=torch.int32)
    output, state = fulmen.linear_attention(**given, cu_seqlens=cu_seqlens, return_state=True, backend=backend)
    for tokens in (slice(0, 40), slice(70, 120)):
        assert torch.equal(output[:, tokens], clean["output"][:, tokens])
    assert torch.equal(state[[0, 2]], clean["state"][[0, 2]])


@BACKEND
@MULTIPLIED_AS
def test_forgetting_is_exact(backend, dtype):
    """After a decay of -inf, nothing of what was before is left: not a bit differs."""
    case = Case(decays="token", batch=1, length=100, initial=False, dtype=dtype)
    given = {n: tensors(case)[n].clone() for n in ("q", "k", "v", "log_decay")}
    given["log_decay"][:, 37] = -torch.inf
    output = fulmen.linear_attention(**given, backend=backend)
    for name in "qkv":
        given[name][:, :37] *= -3.0
    assert torch.equal(fulmen.linear_attention(**given, backend=backend)[:, 37:], output[:, 37:])
