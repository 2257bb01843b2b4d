"""Inputs, the float64 oracle and the tolerances that all tests of linear attention share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

import fulmen
from fulmen.linear_attention.problem import share_heads
from fulmen.linear_attention.reference import read_out, states_of, token_decay

BACKENDS = [name for name, backend in fulmen.backends().items() if not backend.refuses("cpu", torch.float32)]
SCHEDULES = ("auto", "recurrent", "loop", "parallel", "recompute")
FORMS = ("none", "head", "token", "key", "key+value")  # the published ones; the other combinations are tested too
ALL_FORMS = (*FORMS, "value", "head+value", "token+value")

# The largest error allowed, relative to the largest magnitude of the exact tensor. For 16-bit types it is half a unit
# in the last place of a result, no more; for float32 it is what e^-90 costs (its exponent is known to 90 · 6e-8).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Backends that carry what crosses a chunk from border to border subtract once for each chunk, and get looser limits for
# the gradient of a decay in float32: for [H], one number for all tokens of all samples whose terms are of either sign,
# and where the decay leaves less than SMALLEST of its terms, which are of order 1 before it weighs them.
SUBTRACT = ("native", "triton")
TOLERANCE_PER_HEAD = 1e-4
SMALLEST_DECAY_GRADIENT = 1e-2


@dataclass(frozen=True)
class Case:
    batch: int = 2
    length: int = 65
    heads: tuple[int, int, int] = (2, 2, 2)  # of q, k and v
    key_dim: int = 16
    value_dim: int = 16
    form: str = "head"
    values: str = "random"
    scale: float = 1.0
    initial: bool = True
    packed: tuple[int, ...] | None = None  # lengths of packed sequences
    dtype: torch.dtype = torch.float32
    decay_dtype: torch.dtype = torch.float32

    def of(self, **changes: object) -> Case:
        return replace(self, **changes)

    @property
    def bounds(self) -> list[int] | None:
        if self.packed is None:
            return None
        return [0, *torch.tensor(self.packed).cumsum(0).tolist()]


def log_decays(values: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log-decays of the named kind. The extreme ones put very different magnitudes side by side."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    if values == "random":
        return torch.nn.functional.logsigmoid(torch.randn(shape, generator=generator, dtype=torch.float64))
    choices = {
        "zero": [0.0],
        "tiny": [-1e-8],
        "strong": [-30.0],
        "mixed": [-90.0, -1e-3, -1e-3, -1e-3],
        "forget": [-torch.inf, -0.1, -0.01, -1e-3, -0.5],
    }[values]
    return torch.tensor(choices, dtype=torch.float64)[(uniform * len(choices)).long()]


@lru_cache(maxsize=64)
def tensors(case: Case) -> dict[str, Tensor]:
    """Every tensor of the call, and the cotangents of output and state, rounded to the case's dtypes."""
    generator = torch.Generator().manual_seed(hash(case.length) + case.key_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    batch, length = (1, sum(case.packed)) if case.packed else (case.batch, case.length)
    heads, (hq, hk, hv) = max(case.heads), case.heads
    states = len(case.packed) if case.packed else batch
    key_form, _, value_form = case.form.partition("+")
    shapes = {"head": (heads,), "token": (batch, length, heads), "key": (batch, length, heads, case.key_dim)}
    single = torch.float64 if case.dtype == torch.float64 else torch.float32
    decay_dtype = torch.float64 if case.dtype == torch.float64 else case.decay_dtype
    made = {
        "q": (normal(batch, length, hq, case.key_dim) * case.key_dim**-0.5).to(case.dtype),
        "k": normal(batch, length, hk, case.key_dim).to(case.dtype),
        "v": normal(batch, length, hv, case.value_dim).to(case.dtype),
    }
    if key_form in shapes:
        made["decay"] = log_decays(case.values, shapes[key_form], generator).to(decay_dtype)
    if "value" in (key_form, value_form):
        made["decay_v"] = log_decays(case.values, (batch, length, heads, case.value_dim), generator).to(decay_dtype)
    if case.initial:
        made["initial_state"] = normal(states, heads, case.key_dim, case.value_dim).to(single)
    made["grad_output"] = normal(batch, length, heads, case.value_dim).to(case.dtype)
    made["grad_state"] = normal(states, heads, case.key_dim, case.value_dim).to(single)
    return made


def inputs(case: Case) -> dict[str, Tensor]:
    """The call's tensors as fresh leaves."""
    return {
        name: x.clone().requires_grad_()
        for name, x in tensors(case).items()
        if name not in ("grad_output", "grad_state")
    }


def run(case: Case, **options: object) -> dict[str, Tensor]:
    """Output, final state and all gradients of ``fulmen.linear_attention``."""
    leaves = inputs(case)
    cu_seqlens = None if case.bounds is None else torch.tensor(case.bounds)
    output, state = fulmen.linear_attention(
        **leaves, scale=case.scale, return_state=True, cu_seqlens=cu_seqlens, **options
    )
    return Results(differentiate(case, leaves, output, state), str(options.get("backend", "")))


class Results(dict[str, Tensor]):
    """Results that know which backend they are of."""

    def __init__(self, results: dict[str, Tensor], backend: str) -> None:
        super().__init__(results)
        self.backend = backend


def differentiate(
    case: Case, leaves: dict[str, Tensor], output: Tensor, state: Tensor, without: str = ""
) -> dict[str, Tensor]:
    """The results by name, and the gradients of all ``leaves``; ``without`` names a cotangent to leave out (zero)."""
    cotangents = [tensors(case)[name] * (name != without) for name in ("grad_output", "grad_state")]
    cotangents = [cotangents[0].to(output.dtype), cotangents[1].to(state.dtype)]
    pairs = [(x, g) for x, g in zip((output, state), cotangents, strict=True) if x.requires_grad]
    grads = [None] * len(leaves)
    if pairs:
        results, cotangents = zip(*pairs, strict=True)
        grads = torch.autograd.grad(results, list(leaves.values()), cotangents, allow_unused=True)
    results = {"output": output.detach(), "state": state.detach()}
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        results[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
    return results


@lru_cache(maxsize=64)
def exact(case: Case, without: str = "") -> dict[str, Tensor]:
    """The same from the recurrence in float64, differentiated by autograd."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs(case).items()}
    bounds = case.bounds or [0, leaves["q"].shape[1]]
    heads = max(case.heads)
    q, k, v = (share_heads(leaves[name], heads) for name in "qkv")
    a, c = token_decay(leaves.get("decay"), k), token_decay(leaves.get("decay_v"), v)
    outputs, finals = [], []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        rows = slice(i, i + 1) if case.packed else slice(None)
        tokens = slice(start, stop)
        state = (
            leaves["initial_state"][rows]
            if case.initial
            else q.new_zeros(1 if case.packed else case.batch, heads, case.key_dim, case.value_dim)
        )
        part_a, part_c = (None if x is None else x[:, tokens] for x in (a, c))
        states = states_of(k[:, tokens], v[:, tokens], part_a, part_c, state)
        outputs.append(read_out(q[:, tokens], states, case.scale))
        finals.append(states[-1])
    return differentiate(case, leaves, torch.cat(outputs, 1), torch.cat(finals), without)


def assert_close(results: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """Each result, by name, within the tolerance of its dtype."""
    subtracts = getattr(results, "backend", SUBTRACT[0]) in SUBTRACT
    for name, want in expected.items():
        got = results[name]
        assert got.shape == want.shape, f"{what} {name}: shape {list(got.shape)}, expected {list(want.shape)}"
        assert torch.isfinite(got).all(), f"{what} {name} is not finite"
        error, tolerance = relative_error(got, want), TOLERANCE[got.dtype]
        if name.startswith("ddecay") and got.dtype == torch.float32 and subtracts:
            error = relative_error(got, want, SMALLEST_DECAY_GRADIENT)
            tolerance = TOLERANCE_PER_HEAD if want.ndim == 1 else tolerance
        assert error <= tolerance, f"{what} {name}: off by {error:.1e}, allowed {tolerance:.1e}"


def relative_error(got: Tensor, want: Tensor, smallest: float = 1e-30) -> float:
    """The largest error over the largest magnitude, or over ``smallest`` where that is larger. Below 1e-30 (what is
    left of a state after e^-90 a few times over) float32 runs out of digits."""
    if want.numel() == 0:
        return 0.0
    return (got.double() - want).abs().max().item() / max(want.abs().max().item(), smallest)
