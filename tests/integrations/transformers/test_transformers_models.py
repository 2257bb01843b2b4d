"""Every family computes patched what it computes by itself."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import CONFIGS, DELTA_RULE, MAMBA2, build, relative, tokens  # noqa: E402

import fulmen  # noqa: E402
from fulmen.integrations.transformers import patch  # noqa: E402
from fulmen.nn import native_scan  # noqa: E402
from fulmen.runtime import core  # noqa: E402

ATTENTION = {"linear_attention", "linear_attention_step"}
SCAN = {"scan", "linear_attention_step"} if core.core else ATTENTION
DELTA = {"delta_rule", "delta_rule_step"}
CONVOLUTION = {"causal_conv1d", "causal_conv1d_step"}
# One of each kind of forward, where the kind is what matters.
KINDS = ("Mamba2", "FalconH1", "MiniMax", "Lfm2", "Qwen3_5")


def expected_of(name):
    """The operators that a family's mixers come to."""
    if name == "MiniMax":
        return ATTENTION
    return CONVOLUTION | (SCAN if name in MAMBA2 else DELTA if name in DELTA_RULE else set())


@pytest.fixture
def called(monkeypatch):
    """The operators that were called."""
    names = set()

    def spied(name, operator):
        return lambda *args, **kwargs: (names.add(name), operator(*args, **kwargs))[1]

    for name in ATTENTION | DELTA | CONVOLUTION:
        monkeypatch.setattr(fulmen, name, spied(name, getattr(fulmen, name)))
    monkeypatch.setattr(native_scan, "scan", spied("scan", native_scan.scan))
    return names


def conversation(model, ids):
    """Logits of a prefill, a decoded token, several tokens that continue, and another token."""
    parts, cache = [], {}
    for begin, end in ((0, 9), (9, 10), (10, 16), (16, 17)):
        output = model(ids[:, begin:end], use_cache=True, **cache)
        name = "cache_params" if hasattr(output, "cache_params") else "past_key_values"
        cache = {name: output[name]}
        parts.append(output[0])
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_decoding_and_continuation(name, called):
    model, ids = build(name), tokens(2, 17)
    with torch.no_grad():
        before = conversation(model, ids)
        with patch(model):
            # transformers counts the positions of a MiniMax wrongly where it continues: the whole at once is right
            right = before if name != "MiniMax" else model(ids, use_cache=False)[0]
            assert relative(conversation(model, ids), right) < 1e-4
            assert relative(model(ids, use_cache=False)[0][:, :9], before[:, :9]) < 1e-4
        assert called == expected_of(name)
        assert torch.equal(conversation(model, ids), before)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
def test_left_padding(name):
    model, ids = build(name), tokens(2, 17)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask)[0]
        patch(model)
        after = model(ids, attention_mask=mask)[0]
        alone = model(ids[:1, 6:])[0]
    assert relative(after[mask.bool()], before[mask.bool()]) < 1e-4
    if name not in ("MiniMax", "Lfm2"):  # whose positions are counted from the padding on
        assert relative(after[:1, 6:], alone) < 1e-4


def gradients(model, ids):
    model.train()
    model.zero_grad()
    output = model(ids, use_cache=False)[0]
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_training(name):
    """As unpatched or, where that is off by as much itself, as in float64."""
    model, ids = build(name), tokens(2, 17)
    before, unpatched = gradients(model, ids), copy.deepcopy(model)
    patch(model)
    after = gradients(model, ids)
    model.gradient_checkpointing_enable()
    checkpointed = gradients(model, ids)
    assert before.keys() == after.keys() == checkpointed.keys()
    whole = torch.cat([gradient.flatten() for gradient in before.values()]).norm()
    for parameter, gradient in before.items():
        scale = gradient.norm() + 1e-5 * whole  # some, as of a bias inside a softplus, are next to nothing
        if not (after[parameter] - gradient).norm() < 1e-4 * scale:
            exact = gradients(copy.deepcopy(unpatched).double(), ids)[parameter]
            assert (after[parameter] - exact).norm() < 1e-4 * scale, parameter
        assert (checkpointed[parameter] - after[parameter]).norm() < 1e-4 * scale, parameter


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_as_close_to_float32(name):
    model, ids = build(name), tokens(4, 65)
    with torch.no_grad():
        exact = model(ids, use_cache=False)[0]
        model.bfloat16()
        before = (model(ids, use_cache=False)[0].float() - exact).norm()
        patch(model)
        after = (model(ids, use_cache=False)[0].float() - exact).norm()
    assert after <= 1.1 * before, (after / exact.norm(), before / exact.norm())


# Of Glm5Next there is no text model that generates.
GENERATING = [name for name in CONFIGS if name != "Glm5Next"]


@pytest.mark.parametrize(
    ("how", "name"),
    [*(("padded", name) for name in GENERATING)]
    + [(how, name) for how in ("greedy", "sampling", "beam") for name in KINDS],
)
def test_generate(how, name):
    """One of two rows is padded where it is said; the other never is."""
    model, ids = build(name), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = how != "padded"
    options = {"do_sample": how == "sampling", "num_beams": 3 if how == "beam" else 1, "attention_mask": mask}

    def text(**more):
        torch.manual_seed(0)
        return model.generate(ids, max_new_tokens=6, **options, **more)

    before = text(use_cache=name != "MiniMax")  # whose cache forgets to reorder its states when beams change
    patch(model)
    assert torch.equal(text(), before)


def test_minimax_reorders_its_states():
    """transformers' MiniMaxCache does not: the states of one beam are read by another."""
    with torch.no_grad():
        model, ids = build("MiniMax"), tokens(2, 7)
        patch(model)
        cache = model(ids).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        next_tokens = tokens(2, 1, seed=3)
        after = model(next_tokens, past_key_values=cache)[0]
        whole = model(torch.cat((ids.flip(0), next_tokens), 1))[0][:, -1:]
    assert relative(after, whole) < 1e-4
