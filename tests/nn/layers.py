"""A small one of each layer, the same at each call."""

import torch

from fulmen import nn

HIDDEN = 24
CAUSAL = {
    "LightningAttention": lambda: nn.LightningAttention(HIDDEN, 3, layer=1, num_layers=4),
    "GatedLinearAttention": lambda: nn.GatedLinearAttention(HIDDEN, 2),
    "GatedLinearAttention with convolutions": lambda: nn.GatedLinearAttention(HIDDEN, 2, conv_size=4, conv_bias=True),
    "Mamba2": lambda: nn.Mamba2(HIDDEN, head_dim=8, state_size=6, num_groups=2, time_step_limit=(0.0, 0.5)),
    "GatedDeltaNet": lambda: nn.GatedDeltaNet(HIDDEN, 4, num_key_heads=2, key_size=6, value_size=5),
    "KimiDeltaAttention": lambda: nn.KimiDeltaAttention(HIDDEN, 2, 6, conv_size=3),
    "TensorProductAttention": lambda: nn.TensorProductAttention(HIDDEN, 3, 6, q_rank=4, rank=2),
}
LAYERS = CAUSAL | {"OutputGatedAttention": lambda: nn.OutputGatedAttention(HIDDEN, 3)}
RECURRENT = [name for name in CAUSAL if name != "TensorProductAttention"]


def layer(name, dtype=torch.float32):
    """With weights so large that every part of it counts."""
    torch.manual_seed(0)
    made = LAYERS[name]()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return made.to(dtype)


def tokens(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative(found, expected):
    """How far found is from expected, in parts of its largest magnitude."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def gradients(made, call):
    """Of all parameters, of the weighed sum of what ``call`` computes."""
    made.zero_grad()
    y = call()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    (y * weights).sum().backward()
    return {name: parameter.grad for name, parameter in made.named_parameters()}
