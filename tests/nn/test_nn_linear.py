"""Products of linear layers on the CPU core, against float64; and what stays torch's."""

import copy
import platform

import pytest
import torch
from torch.profiler import profile

import fulmen.nn.linear
from fulmen.nn import GatedDeltaNet, Linear
from fulmen.nn.linear import linear
from fulmen.nn.native_matmul import matmul
from fulmen.runtime import core
from fulmen.runtime.recording import recording

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
# Of an element: its own rounding, and the sum's error relative to the norms of its factors.
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = list(ROUNDING)
# A rest of every tile, several slices of the depth, more rows than a tile has, few of everything, nothing.
SIZES = [(33, 50, 70), (17, 700, 300), (530, 40, 17), (1, 1, 1), (3, 2, 1), (0, 4, 5), (4, 0, 5), (4, 5, 0)]


@pytest.fixture
def ours(monkeypatch):
    """Products of 16 bits are the core's, whatever this CPU has instructions for, and those of few rows in float32."""
    monkeypatch.setattr(fulmen.nn.linear, "SLOW", frozenset({torch.bfloat16, torch.float16}))
    monkeypatch.setattr(fulmen.nn.linear, "FEW_ROWS", frozenset({torch.float32}))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def factors(rows, depth, columns, dtype):
    return [
        random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, depth), (columns, depth), (columns,)])
    ]


def assert_close(found, a, b, bias=None):
    """found is a bᵀ + bias."""
    a, b = a.double(), b.double()
    wanted = a @ b.T + (0 if bias is None else bias.double())
    scale = a.norm(dim=1)[:, None] * b.norm(dim=1)
    assert ((found.double() - wanted).abs() <= ROUNDING[found.dtype] * wanted.abs() + 1e-6 * scale + 1e-6).all()


def calls(function, *args):
    with recording() as recorded:
        result = function(*args)
    return result, [call.name for call, _ in recorded.calls]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_native_products(size, dtype):
    a, b, bias = factors(*size, dtype)
    found = matmul(a, b, bias)
    assert (found.shape, found.dtype) == ((size[0], size[2]), dtype)
    assert_close(found, a, b, bias)
    assert_close(matmul(a, b, None), a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_products_of_views(dtype):
    """Rows or columns dense, neither, repeated; the same bits as of contiguous factors."""
    a, b, bias = factors(70, 300, 33, dtype)
    expected = matmul(a, b, bias)
    views = {
        "transposed": lambda x: x.T.contiguous().T,
        "rows apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        "columns apart": lambda x: torch.cat([x, x], 0).T.contiguous().T[: x.shape[0]],
        "both apart": lambda x: x.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    }
    for of_a in views.values():
        for of_b in views.values():
            assert torch.equal(matmul(of_a(a), of_b(b), torch.stack([bias, bias], 1)[:, 0]), expected)
    repeated = a[:1].expand(70, -1)
    assert torch.equal(matmul(repeated, b, bias), matmul(repeated.contiguous(), b, bias))
    one = torch.stack([a[:, 0], a[:, 1]], 1)[:, :1]  # a column of one, whose rows are two apart
    assert torch.equal(matmul(one, b[:, :1], bias), matmul(one.contiguous(), b[:, :1].contiguous(), bias))


def test_native_products_have_the_same_bits_on_any_number_of_threads():
    before = torch.get_num_threads()
    a, b, bias = factors(300, 520, 200, torch.bfloat16)
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(matmul(a, b, bias))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, results[0]) for x in results)
    assert torch.equal(matmul(a[:40], b[:50], bias[:50]), results[0][:40, :50])


def test_native_products_of_many_terms_are_summed_in_slices():
    """A chain of as many roundings would be off by more than twice as much."""
    a, b, _ = factors(16, 16384, 16, torch.float32)
    wanted = a.double() @ b.double().T
    assert (matmul(a, b, None) - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_infinities_stay_in_their_rows(dtype):
    a, b, _ = factors(40, 30, 20, dtype)
    a[3, 5], b[7, 2] = float("inf"), float("nan")
    found, wanted = matmul(a, b, None), a.double() @ b.double().T
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    assert found[3].isinf().sum() == 19


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(40,), (2, 20), (3, 1, 7)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients(ours, shape, bias, dtype):
    torch.manual_seed(0)
    layer = Linear(50, 30, bias=bias).to(dtype)
    x, grad = random(*shape, 50, dtype=dtype).requires_grad_(), random(*shape, 30, dtype=dtype, seed=1)
    y, made = calls(layer, x)
    assert made == ["matmul_call"]
    assert (y.shape, y.dtype) == ((*shape, 30), dtype)
    rows, grads = x.detach().reshape(-1, 50), grad.reshape(-1, 30)
    assert_close(y.detach().reshape(-1, 30), rows, layer.weight.detach(), layer.bias)
    found, made = calls(torch.autograd.grad, y, [x, *layer.parameters()], grad)
    assert made == ["matmul_call"] * 2
    assert_close(found[0].reshape(-1, 50), grads, layer.weight.detach().T)
    assert_close(found[1], grads.T, rows.T)
    if bias:
        torch.testing.assert_close(found[2].double(), grads.double().sum(0), atol=0.05, rtol=ROUNDING[dtype])


def test_only_the_requested_gradients_are_computed(ours):
    layer = Linear(20, 30).bfloat16()
    layer.weight.requires_grad_(False)
    x = random(40, 20, dtype=torch.bfloat16)
    y, _ = calls(layer, x)
    _, made = calls(torch.autograd.grad, y.float().sum(), [layer.bias])
    assert made == []


def test_second_derivatives(ours):
    weight, x = (random(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((30, 20), (40, 20)))

    def penalty(product):
        (dx,) = torch.autograd.grad(product(x, weight).float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.float().square().sum(), weight)[0]

    found, wanted = penalty(linear), penalty(torch.nn.functional.linear)
    assert (found - wanted).norm() <= 0.02 * wanted.norm()


def test_what_stays_with_torch(ours):
    """One row, little work, float32 and float64, dtypes that differ: torch's results, and torch's errors."""
    torch.manual_seed(0)
    layer = Linear(300, 500)
    with torch.no_grad():
        for dtype, rows in ((torch.float32, 40), (torch.float64, 40), (torch.bfloat16, 1)):
            module, x = copy.deepcopy(layer).to(dtype), random(rows, 300, dtype=dtype)
            found, made = calls(module, x)
            assert made == []
            assert torch.equal(found, torch.nn.functional.linear(x, module.weight, module.bias))
        half = copy.deepcopy(layer).bfloat16()
        assert calls(half, random(40, 300, dtype=torch.bfloat16))[1] == ["matmul_call"]
        assert calls(half, random(2, 300, dtype=torch.bfloat16))[1] == ["linear_call"]
        assert calls(half, random(300, dtype=torch.bfloat16))[1] == []
        assert calls(Linear(300, 5).bfloat16(), random(40, 300, dtype=torch.bfloat16))[1] == []
        with pytest.raises(RuntimeError, match="dtype"):
            half(random(40, 300))
        with pytest.raises(RuntimeError, match="shapes"):
            half(random(40, 301, dtype=torch.bfloat16))


def test_products_of_float32_where_torch_is_slow(monkeypatch):
    """Of four million terms and more, with gradients and without."""
    monkeypatch.setattr(fulmen.nn.linear, "SLOW", frozenset({torch.float32}))
    torch.manual_seed(0)
    layer, x = Linear(520, 515), random(2, 10, 520).requires_grad_()
    y, made = calls(layer, x)
    assert made == ["matmul_call"]
    rows, grad = x.detach().reshape(20, 520), random(20, 515, seed=1)
    assert_close(y.detach().reshape(20, 515), rows, layer.weight.detach(), layer.bias.detach())
    found, made = calls(torch.autograd.grad, y, [x, layer.weight], grad.reshape(2, 10, 515))
    assert made == ["matmul_call"] * 2
    assert_close(found[0].reshape(20, 520), grad, layer.weight.detach().T)
    assert_close(found[1], grad.T, rows.T)
    few = random(15, 520)
    found, made = calls(layer, few)
    assert made == []
    assert torch.equal(found, torch.nn.functional.linear(few, layer.weight, layer.bias))
    with torch.no_grad():
        assert calls(layer, x.detach())[1] == ["matmul_call"]


@pytest.mark.parametrize("bias", [True, False])
def test_native_few_rows_of_float32(ours, two_threads, bias):
    """A decode step, of one sequence or a few tokens of some; each row has the bits that it has alone."""
    torch.manual_seed(0)
    layer = Linear(520, 515, bias=bias)
    with torch.no_grad():
        for shape in ((1,), (12,), (3, 1), (2, 3, 2), (1, 1, 1)):
            x = random(*shape, 520)
            found, made = calls(layer, x)
            assert made == ["linear_call"]
            assert found.shape == (*shape, 515)
            assert_close(found.reshape(-1, 515), x.reshape(-1, 520), layer.weight, layer.bias)
            assert torch.equal(found.reshape(-1, 515)[-1:], layer(x.reshape(-1, 520)[-1:]))
            assert torch.equal(layer(x), found)  # a call like one before
        apart = random(2, 4, 520)[:, 1:2]
        assert torch.equal(layer(apart), layer(apart.contiguous()))


def test_which_rows_of_float32_stay_with_torch(ours, two_threads):
    layer, x = Linear(520, 515), random(2, 520)
    assert calls(layer, x)[1] == []  # differentiated
    with torch.no_grad():
        assert calls(layer, random(13, 520))[1] == []
        assert calls(layer, random(0, 520))[1] == []
        assert calls(layer, random(520))[1] == []
        assert calls(Linear(520, 500), x)[1] == []  # little work
        assert calls(layer.double(), x.double())[1] == []
        layer.float()
        turned = Linear(520, 515)
        turned.weight = torch.nn.Parameter(turned.weight.T.contiguous().T)
        assert calls(turned, x)[1] == []
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        with pytest.raises(RuntimeError, match="shapes"):
            layer(random(2, 521))
        with pytest.raises(RuntimeError):
            layer(torch.tensor(1.0))
        torch.set_num_threads(1)
        assert calls(layer, x)[1] == []
    frozen = Linear(520, 515).requires_grad_(False)
    torch.set_num_threads(2)
    assert calls(frozen, x)[1] == ["linear_call"]


def test_weights_of_another_kind_stay_with_torch(ours):
    """A subclass may be quantised or sharded, and sees torch's own function."""
    seen = []

    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    layer, x = Linear(300, 500).bfloat16(), random(40, 300, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Other))
    _, made = calls(layer, x)
    assert made == []
    assert torch.nn.functional.linear in seen


def test_autocast(ours):
    torch.manual_seed(0)
    layer, x = Linear(20, 30), random(40, 20).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, made = calls(layer, x)
    assert (made, y.dtype) == (["matmul_call"], torch.bfloat16)
    y.float().sum().backward()
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, wanted, atol=0.01, rtol=0.01)


def test_parts_of_torch(ours):
    """compile, export, vmap, the profiler, and torch's own check of an op."""
    layer, x = Linear(20, 30).bfloat16(), random(40, 20, dtype=torch.bfloat16)
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), expected)
    batches = torch.stack([x, -x])
    assert torch.equal(torch.vmap(layer)(batches), torch.stack([layer(x), layer(-x)]))
    with profile() as profiled:
        layer(x)
    assert "fulmen::matmul" in {event.name for event in profiled.events()}
    arguments = [y.detach().requires_grad_() for y in (x, layer.weight, layer.bias)]
    torch.library.opcheck(torch.ops.fulmen.matmul.default, arguments)


def test_a_layer_of_ours_trains_and_decodes_in_bfloat16(ours):
    torch.manual_seed(0)
    layer = GatedDeltaNet(64, num_heads=2, key_size=16, value_size=16).bfloat16()
    x = random(1, 40, 64, dtype=torch.bfloat16)
    y, made = calls(layer, x)
    assert made.count("matmul_call") == 5
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_that_the_cpu_has_instructions_for_are_torchs(monkeypatch, dtype):
    found = {"architecture": "x86_64"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(type(core.core), "multiplies_pairs", False)
    slow = fulmen.nn.linear._is_slow
    assert slow(dtype)
    for instruction in fulmen.nn.linear._INSTRUCTIONS[dtype]:
        found[instruction] = True
        assert not slow(dtype)
        found[instruction] = False
    monkeypatch.setattr(type(core.core), "multiplies_pairs", True)
    assert slow(dtype) == (dtype == torch.float16)
    found["architecture"] = "arm64"
    assert not slow(dtype)


def test_on_which_cpus_few_rows_are_ours(monkeypatch):
    found = {"architecture": "x86_64", "cpu_name": "AMD EPYC 9654"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert fulmen.nn.linear._is_amd()
    for other in ({"cpu_name": "Intel Xeon"}, {"cpu_name": None}, {"architecture": "arm64"}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda other=other: found | other)
        assert not fulmen.nn.linear._is_amd()


def test_on_which_cpus_products_of_float32_are_ours(monkeypatch):
    found = {"architecture": "x86_64", "cpu_name": "AMD EPYC 9755", "avx_vnni": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    for isa, ours in (("avx512_bf16", True), ("avx512", True), ("avx2", False), ("baseline", False)):
        monkeypatch.setattr(type(core.core), "isa", isa)
        assert fulmen.nn.linear._is_slow(torch.float32) == ours
    monkeypatch.setattr(type(core.core), "isa", "avx512")
    for other in ({"avx_vnni": False}, {"cpu_name": "Intel Xeon"}, {"architecture": "arm64"}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda other=other: found | other)
        assert not fulmen.nn.linear._is_slow(torch.float32)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of other CPUs torch's products stay")
def test_this_torch_says_what_the_cpu_has():
    assert torch.cpu.get_capabilities()["architecture"] == "x86_64"
