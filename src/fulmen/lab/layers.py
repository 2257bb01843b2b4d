"""Small models of fulmen.nn's layers: what of their time is neither a matrix product nor an operator of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import profile, record_function

import fulmen
from fulmen.lab.bench.figures import Call, Figure
from fulmen.lab.bench.measure import interleaved
from fulmen.nn import GatedDeltaNet, GatedLinearAttention, LayerCache, RMSNorm
from fulmen.nn.linear import FEW_ROWS, SLOW
from fulmen.nn.mixer import Mixer
from fulmen.nn.native_matmul import matmul

HIDDEN, LAYERS, LENGTH = 512, 4, 1024
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "fulmen::matmul")
OURS = "fulmen::"
STEPS = ("causal_conv1d_step", "linear_attention_step", "delta_rule_step")
MIXERS: dict[str, Callable[[], Mixer]] = {
    "GLA": lambda: GatedLinearAttention(HIDDEN, 4),
    "GDN": lambda: GatedDeltaNet(HIDDEN, 4),
}


class Model(nn.Module):
    """Norm, mixer and residual, layer by layer: without MLPs, whose products would only make the rest look less."""

    def __init__(self, mixer: Callable[[], Mixer]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(HIDDEN) for _ in range(LAYERS))
        self.mixers = nn.ModuleList(mixer() for _ in range(LAYERS))

    def forward(self, x: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        for i, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            x = x + mixer(norm(x), cache=None if caches is None else caches[i])
        return x


def model(name: str) -> Model:
    torch.manual_seed(0)
    return Model(MIXERS[name])


def training_step(name: str) -> Call:
    """Forward, backward, AdamW."""
    made, x = model(name), torch.randn(1, LENGTH, HIDDEN)
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)

    @torch.enable_grad()
    def step() -> None:
        optimizer.zero_grad()
        made(x).square().mean().backward()
        optimizer.step()

    return step


def shares(step: Call, repeats: int = 5) -> dict[str, float]:
    """Parts of the time of a step, by what takes it, the largest first."""
    for _ in range(2):
        step()
    with profile() as profiled:
        for _ in range(repeats):
            with record_function("step"):
                step()
    spent: Counter[str] = Counter()
    (whole,) = (event for event in profiled.key_averages() if event.key == "step")
    for event in profiled.events():
        if event.name == "step" or _inside(event):
            continue
        if event.name in PRODUCTS:
            spent["products"] += event.cpu_time_total
        elif event.name.startswith(OURS):
            spent["operators"] += event.cpu_time_total
        else:
            spent[event.name] += event.self_cpu_time_total
    spent["Python"] = whole.cpu_time_total - sum(spent.values())
    return {what: time / whole.cpu_time_total for what, time in spent.most_common()}


def _inside(event: Any) -> bool:
    """Whether an event belongs to a product or to one of our operators."""
    parent = event.cpu_parent
    while parent is not None and parent.name not in PRODUCTS and not parent.name.startswith(OURS):
        parent = parent.cpu_parent
    return parent is not None


def training() -> list[Figure]:
    figures = []
    for name in MIXERS:
        found = shares(training_step(name))
        outside = 100 * (1 - found["products"] - found["operators"])
        what = f"training step of {LAYERS} {name} layers, C{HIDDEN} n{LENGTH}, outside of products and operators"
        note = ", ".join(f"{part} {100 * share:.1f}%" for part, share in found.items() if share > 0.01)
        figures.append(Figure(what, outside, 45, 30, "%", True, note))
    return figures


@torch.no_grad()
def decode_step(name: str) -> dict[str, Call]:
    """A decode step of one sequence, and by itself what its modules call, on what it had in one and in the same order:
    the linear layers alone, as torch computes them, with the operators, and with the norms too. "modules" is the step
    where something watches the layers, so that they call their modules (:mod:`fulmen.nn.step`)."""
    made, token = model(name).eval(), torch.randn(1, 1, HIDDEN)
    caches, calls = [LayerCache() for _ in range(LAYERS)], list[tuple[str, Call]]()

    def recorded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(*args: Any, **options: Any) -> Tensor:
            calls.append(("operator", partial(function, *args, **options)))
            return function(*args, **options)

        return record

    def linear(module: nn.Linear, args: tuple[Any, ...]) -> None:
        calls.append(("linear", partial(functional.linear, args[0], module.weight, module.bias)))

    def norm(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append(("norm", partial(module, *args)))

    made(torch.randn(1, 16, HIDDEN), caches)
    hooks = [m.register_forward_pre_hook(linear) for m in made.modules() if isinstance(m, nn.Linear)]
    hooks += [m.register_forward_pre_hook(norm) for m in made.modules() if isinstance(m, RMSNorm)]
    replaced: dict[str, Any] = {step: recorded(getattr(fulmen, step)) for step in STEPS}
    with patch.multiple(fulmen, **replaced):
        made(token, caches)
    for hook in hooks:
        hook.remove()
    assert sum(kind == "operator" for kind, _ in calls) >= LAYERS, "not every layer has made a step"

    def only(*kinds: str) -> Call:
        chosen = [call for kind, call in calls if kind in kinds]
        return lambda: [call() for call in chosen]

    watched = deepcopy(made, {id(weight): weight for weight in made.parameters()})  # the same ones, in the same caches
    for mixer in watched.mixers:
        mixer.register_forward_pre_hook(lambda *_: None)

    timed: dict[str, Call] = {
        "step": lambda: made(token, caches),
        "modules": lambda: watched(token, caches),
        "linears": only("linear"),
        "parts": only("linear", "operator"),
        "with norms": only("linear", "operator", "norm"),
    }
    return {what: torch.no_grad()(call) for what, call in timed.items()}


def decoding() -> list[Figure]:
    figures = []
    for name in MIXERS:
        t = {what: time.median for what, time in interleaved(decode_step(name), seconds=2.0, repeats=100).items()}
        what = f"decode step of {LAYERS} {name} layers, C{HIDDEN} B1, over its linear layers and operators"
        costs = {
            "a layer": t["step"],
            "linear layers by themselves": t["linears"],
            "operators": t["parts"] - t["linears"],
            "norms": t["with norms"] - t["parts"],
            "a layer whose modules are called": t["modules"],
        }
        note = ", ".join(f"{part} {1e6 * cost / LAYERS:.0f} us" for part, cost in costs.items())
        figures.append(Figure(what, t["step"] / t["parts"], 1.3, 1.15, "x", True, note))
    return figures


PRODUCT = (2048, 1024, 4384)  # tokens, inputs and outputs: the projection of a Mamba-2 of hidden size 1024


def products() -> list[Figure]:
    """Of a linear layer in bfloat16 and of its gradient, against torch's of the same numbers in float32."""
    if torch.bfloat16 not in SLOW:
        print("left out: products of linear layers, as torch has fast ones of bfloat16 on this CPU")
        return []
    # Of how many rows torch's own is measured in bfloat16: of all, those of the gradient take minutes.
    few = {"forward": PRODUCT[0], "gradient of x": 4, "gradient of the weight": 256}
    figures = []
    for what, (a, b) in _factors().items():
        ours, theirs, low = _product_rates(a, b, few[what])
        note = f"{ours:.1f} GFLOP/s, torch's float32 {theirs:.1f}, its bfloat16 {low:.1f}"
        figures.append(_of_product("bf16", what, "rate over torch's float32", ours / theirs, 0.8, 1.0, note))
    return figures


def float_products() -> list[Figure]:
    """The same of float32, where torch's are slow."""
    if torch.float32 not in SLOW:
        print("left out: products of linear layers in float32, which are torch's on this CPU")
        return []
    figures = []
    for what, (a, b) in _factors().items():
        calls: dict[str, Call] = {"ours": partial(matmul, a, b, None), "torch": partial(functional.linear, a, b)}
        t = {name: time.median for name, time in interleaved(calls, seconds=3.0, repeats=7).items()}
        ours, theirs = (2e-9 * len(a) * b.numel() / t[name] for name in ("ours", "torch"))
        note = f"{ours:.0f} GFLOP/s, torch {theirs:.0f}"
        figures.append(_of_product("fp32", what, "rate over torch's", ours / theirs, 1.0, 1.5, note))
    return figures


def _factors() -> dict[str, tuple[Tensor, Tensor]]:
    """a and b of the products a bᵀ of a linear layer and of its gradients."""
    tokens, inputs, outputs = PRODUCT
    x, weight, grad = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    return {"forward": (x, weight), "gradient of x": (grad, weight.T), "gradient of the weight": (grad.T, x.T)}


def _of_product(dtype: str, what: str, rate: str, measured: float, must: float, aim: float, note: str) -> Figure:
    tokens, inputs, outputs = PRODUCT
    title = f"{dtype} linear layer, n{tokens} C{inputs} to {outputs}, {what}, {rate}"
    return Figure(title, measured, must, aim, "x", False, note)


def _product_rates(a: Tensor, b: Tensor, few: int) -> tuple[float, float, float]:
    """GFLOP/s: ours in bfloat16, torch's in float32, torch's in bfloat16 of a few rows."""
    low_a, low_b = a.bfloat16(), b.bfloat16()
    calls: dict[str, Call] = {
        "ours": lambda: matmul(low_a, low_b, None),
        "float32": lambda: a @ b.T,
        "bfloat16": lambda: low_a[:few] @ low_b.T,
    }
    t = {name: time.median for name, time in interleaved(calls, seconds=3.0, repeats=7).items()}
    row = 2e-9 * b.numel()
    return row * len(a) / t["ours"], row * len(a) / t["float32"], row * few / t["bfloat16"]


UNCACHED = 2**28  # bytes of weights that no cache keeps from call to call


@torch.no_grad()
def few_rows() -> list[Figure]:
    """Of a linear layer in float32, as in a decode step: against torch's, and against reading the weights once."""
    if torch.float32 not in FEW_ROWS:
        print("left out: few rows of linear layers, which are torch's on this CPU")
        return []
    _, inputs, outputs = PRODUCT
    weights = [torch.randn(outputs, inputs) for _ in range(UNCACHED // (4 * inputs * outputs))]
    following = cycle(weights)

    def calls_of(x: Tensor) -> dict[str, Call]:
        return {
            "ours": lambda: matmul(x, next(following), None),
            "torch": lambda: functional.linear(x, next(following)),
            "sum": lambda: next(following).sum(),
        }

    figures = []
    for rows in (1, 2, 4, 8):
        calls = calls_of(torch.randn(rows, inputs))
        t = {name: time.median for name, time in interleaved(calls, seconds=2.0, repeats=30).items()}
        title = f"linear layer of {rows} rows, C{inputs} to {outputs}, torch's time over it"
        note = f"{1e3 * t['ours']:.2f} ms, torch {1e3 * t['torch']:.2f}, the sum of its weights {1e3 * t['sum']:.2f}"
        figures.append(Figure(title, t["torch"] / t["ours"], 1.0, 1.3, "x", False, note))
    return figures


LIMITS = (training, decoding, products, float_products, few_rows)
