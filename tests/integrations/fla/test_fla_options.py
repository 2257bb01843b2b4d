"""What FLA's functions have beside their mathematics: layouts, precisions, weights, refusals, compilation."""

import re
import runpy
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from cases import assert_close, relative_error
from fulmen.integrations import fla

B, T, H, K, V = 2, 9, 3, 8, 12
V_FIRST = [name for name in fla.__all__ if "state_v_first" in signature(getattr(fla, name)).parameters]

OTHER_INPUTS = ("chunk_gsa", "chunk_hgrn", "chunk_rwkv6")
CHUNKS = [name for name in fla.__all__ if name.startswith("chunk") and name not in OTHER_INPUTS]


def inputs(name, dtype=torch.float32, tokens=T):
    """What any function that takes q, k and v needs, by name."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, tokens, H, size, generator=rng) for size in (K, K, V))
    made = {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v}
    takes = signature(getattr(fla, name)).parameters
    g = logsigmoid(torch.randn(B, tokens, H, *((K,) if name.endswith(("_gla", "_kda")) else ()), generator=rng))
    if name.endswith("simple_gla"):
        g = g[..., 0]
    made |= {"g": g} if "g" in takes else {}
    made |= {"gk": g} if name == "fused_recurrent_gla" else {}
    made |= {"beta": torch.rand(B, tokens, H, generator=rng)} if "beta" in takes else {}
    made |= {"layer_idx": 0, "num_layers": 2} if "layer_idx" in takes else {}
    return {n: x.to(dtype) if isinstance(x, torch.Tensor) else x for n, x in made.items()}


@pytest.mark.parametrize("name", V_FIRST)
def test_state_v_first(name):
    function, given = getattr(fla, name), inputs(name)
    initial = torch.randn(B, H, K, V)
    output, state = function(**given, initial_state=initial, output_final_state=True)
    again, turned = function(
        **given, initial_state=initial.mT.contiguous(), output_final_state=True, state_v_first=True
    )
    torch.testing.assert_close((again, turned), (output, state.mT.contiguous()))
    assert turned.is_contiguous()


@pytest.mark.parametrize("name", CHUNKS)
def test_half_precision(name):
    function, initial = getattr(fla, name), torch.randn(B, H, K, V).bfloat16()
    given = inputs(name, torch.bfloat16)
    options = {"initial_state": initial, "output_final_state": True}
    options |= {"normalize": False} if "normalize" in signature(function).parameters else {}
    output, state = function(**given, **options)
    exact = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    wanted, last = function(**exact, **(options | {"initial_state": initial.double()}))
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(output, wanted) < 2**-6  # factors of products are rounded too
    assert relative_error(state, last) < 2**-6


def test_nothing_overflows_where_the_result_does_not():
    """In float16, whose largest number is 65504: a first token's read of its state, and sums that are divided."""
    r = torch.zeros(1, 2, 1, K)
    r[..., 0] = 200
    state = torch.zeros(1, 1, K, K)
    state[..., 0, 0] = 400
    zeros, u = torch.zeros_like(r), torch.zeros(1, K)
    for packed in (None, torch.tensor([0, 2])):
        found = fla.chunk_rwkv6(
            r.half(), zeros.half(), zeros.half(), zeros.half(), u, 1e-3, state.half(), cu_seqlens=packed
        )
        assert found[0][..., 0].flatten().tolist() == [80, 80]
    ones = torch.ones(1, 20000, 1, 64, dtype=torch.float16)
    assert (fla.chunk_linear_attn(ones, ones, ones)[0] == 1).all()


def test_half_precision_of_slots_and_bonus():
    q, k, v = (torch.randn(B, T, H, size) for size in (K, K, V))
    s, g, u = torch.randn(B, T, H, 4), logsigmoid(torch.randn(B, T, H, K)), torch.randn(H, K)
    states = torch.randn(B, H, K, 4), torch.randn(B, H, 4, V)
    for function, given, initial in (
        (fla.chunk_gsa, (q, k, v, s, g[..., :4]), states),
        (fla.chunk_rwkv6, (q, k, v, g, u), (torch.randn(B, H, K, V),)),
    ):
        half = [x.bfloat16() for x in (*given, *initial)]
        results = []
        for dtype in (torch.bfloat16, torch.float64):
            *rest, last = [x.to(dtype) for x in half]
            first = rest[:5]
            state = (rest[5], last) if len(initial) == 2 else last
            results.append(function(*first, initial_state=state, output_final_state=True))
        assert results[0][0].dtype == torch.bfloat16
        assert relative_error(results[0][0], results[1][0]) < 2**-6


@pytest.mark.parametrize("tokens", [T, 515], ids=["short", "longer-than-a-head"])
@pytest.mark.parametrize("name", ["parallel_simple_gla", "parallel_retention"])
def test_attentions(name, tokens):
    given = inputs(name, torch.float64, tokens)
    output, weights = getattr(fla, name)(**given, output_attentions=True)
    g = given.get("g", fla.retention.log_decay(given["q"]).double().expand(B, tokens, H))
    sums = g.cumsum(1).transpose(1, 2)
    wanted = torch.einsum("bqhd,bkhd->bhqk", given["q"], given["k"]) * K**-0.5
    wanted = (wanted * (sums[..., :, None] - sums[..., None, :]).exp()).tril()
    assert_close({"output": weights}, {"output": wanted})
    assert_close({"output": output}, {"output": torch.einsum("bhqk,bkhd->bqhd", wanted, given["v"])})
    assert getattr(fla, name)(**given)[1] is None
    with pytest.raises(ValueError, match="output_attentions"):
        getattr(fla, name)(**given, output_attentions=True, cu_seqlens=torch.tensor([0, tokens]))


def test_parallel_with_packed_sequences():
    q, k, v, g = (x[:1] for x in inputs("parallel_simple_gla").values())
    cu_seqlens = torch.tensor([0, 4, T])
    wanted = fla.chunk_simple_gla(q, k, v, g, cu_seqlens=cu_seqlens)[0]
    torch.testing.assert_close(fla.parallel_simple_gla(q, k, v, g, cu_seqlens=cu_seqlens)[0], wanted)


def test_what_is_returned_without_a_final_state():
    q = torch.rand(B, T, H, K)
    assert fla.chunk_gla(q, q, q, -q)[1] is None
    assert fla.chunk_gsa(q, q, q, q, -q)[1] == (None, None)
    state, z = fla.chunk_linear_attn(q, q, q)[1]
    assert state is None
    torch.testing.assert_close(z, q.sum(1, keepdim=True))


@pytest.mark.parametrize("channels", [1, 512, 1025])
def test_hgrn_of_any_width(channels):
    x, g, h = torch.randn(B, 5, channels), logsigmoid(torch.randn(B, 5, channels)), torch.randn(B, channels)
    output, last = fla.chunk_hgrn(x, g, h, True)
    for t in range(5):
        h = g[:, t].exp() * h + x[:, t]
        torch.testing.assert_close(output[:, t], h)
    torch.testing.assert_close(last, h)


@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(name, tokens):
    initial = torch.randn(B, H, K, V)
    output, state = getattr(fla, name)(**inputs(name, tokens=tokens), initial_state=initial, output_final_state=True)
    assert output.shape == (B, tokens, H, V)
    if tokens == 0:
        torch.testing.assert_close(state, initial)


def test_rwkv6_without_tokens():
    empty, initial = torch.zeros(B, 0, H, K), torch.randn(B, H, K, K)
    output, state = fla.chunk_rwkv6(empty, empty, empty, empty, torch.ones(H, K), None, initial, True)
    assert output.shape == (B, 0, H, K)
    torch.testing.assert_close(state, initial)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("chunk_gla", {"g": torch.zeros(B, T, H)}, ValueError, r"g must have shape \[B, T, H, K\]"),
        ("chunk_gla", {"g": None}, TypeError, "g must be a torch.Tensor"),
        ("chunk_simple_gla", {"g": torch.zeros(B, T, H, K)}, ValueError, r"g must have shape \[B, T, H\]"),
        ("chunk_simple_gla", {"g_gamma": torch.zeros(H)}, ValueError, "g and g_gamma"),
        ("chunk_gated_delta_rule", {"g": torch.zeros(B, T, H, K)}, ValueError, "g must have shape"),
        ("chunk_gated_delta_rule", {"beta": torch.zeros(B, T, H, V)}, ValueError, "beta must have shape"),
        ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, ValueError, "A_log must be given"),
        ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
        ("chunk_gated_delta_rule", {"cp_context": object()}, NotImplementedError, "cp_context"),
        ("chunk_kda", {"cp_context": object()}, NotImplementedError, "cp_context"),
        ("chunk_kda", {"return_intermediate_states": True}, NotImplementedError, "return_intermediate_states"),
        ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True}, ValueError, "lower_bound"),
        ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0}, ValueError, "lower_bound"),
        (
            "chunk_kda",
            {"use_gate_in_kernel": True, "A_log": torch.zeros(H + 1)},
            ValueError,
            r"A_log must have shape \[HV\]",
        ),
        (
            "chunk_kda",
            {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "dt_bias": torch.zeros(H)},
            ValueError,
            r"dt_bias must have shape \[HV \* K\]",
        ),
        ("chunk_gla", {"cu_seqlens": torch.tensor([0, T])}, ValueError, "B = 1"),
    ],
)
def test_refusals(name, options, error, message):
    with pytest.raises(error, match=message):
        getattr(fla, name)(**(inputs(name) | options))


X = torch.zeros(B, T, H, K)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fla.chunk_rwkv6(X.int(), X, X, X, X[0, 0]), TypeError, "r must be float32"),
        (lambda: fla.chunk_rwkv6(X[..., 1:], X, X, X, X[0, 0]), ValueError, "r must have shape"),
        (lambda: fla.chunk_hgrn(X[0].int(), X[0]), TypeError, "x must be float32"),
        (lambda: fla.chunk_hgrn(X, X), ValueError, "x must have 3 dimensions"),
        (lambda: fla.chunk_hgrn(X[0], X[0], torch.zeros(T, K + 1)), ValueError, "initial_state must have shape"),
        (lambda: fla.chunk_gsa(X, X, X, X[:, 1:]), ValueError, "s must have shape"),
        (lambda: fla.chunk_gsa(X, X, X, None), TypeError, "s must be a torch.Tensor"),
        (lambda: fla.chunk_gsa(X, X, X, X, initial_state=X), TypeError, "initial_state must be a pair"),
        (
            lambda: fla.chunk_linear_attn(X, X, X, initial_state=(None, X[:, 0])),
            ValueError,
            "z of initial_state must have shape",
        ),
    ],
)
def test_refusals_name_fla_s_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", [name for name in fla.__all__ if not name.endswith("_hgrn")])
def test_inputs_that_are_missing_are_named(name):
    required = [p for p in signature(getattr(fla, name)).parameters.values() if p.default is p.empty]
    given = {p.name: X for p in required}
    for missing in [name for name in given if name in ("q", "k", "v", "r")]:
        with pytest.raises(TypeError, match=f"^{missing} must be a torch.Tensor"):
            getattr(fla, name)(**(given | {missing: None}))


def test_compiled():
    """In one graph each, in reverse and packed where that is."""
    q, k, v, g = (torch.randn(1, T, H, K) for _ in range(4))
    g, beta, cu_seqlens = logsigmoid(g), torch.rand(1, T, H), torch.tensor([0, 4, T])
    initial = torch.randn(2, H, K, K)

    def every(q, k, v, g, beta, cu_seqlens, initial):
        options = {"initial_state": initial, "output_final_state": True, "cu_seqlens": cu_seqlens}
        return [
            fla.fused_recurrent_simple_gla(q, k, v, g[..., 0], reverse=True, **options),
            fla.fused_recurrent_linear_attn(q, k, v, normalize=True, cu_seqlens=cu_seqlens),
            fla.fused_recurrent_rwkv6(q, k, v, g, g[0, 0], reverse=True, **options),
            fla.fused_recurrent_hgrn(q.flatten(2), g.flatten(2), cu_seqlens=cu_seqlens),
            fla.chunk_gsa(q, k, v, v, g, cu_seqlens=cu_seqlens),
            fla.fused_recurrent_gated_delta_rule(q, k, v, g[..., 0], g, g, beta, **options),
            fla.chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, A_log=g[0, 0, :, 0], **options),
        ]

    given = q, k / k.norm(dim=-1, keepdim=True), v, g, beta, cu_seqlens, initial
    compiled = torch.compile(every, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), every(*given))


def test_the_example(capsys, monkeypatch):
    example = Path(__file__).parents[3] / "examples" / "migrate_from_fla.py"
    monkeypatch.setattr(
        sys, "argv", [str(example), "--hidden", "32", "--heads", "2", "--tokens", "64", "--steps", "60"]
    )
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", printed))
    assert last < 0.9 * first
    assert float(re.search(r"whole row to (\S+)", printed)[1]) < 1e-5
