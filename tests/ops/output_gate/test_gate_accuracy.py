"""Every backend and choice of what is saved against the formula in float64: the output and all gradients."""

import pytest
import torch
from gate_cases import SAVES, Case, assert_close, compared, differentiate, exact, leaves, run, tensors

import fulmen
from cases import BACKENDS, TOLERANCE, relative_error

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
SAVE = pytest.mark.parametrize("save", SAVES, ids=lambda save: "+".join(save) or "nothing")
QUERIES_AND_KEYS = [(1, 1), (1, 40), (40, 1), (16, 33), (65, 130), (0, 5), (5, 0), (300, 1)]


@SAVE
@pytest.mark.parametrize(("queries", "keys"), QUERIES_AND_KEYS)
def test_lengths(backend, save, queries, keys):
    case = Case(queries=queries, keys=keys)
    assert_close(run(case, backend=backend, save=save), exact(case))


@SAVE
@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (1, 5), (7, 33), (33, 7), (64, 16), (130, 48)])
def test_sizes(backend, save, key_size, value_size):
    case = Case(key_size=key_size, value_size=value_size)
    assert_close(run(case, backend=backend, save=save), exact(case))


@SAVE
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(backend, save, dtype):
    case = Case(dtype=dtype, queries=70)
    assert_close(run(case, backend=backend, save=save), exact(case))


def test_no_samples(backend):
    case = Case(batch=0)
    assert_close(run(case, backend=backend), exact(case))


@SAVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views(backend, save, dtype):
    """Slices of one projection, a transposed [B, H, N, D] tensor, one that is dense nowhere, and an expanded one."""
    case = Case(queries=53, keys=53, key_size=24, value_size=24, dtype=dtype)
    given = tensors(case)
    fused = torch.cat([given["q"], given["k"]], -1)
    views = {
        "q": fused[..., :24],
        "k": fused[..., 24:],
        "v": given["v"].transpose(1, 2).contiguous().transpose(1, 2),
        "gate": given["gate"].transpose(2, 3).contiguous().transpose(2, 3),
    }
    views = {name: x.requires_grad_() for name, x in views.items()}
    output = fulmen.output_gated_attention(**views, backend=backend, save=save)
    assert_close(compared(case, differentiate(case, views, output), backend), exact(case))


def test_overlapping_rows(backend):
    """Windows that slide over one row have strides of 1 along tokens and features alike."""
    x = torch.randn(1, 1, 73, generator=torch.Generator().manual_seed(0))
    g = x.unfold(2, 64, 1).transpose(1, 2)
    made = tensors(Case(batch=1, queries=10, keys=20, heads=1, value_size=64))
    given = {"q": made["q"], "k": made["k"], "v": made["v"], "gate": g}
    output = fulmen.output_gated_attention(**given, backend=backend)
    expected = fulmen.output_gated_attention(**{name: x.double() for name, x in given.items()}, backend="reference")
    assert relative_error(output, expected) <= TOLERANCE[torch.float32]


def test_expanded_gradient_and_gate(backend):
    """A sum's gradient is one number expanded to the output's shape, and so may a gate be."""
    case = Case()
    inputs = leaves(case)
    gate = torch.tensor(0.5, requires_grad=True)
    inputs["gate"] = gate.expand(tensors(case)["gate"].shape)
    fulmen.output_gated_attention(**inputs, backend=backend).sum().backward()
    q, k, v = (inputs[name].detach().double().requires_grad_() for name in "qkv")
    kv = torch.einsum("bmhd,bmhe->bhde", k, v)
    qkv = torch.einsum("bnhd,bhde->bnhe", q, kv)
    (0.5 * qkv).sum().backward()
    assert_close({name: inputs[name].grad for name in "qkv"}, {"q": q.grad, "k": k.grad, "v": v.grad})
    assert abs(gate.grad.item() - qkv.sum().item()) <= 1e-5 * qkv.abs().sum().item()


def test_float16_products_beyond_its_range(backend):
    """kᵀv and q·kᵀv pass 65504, the end of float16; the gated output does not."""
    q, k, v, g = (torch.full((1, 80, 1, 16), x, dtype=torch.float16) for x in (0.5, 40.0, 40.0, 1e-3))
    inputs = [x.requires_grad_() for x in (q, k, v, g)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    for save in SAVES:
        output = fulmen.output_gated_attention(*inputs, backend=backend, save=save)
        want = fulmen.output_gated_attention(*doubles, backend="reference")
        assert (want / g).max() > 1.5 * 65504
        grads = torch.autograd.grad(output, inputs, torch.full_like(output, 1e-2))
        wants = torch.autograd.grad(want, doubles, torch.full_like(output, 1e-2).double())
        for got, wanted in zip((output, *grads), (want, *wants), strict=True):
            assert relative_error(got, wanted) <= TOLERANCE[torch.float16]


def test_nan_stays_in_its_head_and_sample(backend):
    case = Case()
    given = {name: x.clone() for name, x in tensors(case).items() if name != "grad"}
    given["k"][0, 3, 1, 2] = torch.nan
    given["gate"][1, 5, 2, 4] = torch.nan
    output = fulmen.output_gated_attention(**given, backend=backend)
    reached = torch.zeros_like(output, dtype=torch.bool)
    reached[0, :, 1] = True
    reached[1, 5, 2, 4] = True
    assert torch.equal(output.isnan(), reached)


def test_only_the_requested_gradients(backend):
    case = Case()
    for name in ("q", "k", "v", "gate"):
        inputs = {n: x.detach() for n, x in leaves(case).items()}
        inputs[name].requires_grad_()
        output = fulmen.output_gated_attention(**inputs, backend=backend)
        results = differentiate(case, {name: inputs[name]}, output)
        assert_close(results, {f"d{name}": exact(case)[f"d{name}"]})
