"""Layers of fulmen.nn with the weights of transformers' own compute what these compute."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import build, relative
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from fulmen import nn

HIDDEN = 32
MAMBA2 = {"head_dim": 16, "state_size": 16, "num_groups": 2}
GDN = {"num_key_heads": 2, "key_size": 8, "value_size": 8}
OURS = {
    "MiniMax": lambda: nn.LightningAttention(HIDDEN, 2, 16, layer=0, num_layers=2),
    "Mamba2": lambda: nn.Mamba2(HIDDEN, 4, **MAMBA2),
    "Bamba": lambda: nn.Mamba2(HIDDEN, 4, **MAMBA2),
    "GraniteMoeHybrid": lambda: nn.Mamba2(HIDDEN, 4, **MAMBA2, norm_eps=1e-6),
    "NemotronH": lambda: nn.Mamba2(HIDDEN, 4, **MAMBA2, norm_groups=2, time_step_limit=(1e-3, float("inf"))),
    "Zamba2": lambda: nn.Mamba2(HIDDEN, 4, **MAMBA2, norm_groups=2, time_step_limit=(1e-3, float("inf"))),
    "Qwen3Next": lambda: nn.GatedDeltaNet(HIDDEN, 4, **GDN),
    "Qwen3_5": lambda: nn.GatedDeltaNet(HIDDEN, 4, **GDN),
    "Qwen3_5Moe": lambda: nn.GatedDeltaNet(HIDDEN, 4, **GDN),
    "Qwen4Exp": lambda: nn.GatedDeltaNet(HIDDEN, 4, **GDN),
    "KimiLinear": lambda: nn.KimiDeltaAttention(HIDDEN, 2, 16),
}
CLASSES = {
    "MiniMax": "MiniMaxLightningAttention",
    "Mamba2": "Mamba2Mixer",
    "Bamba": "BambaMixer",
    "GraniteMoeHybrid": "GraniteMoeHybridMambaLayer",
    "NemotronH": "NemotronHMamba2Mixer",
    "Zamba2": "Zamba2MambaMixer",
    "Qwen3Next": "Qwen3NextGatedDeltaNet",
    "Qwen3_5": "Qwen3_5GatedDeltaNet",
    "Qwen3_5Moe": "Qwen3_5MoeGatedDeltaNet",
    "Qwen4Exp": "Qwen4ExpTextGatedDeltaNet",
    "KimiLinear": "KimiLinearDeltaAttention",
}


class Theirs:
    """A mixer with random weights, called token by token or all at once."""

    def __init__(self, name):
        model = build(name)
        self.mixer = next(m for m in model.modules() if type(m).__name__ == CLASSES[name])
        torch.manual_seed(2)
        for (
            parameter
        ) in self.mixer.parameters():  # transformers' own are so small that nothing but the skips would count
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        self.cache = MiniMaxCache() if name == "MiniMax" else DynamicCache(config=model.config)
        self.is_minimax = name == "MiniMax"

    def __call__(self, x, mask=None, cached=False):
        cache = self.cache if cached else None
        if self.is_minimax:
            return self.mixer(x, None, mask, past_key_values=cache)[0]
        return self.mixer(x, cache_params=cache, attention_mask=mask)


@pytest.fixture(params=OURS)
def pair(request):
    theirs, ours = Theirs(request.param), OURS[request.param]()
    ours.load_state_dict(theirs.mixer.state_dict())
    return theirs, ours


def hidden_states(*shape):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_outputs_and_gradients(pair):
    theirs, ours = pair
    x = hidden_states(2, 19).requires_grad_()
    results = []
    for layer in (theirs, ours):
        y = layer(x)
        (dx,) = torch.autograd.grad((y * hidden_states(2, 19).flip(1)).sum(), x)
        results.append((y, dx))
    for expected, found in zip(*results, strict=True):
        assert relative(found, expected) < 1e-4


def test_prefill_and_decoding(pair):
    theirs, ours = pair
    x, cache = hidden_states(2, 12), nn.StateCache(1)
    with torch.no_grad():
        if isinstance(ours, nn.Mamba2):  # their steps do not keep dt in its limits, as ours do: here it is within
            for mixer in (theirs.mixer, ours):
                mixer.dt_bias.add_(4)
        for begin, end in ((0, 9), (9, 10), (10, 11), (11, 12)):
            part = x[:, begin:end]
            assert relative(ours(part, cache=cache[0]), theirs(part, cached=True)) < 1e-4


def test_left_padding(pair):
    theirs, ours = pair
    x, mask = hidden_states(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        found, expected = (layer(x, mask) for layer in (lambda x, mask: ours(x, attention_mask=mask), theirs))
    assert relative(found[mask.bool()], expected[mask.bool()]) < 1e-4


@pytest.mark.parametrize("name", [name for name in OURS if name not in ("Qwen3Next", "MiniMax")])
def test_weights_go_back(name):
    """Names and shapes are the same, so that a trained layer is a mixer's weights."""
    theirs, ours = Theirs(name), OURS[name]()
    theirs.mixer.load_state_dict(ours.state_dict())
    with torch.no_grad():
        x = hidden_states(1, 7)
        assert relative(ours(x), theirs(x)) < 1e-4
