"""What a layer computes does not depend on how its tokens come: all at once, in parts, packed, padded."""

import copy
from unittest.mock import patch

import pytest
import torch
from layers import CAUSAL, HIDDEN, LAYERS, RECURRENT, gradients, layer, relative, tokens
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import fulmen
from fulmen import nn
from fulmen.lab.bench.measure import memory_use

LENGTHS = (5, 0, 1, 11)
BOUNDS = torch.tensor([0, 5, 5, 6, 17])


@pytest.mark.parametrize("name", CAUSAL)
def test_prefill_continuation_and_steps_agree(name):
    made, x, cache = layer(name), tokens(2, 21), nn.StateCache(1)
    expected, parts, sizes = made(x), [], []
    with torch.no_grad():
        for part in x.split([7, 1, 1, 6, 1, 5], 1):
            parts.append(made(part, cache=cache[0]))
            sizes.append(cache.nbytes)
    assert relative(torch.cat(parts, 1), expected) < 1e-5
    assert cache.rows == 2
    assert len({*sizes}) == 1


@pytest.mark.parametrize("name", RECURRENT)
def test_a_step_updates_states_where_they_are(name):
    made, cache = layer(name), nn.LayerCache()
    with torch.no_grad():
        made(tokens(2, 3), cache=cache)
        before = {key: state.data_ptr() for key, state in cache.states.items()}
        made(tokens(2, 1), cache=cache)
    assert {key: state.data_ptr() for key, state in cache.states.items()} == before
    assert before


@pytest.mark.parametrize("tokens_of_call", [1, 3])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("GatedDeltaNet", "KimiDeltaAttention"),
        ("GatedDeltaNet", "TensorProductAttention"),
        ("TensorProductAttention", "GatedDeltaNet"),
        ("GatedLinearAttention", "GatedLinearAttention with convolutions"),
    ],
)
def test_another_layer_s_entry_is_refused(one, other, tokens_of_call):
    cache = nn.LayerCache()
    with torch.no_grad():
        layer(one)(tokens(2, 3), cache=cache)
        before = repr(cache)
        with pytest.raises(ValueError, match="cache must be this layer's own entry"):
            layer(other)(tokens(2, tokens_of_call), cache=cache)
    assert repr(cache) == before


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_through_a_cache(name):
    """Where gradients are recorded, parts of a sequence have the gradients of the whole: one token among them."""
    made, x = layer(name), tokens(2, 9)

    def in_parts():
        cache = nn.LayerCache()
        return torch.cat([made(part, cache=cache) for part in x.split([5, 1, 3], 1)], 1)

    expected = gradients(made, lambda: made(x))
    for key, found in gradients(made, in_parts).items():
        assert relative(found, expected[key]) < 1e-4, key


@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_are_as_if_alone(name):
    made, x = layer(name), tokens(1, 17)

    def one_by_one():
        return torch.cat([made(part) for part in x.split(LENGTHS, 1)], 1)

    assert relative(made(x, cu_seqlens=BOUNDS), one_by_one()) < 1e-5
    expected = gradients(made, one_by_one)
    for key, found in gradients(made, lambda: made(x, cu_seqlens=BOUNDS.int())).items():
        assert relative(found, expected[key]) < 1e-4, key


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_sequences_go_on_each_from_its_row(name):
    made, cache = layer(name), nn.LayerCache()
    rows = [tokens(1, n, seed=i) for i, n in enumerate(LENGTHS)]
    more = [tokens(1, 3 - i % 2, seed=10 + i) for i in range(4)]
    last = tokens(4, 1, seed=20)
    bounds = torch.tensor([0, 3, 5, 8, 10])
    with torch.no_grad():
        made(torch.cat(rows, 1), cu_seqlens=BOUNDS, cache=cache)
        second = made(torch.cat(more, 1), cu_seqlens=bounds, cache=cache)
        third = made(last, cache=cache)
        for i in range(4):
            alone = made(torch.cat((rows[i], more[i], last[i : i + 1]), 1))
            found = torch.cat((second[:, bounds[i] : bounds[i + 1]], third[i : i + 1]), 1)
            assert relative(found, alone[:, LENGTHS[i] :]) < 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_padding_is_not_there(name):
    """Before, after and between the tokens; whatever it is."""
    made, x = layer(name), tokens(3, 9)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[1, 6:] = mask[2, 3:5] = 0
    padded = x.masked_fill(~mask.bool()[..., None], torch.nan)
    y = made(padded, attention_mask=mask)
    for i in range(3):
        kept = mask[i].bool()
        assert relative(y[i, kept], made(x[i : i + 1, kept])[0]) < 1e-5
    assert (y[~mask.bool()] == 0).all()
    assert torch.equal(made(x, attention_mask=torch.ones(3, 9)), made(x))
    expected = gradients(made, lambda: torch.cat([made(x[i : i + 1, mask[i].bool()]) for i in range(3)], 1))
    kept = gradients(made, lambda: made(x, attention_mask=mask.bool())[mask.bool()][None])
    for key, found in kept.items():
        assert relative(found, expected[key]) < 1e-4, key


@pytest.mark.parametrize("name", CAUSAL)
def test_padded_prompts_are_decoded_from(name):
    made, x, cache = layer(name), tokens(2, 9), nn.LayerCache()
    mask = torch.ones(2, 7)
    mask[0, :4] = 0
    with torch.no_grad():
        made(x[:, :7], cache=cache, attention_mask=mask)
        found = torch.cat([made(x[:, i : i + 1], cache=cache) for i in (7, 8)], 1)
        for i, skipped in ((0, 4), (1, 0)):
            assert relative(found[i], made(x[i : i + 1, skipped:])[0, -2:]) < 1e-5
        waiting = torch.tensor([[1], [0]])  # a row that has no token in this call
        before = cache.select([1])
        y = made(x[:, :1], cache=cache, attention_mask=waiting)
        assert (y[1] == 0).all()
        assert relative(made(x[1:, :1], cache=cache.select([1])), made(x[1:, :1], cache=before)) < 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_float32_is_float64_rounded(name):
    results = {}
    for dtype in (torch.float64, torch.float32):
        made, x = layer(name, dtype), tokens(2, 70, dtype=dtype)
        results[dtype] = {"y": made(x).detach(), **gradients(made, lambda made=made, x=x: made(x))}
    for key, expected in results[torch.float64].items():
        assert relative(results[torch.float32][key].double(), expected) < 2e-5, key


@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name):
    made, x = layer(name), tokens(2, 33)
    expected = made(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x)
        grads = gradients(made, lambda: made(x))
    assert found.dtype == torch.bfloat16
    assert relative(found.float(), expected) < 4e-2
    assert all(grad.isfinite().all() and grad.dtype == torch.float32 for grad in grads.values())
    if name in CAUSAL:
        cache = nn.LayerCache()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            parts = [made(part, cache=cache) for part in x.split([30, 1, 1, 1], 1)]
        assert relative(torch.cat(parts, 1).float(), expected) < 4e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_16_bits(name, dtype):
    made, x = layer(name), tokens(2, 33)
    found = copy.deepcopy(made).to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert relative(found.float(), made(x)) < (5e-2 if dtype == torch.bfloat16 else 6e-3)  # which has three bits more


@pytest.mark.parametrize("name", LAYERS)
def test_functional_gradients(name):
    made, x = layer(name), tokens(2, 9)
    expected = gradients(made, lambda: made(x))

    def loss(parameters):
        y = torch.func.functional_call(made, parameters, (x,))
        return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)).sum()

    for key, found in torch.func.grad(loss)(dict(made.named_parameters())).items():
        assert relative(found, expected[key]) < 1e-5, key


@pytest.mark.parametrize("name", LAYERS)
def test_from_the_meta_device(name):
    """What is made without memory and gets it later begins as if it had been made there."""
    with torch.device("meta"):
        made = LAYERS[name]()
    made.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(torch.nan)
    for module in made.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(tensor.isfinite().all() for tensor in (*made.parameters(), *made.buffers()))
    assert made(tokens(2, 9)).isfinite().all()


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_in_one_graph(name):
    compares_compiled(name, "aot_eager")


@pytest.mark.long
def test_compiled_by_inductor():
    compares_compiled("GatedDeltaNet", "inductor")


def compares_compiled(name, backend):
    torch.compiler.reset()
    made, x = layer(name), tokens(2, 9)
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    expected = gradients(made, lambda: made(x))
    for key, found in gradients(made, lambda: compiled(x)).items():
        assert relative(found, expected[key]) < 1e-4, key
    if name in RECURRENT:
        packed = tokens(1, 17)
        assert relative(compiled(packed, cu_seqlens=BOUNDS), made(packed, cu_seqlens=BOUNDS)) < 1e-5


@pytest.mark.parametrize("name", RECURRENT)
def test_a_compiled_step(name):
    torch.compiler.reset()
    made, x = layer(name), tokens(2, 9)
    compiled, cache = torch.compile(made, fullgraph=True, backend="aot_eager"), nn.LayerCache()  # states are mutated
    with torch.no_grad():
        expected = made(x)
        made(x[:, :5], cache=cache)
        places = {key: state.data_ptr() for key, state in cache.states.items()}
        found = torch.cat([compiled(x[:, i : i + 1], cache=cache) for i in range(5, 9)], 1)
    assert relative(found, expected[:, 5:]) < 1e-5
    assert {key: state.data_ptr() for key, state in cache.states.items()} == places


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointing(name):
    made, x = layer(name), tokens(2, 9)
    expected = gradients(made, lambda: made(x))
    found = gradients(made, lambda: checkpoint(made, x, use_reentrant=False))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", LAYERS)
def test_copies_are_their_own(name):
    made, x = layer(name), tokens(2, 9)
    other = copy.deepcopy(made)
    assert torch.equal(other(x), made(x))
    with torch.no_grad():
        next(other.parameters()).add_(1)
    assert not torch.equal(other(x), made(x))
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), made(x))


@pytest.mark.parametrize("name", LAYERS)
def test_q_k_and_v_are_not_copied(name):
    """Nothing as large as them is copied between a projection and the operator, nor after it."""
    made, x = layer(name), tokens(2, 200)
    with torch.no_grad(), profile(record_shapes=True, profile_memory=True) as profiled:
        made(x)
    copies = ("aten::copy_", "aten::clone", "aten::cat", "aten::contiguous", "aten::repeat_interleave")
    if name == "TensorProductAttention":  # whose rotations bring two halves together, of the factors
        copies = copies[:2]
    smallest = 2 * 200 * 10  # less than q or k has in any layer here
    found = [
        (event.name, event.input_shapes)
        for event in profiled.events()
        if event.name in copies
        and any(torch.Size(shape).numel() >= smallest for shape in event.input_shapes if shape)
        and event.cpu_parent.name != "aten::addmm"  # which begins with its bias
    ]
    assert not found


# Numbers for each token that a forward keeps beside what projections, convolutions, operators and norms return: results
# of activations (SiLU of q, k, v or the gate; Mamba-2's x · dt), gates and what they are made of, the norms' factor of
# each row. Of tensor-product attention also q, k and v, which are made of factors.
KEPT = {
    "LightningAttention": 72 + 1,
    "GatedLinearAttention": 2 * 12 + 2,
    "GatedLinearAttention with convolutions": 2 * 12 + 2,
    "Mamba2": 48 + 4 * 6 + 1,
    "GatedDeltaNet": 3 * 4,
    "KimiDeltaAttention": 2 * 12 + 2,
    "TensorProductAttention": 81,
    "OutputGatedAttention": 72 + 3,
}
OPERATORS = ("causal_conv1d", "linear_attention", "delta_rule", "output_gated_attention")


@pytest.mark.parametrize("name", LAYERS)
def test_memory_of_a_layer(monkeypatch, name):
    """A copy of q, k or v would be 12 numbers for each token or more. Products are torch's: the workspace of ours is of
    one size however many tokens there are."""
    monkeypatch.setattr(fulmen.nn.linear, "SLOW", frozenset())
    made, x, returned = layer(name), tokens(2, 2000), {}

    def keep(y):
        returned[y.untyped_storage().data_ptr()] = y

    def watched(operator):
        def run(*inputs, **options):
            y = operator(*inputs, **options)
            keep(y)
            return y

        return run

    parts = [m for m in made.modules() if isinstance(m, (torch.nn.Linear, nn.RMSNorm))]
    hooks = [part.register_forward_hook(lambda part, inputs, y: keep(y)) for part in parts]
    with patch.multiple(fulmen, **{name: watched(getattr(fulmen, name)) for name in OPERATORS}):
        made(x)
    for hook in hooks:
        hook.remove()
    total, number = sum(y.nbytes for y in returned.values()), x.shape[0] * x.shape[1] * x.element_size()
    kept = (memory_use(lambda: made(x)).held - total) / number
    assert kept < KEPT[name] + 0.5
    if name != "TensorProductAttention":
        with torch.no_grad():
            assert memory_use(lambda: made(x)).peak < total + 6.5 * number


@pytest.mark.parametrize("name", LAYERS)
def test_repr_says_sizes(name):
    shown = repr(layer(name))
    assert f"{HIDDEN}, heads=" in shown
    assert "key size=" in shown
    assert "value size=" in shown


@pytest.mark.parametrize("name", LAYERS)
def test_nonsense_is_refused_by_name(name):
    made, x = layer(name), tokens(2, 9)
    cases = {
        "x must have shape": {"x": x[..., :-1]},
        "attention_mask must have shape": {"x": x, "attention_mask": torch.ones(2, 8)},
        "x must have B = 1": {"x": x, "cu_seqlens": BOUNDS},
        "attention_mask must be None": {"x": x[:1], "cu_seqlens": BOUNDS, "attention_mask": torch.ones(1, 9)},
    }
    for message, arguments in cases.items():
        with pytest.raises(ValueError, match=message):
            made(arguments.pop("x"), **arguments)
    with pytest.raises(TypeError, match="x must be a torch"):
        made(3)
    with pytest.raises(TypeError, match=r"x must be float32, .* got torch.int64"):
        made(x.long())
    with pytest.raises(TypeError, match="unexpected keyword"):
        made(x, past_key_values=None)
    if name in CAUSAL:
        with pytest.raises(TypeError, match=r"cache\[i\]"):
            made(x, cache=nn.StateCache(1))
        cache = nn.LayerCache()
        with torch.no_grad():
            made(x, cache=cache)
        with pytest.raises(ValueError, match="cache must have a row for each of 3 sequences; got 2"):
            made(tokens(3, 1), cache=cache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LightningAttention(24, 5), "num_heads must divide hidden_size"),
        (lambda: nn.LightningAttention(24, 3, layer=4, num_layers=4), "layer must be 0 to"),
        (lambda: nn.GatedLinearAttention(24, 5), "num_heads must divide"),
        (lambda: nn.Mamba2(24, 3, num_groups=2), "num_groups must divide num_heads"),
        (lambda: nn.GatedDeltaNet(24, 4, num_key_heads=3), "num_key_heads must divide num_heads"),
        (lambda: nn.KimiDeltaAttention(24, 0), "num_heads must be at least 1"),
        (lambda: nn.TensorProductAttention(24, 2, 5), "head_dim must be even"),
        (lambda: nn.OutputGatedAttention(24, 5), "num_heads must divide"),
        (lambda: nn.slopes(4, layer=1), "given together"),
        (lambda: nn.RMSNorm(4, gate="tanh"), "gate must be one of"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Of Linear, torch decides what its sizes may be.
@pytest.mark.parametrize("size", [0, -8])
@pytest.mark.parametrize("name", [x for x in nn.__all__ if hasattr(getattr(nn, x), "forward") and x != "Linear"])
def test_a_layer_has_channels(name, size):
    what = "size" if name == "RMSNorm" else "hidden_size"
    with pytest.raises(ValueError, match=f"{what} must be at least 1; got {size}"):
        getattr(nn, name)(size)


def test_attention_with_a_cache_refuses_gradients():
    with pytest.raises(ValueError, match="cache must be None where gradients are recorded"):
        layer("TensorProductAttention")(tokens(1, 3), cache=nn.LayerCache())
