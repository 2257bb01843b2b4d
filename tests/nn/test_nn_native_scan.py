"""Mamba-2's scan as one call of the core, against what it is composed of, in float64."""

import pytest
import torch

from fulmen.lab.tolerances import STATE, TOLERANCE, relative_error
from fulmen.nn import Mamba2, native_scan
from fulmen.nn.mamba2 import scan
from fulmen.runtime import core
from fulmen.runtime.recording import recording

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
# batch, tokens, heads, groups, state size, channels
SHAPES = [(1, 67, 6, 2, 20, 9), (2, 33, 4, 1, 16, 16), (1, 300, 1, 1, 64, 70), (1, 5, 3, 3, 5, 40), (1, 0, 2, 1, 8, 8)]


def inputs(shape, dtype=torch.float32):
    batch, tokens, heads, groups, size, channels = shape
    generator = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(sizes, generator=generator)

    C, B = (random(batch, tokens, groups, size).to(dtype) for _ in range(2))
    x, D = random(batch, tokens, heads, channels).to(dtype), random(heads).to(dtype)
    dt = random(batch, tokens, heads).sigmoid()
    return (C, B, x, dt), {"log_decay": -dt * random(heads).abs(), "D": D}


def exact(tensors, options):
    """Composed, as the core does not take float64."""

    def double(y):
        return y.double() if isinstance(y, torch.Tensor) and y.is_floating_point() else y

    return scan(*map(double, tensors), **{name: double(y) for name, y in options.items()}, return_state=True)


@torch.no_grad()
def found(tensors, options):
    with recording() as recorded:
        results = scan(*tensors, **options, return_state=True)
    assert [call.name for call, _ in recorded.calls] == ["attention_forward_call"]
    return results


def check(tensors, options):
    dtypes = tensors[2].dtype, torch.float32
    for got, wanted, dtype in zip(found(tensors, options), exact(tensors, options), dtypes, strict=True):
        assert got.dtype == dtype
        assert got.shape == wanted.shape
        if not got.numel():
            continue
        if dtype != tensors[2].dtype and rounds_factors(tensors[2]):
            assert (got - wanted).norm() <= STATE.norm * wanted.norm()
        else:
            assert relative_error(got.double(), wanted) <= TOLERANCE[dtype]


def rounds_factors(x):
    return x.dtype == torch.bfloat16 and core.core.multiplies_tiles


@pytest.mark.parametrize("dtype", core.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_results(shape, dtype):
    if dtype == torch.bfloat16 and core.core.multiplies_pairs:
        pytest.skip("composed in pairs of bfloat16")
    tensors, options = inputs(shape, dtype)
    check(tensors, options)
    check(tensors, options | {"D": None})
    batch, _, heads, _, size, channels = shape
    check(tensors, options | {"initial_state": torch.randn(batch, heads, size, channels)})


@pytest.mark.parametrize("ends", [(0, 20, 20, 67), (0, 67), (0, 1, 16, 33, 67)])
def test_packed_sequences(ends):
    tensors, options = inputs(SHAPES[0])
    check(tensors, options | {"cu_seqlens": torch.tensor(ends)})


def test_one_head_is_partitioned():
    """Into segments of tokens, one for each thread."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        check(*inputs((1, 3000, 1, 1, 32, 16)))
    finally:
        torch.set_num_threads(threads)


def test_views():
    (C, B, x, dt), options = inputs(SHAPES[1])
    wide = torch.full((33, 2, 4, 50), torch.nan)
    views = wide[..., 7:23].transpose(0, 1).copy_(x), torch.full((2, 4, 33), torch.nan).transpose(1, 2).copy_(dt)
    for got, wanted in zip(found((C, B, *views), options), found((C, B, x, dt), options), strict=True):
        assert torch.equal(got, wanted)


def test_decays_that_forget_and_steps_that_are_none():
    """A token whose dt is NaN or infinite does not reach those before it."""
    (C, B, x, dt), options = inputs(SHAPES[2])
    options["log_decay"][:, 40:50] = -torch.inf
    check((C, B, x, dt), options)
    usual, _ = found((C, B, x, dt), options)
    for odd in (torch.nan, torch.inf):
        changed = dt.clone()
        changed[0, 100] = odd
        output, _ = found((C, B, x, changed), options)
        assert torch.equal(output[:, :100], usual[:, :100])
        assert not output[:, 100].isfinite().any()


def test_calls_are_replayed():
    """With what the first one gives, on other numbers."""
    for seed in range(3):
        torch.manual_seed(seed)
        tensors, options = inputs(SHAPES[1])
        for x in (*tensors, *options.values()):
            x.copy_(torch.rand_like(x) - 1)
        check(tensors, options)
        with torch.no_grad():
            assert torch.equal(scan(*tensors, **options), found(tensors, options)[0])


def test_what_is_composed():
    tensors, options = inputs(SHAPES[1])
    C, B, x, dt = tensors
    rest = options["log_decay"], options["D"], None, None
    assert native_scan.takes(*tensors, *rest)
    assert not native_scan.takes(C.double(), B.double(), x.double(), dt, *rest)
    assert native_scan.takes(C, B, x, dt.bfloat16(), *rest)
    assert not native_scan.takes(C, B, x, dt.double(), *rest)
    assert not native_scan.takes(C, B, x.requires_grad_(), dt, *rest)
    with torch.no_grad():
        assert native_scan.takes(*tensors, *rest)
        with torch.autocast("cpu"):
            assert not native_scan.takes(*tensors, *rest)
    gradient = torch.autograd.grad(scan(*tensors, **options).sum(), x)[0]
    wanted = torch.autograd.grad(exact(tensors, options)[0].sum(), x)[0]
    assert relative_error(gradient.double(), wanted.double()) <= TOLERANCE[torch.float32]


def test_a_layer_uses_it(monkeypatch):
    torch.manual_seed(0)
    layer, x, calls = Mamba2(32, head_dim=8, state_size=6), torch.randn(2, 19, 32), []
    wanted, of_core = layer(x).detach(), native_scan.scan
    monkeypatch.setattr(native_scan, "scan", lambda *args: calls.append(args) or of_core(*args))
    with torch.no_grad():
        result = layer(x)
    assert len(calls) == 1
    torch.testing.assert_close(result, wanted)


def test_wrong_shapes_are_refused():
    (C, B, x, dt), options = inputs(SHAPES[1])
    with pytest.raises(ValueError, match="k must have"):
        scan(C, B[..., :5], x, dt, **options)


def test_the_op_has_a_fake():
    (C, B, x, dt), options = inputs(SHAPES[1])
    torch.library.opcheck(
        torch.ops.fulmen.mamba2_scan.default, (C, B, x, dt, options["log_decay"], options["D"], None, None, True)
    )
