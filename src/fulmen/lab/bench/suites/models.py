"""Models of transformers as they are and patched, and the functions that make the difference.

A section is a family in one phase, or a function. Sizes are those of a mixer: H heads of D channels, with states of R;
a model's hidden size is half of H · D. A decode step comes after n cached tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fulmen.lab.bench import owners
from fulmen.lab.bench.families import FAMILIES, VOCABULARY, model
from fulmen.lab.bench.prepared import Prepare, Prepared
from fulmen.lab.bench.suite import Column, Input, Preset, Sizes, Suite, Text, Work

TAKES = ("x", "dt", "b", "c")
KERNEL = 4  # taps of a convolution

# ---- models ----------------------------------------------------------------------------------------------------------


# As it is and patched, at the sizes that are checked and those that are measured; and for a check in float32.
@lru_cache(maxsize=5)
def _model(family: str, hidden: int, dtype: torch.dtype, device: torch.device, patched: bool) -> Any:
    made = model(family, hidden, dtype).to(device)
    if patched:
        from fulmen.integrations.transformers import patch

        patch(made)
    return made


def _embedded(x: Tensor) -> Tensor:
    """``[B, N, H, D]`` as tokens ``[B, N, hidden]``."""
    return x.flatten(2)[..., ::2].contiguous()


def _prefill(make: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Tensor]:
    """All tokens of a prompt, as `generate` begins: into a cache, and logits of the last."""
    tokens, whole = _embedded(x), make(x)

    @torch.no_grad()
    def run() -> Tensor:
        return whole(inputs_embeds=tokens, use_cache=True, logits_to_keep=1).logits

    return run


def _decode(make: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Tensor]:
    """One token, after all the others."""
    tokens, whole = _embedded(x), make(x)
    with torch.no_grad():
        before = whole(inputs_embeds=tokens[:, :-1], use_cache=True, logits_to_keep=1)
    name = "cache_params" if hasattr(before, "cache_params") else "past_key_values"
    state = {name: before[name], "use_cache": True}
    if "position_ids" in signature(whole.forward).parameters:  # else Bamba and MiniMax count cached tokens wrongly
        state["position_ids"] = torch.full((tokens.shape[0], 1), tokens.shape[1] - 1, device=x.device)

    @torch.no_grad()
    def run() -> Tensor:
        return whole(inputs_embeds=tokens[:, -1:], **state).logits

    return run


def _training(make: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Tensor]:
    """Forward and backward of a cross entropy; gradients of all weights, and as the result that of the tokens."""
    tokens, whole = _embedded(x).requires_grad_(), make(x).train()
    labels = torch.arange(tokens.shape[1], device=x.device).expand(tokens.shape[:2]) % VOCABULARY
    leaves = [tokens, *(p for p in whole.parameters() if p.requires_grad)]

    def run() -> Tensor:
        logits = whole(inputs_embeds=tokens, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        gradient = torch.autograd.grad(loss, leaves, allow_unused=True)[0]
        assert gradient is not None
        return gradient

    return run


PHASES = {"prefill": _prefill, "decode": _decode, "training": _training}


def _lightning(make: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Tensor]:
    """The first layer's attention alone."""
    tokens, layer = _embedded(x), make(x).model.layers[0].self_attn

    @torch.no_grad()
    def run() -> Tensor:
        return layer(tokens, position_embeddings=None, attention_mask=None)[0]

    return run


LIGHTNING = "MiniMax lightning attention"


def _of_model(family: str, prepare: Prepare, check: Prepare) -> tuple[Column, ...]:
    """Of a family's models; ``check`` gives what ``prepare`` should, in float32, which is as far as transformers'
    functions go."""

    def make(x: Tensor, patched: bool = False) -> Any:
        return _model(family, x.shape[2] * x.shape[3] // 2, x.dtype, x.device, patched).eval()

    def exact(x: Tensor) -> Tensor:
        return check(make, x.float())().double()

    ours = partial(prepare, partial(make, patched=True))
    return _pair(("x",), partial(prepare, make), ours, exact)


def _family(family: str, phase: str) -> tuple[Column, ...]:
    # A decoded token is what a prefill says of it, without a cache.
    check = PHASES["prefill" if phase == "decode" else phase]
    return _of_model(family, PHASES[phase], check)


# ---- functions -------------------------------------------------------------------------------------------------------


def _scan(function: Callable[..., Any], x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Callable[[], Tensor]:
    A, D, bias = _per_head(x)

    @torch.no_grad()
    def run() -> Tensor:
        arguments = {"D": D, "dt_bias": bias, "dt_softplus": True, "return_final_states": True}
        return function(x, dt, A, b, c, chunk_size=256, **arguments)[0]

    return run


def _state_update(function: Callable[..., Any], x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Callable[[], Tensor]:
    """The last token alone, on a state of zeros that it goes on from."""
    A, D, bias = _per_head(x)
    _, _, heads, channels = x.shape
    size = b.shape[-1]
    state = x.new_zeros(x.shape[0], heads, channels, size, dtype=torch.float32)
    wide = {"D": D[:, None].expand(-1, channels), "dt_bias": bias[:, None].expand(-1, channels), "dt_softplus": True}
    A = A[:, None, None].expand(-1, channels, size)
    token, step = x[:, -1].contiguous(), dt[:, -1, :, None].expand(-1, -1, channels)
    key, query = b[:, -1].contiguous(), c[:, -1].contiguous()

    @torch.no_grad()
    def run() -> Tensor:
        return function(state, token, step, A, key, query, **wide)

    return run


def _per_head(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A, D and the bias of dt, as Mamba-2 begins with them."""
    ramp = torch.linspace(1.0, 16.0, x.shape[2], device=x.device)
    return -ramp, torch.ones_like(ramp).to(x.dtype), (-ramp / 4).to(x.dtype)


def _convolution(function: Callable[..., Any], x: Tensor) -> Callable[[], Tensor]:
    """Over q, k and v side by side, each H · D channels, handed over as ``[B, C, N]``."""
    channels, weight, bias = _channels(x)
    signal = channels.transpose(1, 2)

    @torch.no_grad()
    def run() -> Tensor:
        return function(signal, weight, bias, activation="silu")

    return run


def _convolution_update(function: Callable[..., Any], x: Tensor) -> Callable[[], Tensor]:
    channels, weight, bias = _channels(x[:, -KERNEL - 1 :])
    before, token = channels[:, :-1].transpose(1, 2).contiguous(), channels[:, -1:].transpose(1, 2).contiguous()

    @torch.no_grad()
    def run() -> Tensor:
        return function(token, before, weight, bias, activation="silu")

    return run


def _channels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.flatten(2).repeat(1, 1, 3)
    taps = torch.linspace(-0.5, 0.5, KERNEL, device=x.device).to(x.dtype)
    return channels, taps.repeat(channels.shape[2], 1), taps.repeat(channels.shape[2])[: channels.shape[2]]


FUNCTIONS: dict[str, tuple[Callable[..., Callable[[], Tensor]], tuple[str, ...]]] = {
    "mamba2_chunk_scan": (_scan, TAKES),
    "mamba2_selective_state_update": (_state_update, TAKES),
    "causal_conv1d_fn": (_convolution, ("x",)),
    "causal_conv1d_update": (_convolution_update, ("x",)),
}


def _function(name: str) -> tuple[Column, ...]:
    prepare, takes = FUNCTIONS[name]

    def theirs(*tensors: Tensor) -> Callable[[], Tensor]:
        from transformers.models.mamba2 import modeling_mamba2

        return prepare(getattr(modeling_mamba2, name), *tensors)

    def ours(*tensors: Tensor) -> Callable[[], Tensor]:
        from fulmen.integrations.transformers import functions

        return prepare(functions.OURS[name], *tensors)

    def exact(*tensors: Tensor) -> Tensor:
        return theirs(*(x.float() for x in tensors))().double()

    return _pair(takes, theirs, ours, exact)


def _pair(takes: tuple[str, ...], theirs: Prepare, ours: Prepare, exact: Callable[..., Tensor]) -> tuple[Column, ...]:
    common: dict[str, Any] = {"takes": takes, "exact": exact, "least": _least, "needs": "transformers"}
    return (
        Column(
            "transformers",
            "transformers",
            "as transformers runs it",
            pros="Nothing to do",
            cons="Loops and copies in torch",
            function=Prepared(theirs),
            owner=owners.theirs("transformers"),
            **common,
        ),
        Column(
            "patched",
            "Fulmen, patched",
            "after patch(model)",
            pros="The same model, one line",
            cons="An integration to maintain",
            function=Prepared(ours),
            **common,
        ),
    )


def _least(sizes: Sizes, n: int) -> Mapping[str, Work]:
    return {}  # whole models have no roofline here


FIGURES = (
    *(f"Mamba2 {phase}" for phase in PHASES),
    *(f"Qwen3.5 {phase}" for phase in PHASES),
    "FalconH1 prefill",
    LIGHTNING,
    *FUNCTIONS,
)

SUITE = Suite(
    name="models",
    about="models of transformers, small and with random weights, as they are and patched",
    text=Text(
        title="Models of transformers",
        subject="Models of transformers as they are and after `patch(model)`: prefill, decode, training, functions.",
        algorithm="Mamba-2, lightning attention and short convolutions inside of whole models",
        formula="patch(model)",
        complexity=("linear in n, but for the layers of softmax attention that hybrids have",),
    ),
    axis="n",
    baseline="transformers",
    modes=("fwd",),
    sections={f"{family} {phase}": _family(family, phase) for family in FAMILIES for phase in PHASES}
    | {LIGHTNING: _of_model("MiniMax", _lightning, _lightning)}
    | {name: _function(name) for name in FUNCTIONS},
    inputs={"x": Input("B N H D"), "dt": Input("B N H"), "b": Input("B N 1 R"), "c": Input("B N 1 R")},
    presets={
        # The figures of docs/models.md.
        "published": Preset((Sizes(1, 32, 64, 128),), (1024, 2048), sections=FIGURES),
        "laptop": Preset((Sizes(1, 32, 64, 128),), (1024, 2048)),
        "quick": Preset(
            (Sizes(1, 8, 64, 128),),
            (256,),
            sections=("Mamba2 prefill", "Mamba2 decode", *FUNCTIONS),
        ),
    },
    one_token=lambda section: section.endswith(("decode", "update")),
    check_sizes=lambda sizes: Sizes(sizes.batch, 8, 16, 32),
)
