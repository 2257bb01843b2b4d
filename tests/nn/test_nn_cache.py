"""Rows of caches are chosen, joined and placed; norms and slopes are what they say."""

import copy

import pytest
import torch
from layers import CAUSAL, layer, relative, tokens

import fulmen
from fulmen import nn
from fulmen.nn.norms import formula


def filled(made, x):
    cache = nn.StateCache(1)
    made(x, cache=cache[0])
    return cache


def goes_on(made, cache, x):
    """What a copy of the cache gives next: two tokens by steps, and three at once."""
    cache = copy.deepcopy(cache)
    return torch.cat([made(part, cache=cache[0]) for part in x.split([1, 1, 3], 1)], 1)


@pytest.mark.parametrize("name", CAUSAL)
def test_requests_leave_join_and_take_a_place(name):
    made, x, y, more = layer(name), tokens(3, 6), tokens(2, 300, seed=2), tokens(5, 5, seed=3)
    with torch.no_grad():
        first, second = filled(made, x), filled(made, y)
        alone = torch.cat([goes_on(made, first, more[:3]), goes_on(made, second, more[3:])])
        kept = [2, 0]
        assert relative(goes_on(made, first.select(kept), more[kept]), alone[kept]) < 1e-5
        assert relative(goes_on(made, first.select(slice(1, 2)), more[1:2]), alone[1:2]) < 1e-5
        joined = first.join(second)
        assert joined.rows == 5
        assert relative(goes_on(made, joined, more), alone) < 1e-5
        assert relative(goes_on(made, second.join(first), more.roll(2, 0)), alone.roll(2, 0)) < 1e-5
        assert relative(goes_on(made, nn.StateCache(1).join(first), more[:3]), alone[:3]) < 1e-5
        first.place(torch.tensor([2, 0]), second)
        rows = [4, 1, 3]
        assert relative(goes_on(made, first, more[rows]), alone[rows]) < 1e-5
        # what was taken from a cache is its own
        assert relative(goes_on(made, joined, more), alone) < 1e-5


def test_a_cache_says_its_sizes():
    made, cache = layer("GatedDeltaNet"), nn.StateCache(2)
    assert "0 rows" in repr(cache)
    assert cache.rows is None
    with torch.no_grad():
        made(tokens(3, 4), cache=cache[1])
    shown = repr(cache)
    assert "2 layers, 3 rows" in shown
    assert "recurrent [3, 4, 6, 5] float32" in shown
    assert "conv [3, 44, 3] float32" in shown
    assert cache.nbytes == 4 * (3 * 4 * 6 * 5 + 3 * 44 * 3)
    attention = nn.StateCache(1)
    with torch.no_grad():
        layer("TensorProductAttention")(tokens(3, 4), cache=attention[0])
    assert "4 tokens of 3 rows" in repr(attention)


def test_what_does_not_fit_is_refused():
    with torch.no_grad():
        one, two = (filled(layer(name), tokens(2, 3)) for name in ("GatedDeltaNet", "Mamba2"))
    with pytest.raises(ValueError, match="other must be of the same layer"):
        one.join(two)
    with pytest.raises(ValueError, match="other must be of the same layer"):
        one.place([0, 1], two)
    with pytest.raises(ValueError, match="other must have the 1 layers"):
        one.join(nn.StateCache(2))
    with pytest.raises(TypeError, match="other must be a StateCache"):
        one.join(two[0])
    with pytest.raises(ValueError, match="layers must be at least 1"):
        nn.StateCache(0)


@pytest.mark.parametrize("shape", [(2, 3, 6), (6,)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gate", [None, "silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_norms(gate, gate_first, groups, shape):
    torch.manual_seed(0)
    norm = nn.RMSNorm(6, 1e-5, gate=gate, gate_first=gate_first, groups=groups).double()
    norm.weight.data.normal_()
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(1 if gate is None else 2)]
    by_group = [x.chunk(groups, -1) for x in (*given, norm.weight)]
    expected = torch.cat(
        [formula(x[0], x[1] if gate else None, x[-1], 1e-5, gate, gate_first) for x in zip(*by_group, strict=True)], -1
    )
    torch.testing.assert_close(norm(*given), expected)
    torch.autograd.gradcheck(lambda *x: norm(*x), given)
    torch.autograd.gradcheck(lambda w: torch.func.functional_call(norm, {"weight": w}, tuple(given)), norm.weight)
    half = norm.to(torch.bfloat16)(*(x.bfloat16() for x in given))
    assert half.dtype == torch.bfloat16
    assert relative(half.double(), expected) < 2**-6
    with pytest.raises(ValueError, match="gate must be"):
        norm(*given, *given[:1]) if gate is None else norm(given[0])


def test_slopes():
    found = nn.slopes(4)
    torch.testing.assert_close(found, torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    torch.testing.assert_close(nn.slopes(4, layer=0, num_layers=3), found * (1 + 1e-5))
    assert (nn.slopes(4, layer=2, num_layers=3) < 2e-5).all()
    assert (nn.slopes(4, layer=2, num_layers=3) > 0).all()


def by_token(q, k, v, decay, scale):
    """Σ over tokens, one by one, of one sample: q, k, decay [N, H, D], v [N, H, E]."""
    state, outputs = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=q.dtype), []
    for i in range(q.shape[0]):
        state = state * decay[i, :, :, None] + k[i, :, :, None] * v[i, :, None]
        outputs.append(scale * torch.einsum("hd,hde->he", q[i], state))
    return torch.stack(outputs)


def test_gated_linear_attention_is_what_it_says():
    made, x = layer("GatedLinearAttention", torch.float64), tokens(1, 9, dtype=torch.float64)
    q, k, v, g, a = (
        project(x)[0].unflatten(-1, (2, -1))
        for project in (made.q_proj, made.k_proj, made.v_proj, made.g_proj, made.gk_proj)
    )
    output = by_token(q, k, v, torch.sigmoid(a) ** (1 / 16), q.shape[-1] ** -0.5)
    normed = output / (output.square().mean(-1, keepdim=True) + 1e-5).sqrt() * made.g_norm_swish_gate.weight
    expected = made.o_proj((normed * g * torch.sigmoid(g)).flatten(1))
    assert relative(made(x)[0], expected) < 1e-10


def test_tensor_product_attention_is_what_it_says():
    made, x = layer("TensorProductAttention", torch.float64), tokens(1, 9, dtype=torch.float64)
    made.rope_base = None
    q, k, v = (
        torch.einsum("nhr,nrd->hnd", a(x)[0].unflatten(-1, (3, -1)), b(x)[0].unflatten(-1, (-1, 6))) / rank
        for a, b, rank in ((made.W_A_q, made.W_B_q, 4), (made.W_A_k, made.W_B_k, 2), (made.W_A_v, made.W_B_v, 2))
    )
    scores = (q @ k.mT * 6**-0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = made.o_proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    assert relative(made(x)[0], expected) < 1e-10


def test_positions_are_relative():
    """Scores of rotated factors depend on distances alone, and do depend on them."""
    from fulmen.nn.rotary import rotate

    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64) for _ in range(2))

    def score(i, j):
        return (rotate(q, torch.tensor([[i]]), 100.0) * rotate(k, torch.tensor([[j]]), 100.0)).sum()

    torch.testing.assert_close(score(7, 4), score(13, 10), rtol=1e-5, atol=1e-5)
    assert abs(score(7, 4) - score(7, 5)) > 1e-3


def test_output_gated_attention_is_what_it_says():
    made, x = layer("OutputGatedAttention", torch.float64), tokens(1, 9, dtype=torch.float64)
    q, k, v, g = (p(x)[0].unflatten(-1, (3, -1)) for p in (made.q_proj, made.k_proj, made.v_proj, made.g_proj))
    q, k, g = (y * torch.sigmoid(y) for y in (q, k, g))
    output = g * torch.einsum("nhd,mhd,mhe->nhe", q, k, v)
    normed = output / (output.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert relative(made(x)[0], made.o_proj(normed.flatten(1))) < 1e-10


def factors(rows, n, size=4, dtype=torch.float32):
    return [torch.randn(rows, n, last, dtype=dtype) for last in (2, 2, size, size)]


def test_a_factor_cache_refuses_what_does_not_fit():
    one, wider, half = fulmen.TPACache(), fulmen.TPACache(), fulmen.TPACache()
    one.append(*factors(3, 5))
    wider.append(*factors(1, 5, size=6))
    half.append(*factors(1, 5, dtype=torch.bfloat16))
    before = [x.clone() for x in one.factors]
    for other in (wider, half):
        with pytest.raises(ValueError, match="other must have the factors' shapes, dtype and device"):
            one.place([1], other)
        with pytest.raises(ValueError, match="other must have the factors' shapes, dtype and device"):
            one.join(other)
    with pytest.raises(ValueError, match="rows must be as many as other has, 3; got 2"):
        one.place([0, 1], one)
    with pytest.raises(TypeError, match="other must be a TPACache"):
        one.place([0], None)
    assert all(torch.equal(x, y) for x, y in zip(one.factors, before, strict=True))


def test_a_factor_cache_is_as_long_as_its_longest_row():
    one, long = fulmen.TPACache(), fulmen.TPACache()
    one.append(*factors(3, 5), lengths=torch.tensor([5, 2, 4]))
    assert one.select([1, 2]).factors[0].shape[1] == 4
    long.append(*factors(1, 9))
    one.place([0], long)
    assert one.factors[0].shape[1] == 9
    one.place(torch.tensor([0]), one.select([1]))
    assert one.factors[0].shape[1] == 4


def test_a_factor_cache_places_rows():
    one, other, given = fulmen.TPACache(capacity=4), fulmen.TPACache(capacity=4), factors(1, 9)
    one.append(*factors(3, 5), lengths=torch.tensor([5, 2, 4]))
    other.append(*given)
    one.place([1], other)
    assert one.lengths.tolist() == [5, 9, 4]
    assert one.rows == 3
    assert all(torch.equal(x[1:2], y) for x, y in zip(one.factors, given, strict=True))
    assert one.join(fulmen.TPACache()).rows == 3
    assert fulmen.TPACache().join(one).rows == 3
    with pytest.raises(RuntimeError, match="call append first"):
        _ = fulmen.TPACache().factors
