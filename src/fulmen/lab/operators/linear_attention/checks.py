"""linear_attention, linear_attention_step and chunk_states against the float64 recurrence, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import fulmen
from fulmen.lab.operators.linear_attention import cases
from fulmen.lab.operators.linear_attention.cases import ALL_DECAYS, Case
from fulmen.lab.precision import GPU_STYLE, OURS, TORCH, Comparison
from fulmen.lab.tolerances import TOLERANCE, Results, deviations, relative_error
from fulmen.lab.verify.check import DTYPES, Check, Target
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.chunks.decay_form import tokens_of
from fulmen.ops.chunks.validation import SCHEDULES

# Ragged, not a multiple of anything, and more than one chunk of every kernel.
RAGGED = Case(batch=1, length=67, key_size=20, value_size=9, scale=0.3)
# Where the contract of bfloat16 has its own bound, and sums of products count more than rounding the result.
LARGE = Case(length=200, key_size=128, value_size=128, dtype=torch.bfloat16)
LONG = 32768


def checks(target: Target) -> Iterator[Check]:
    for case, schedule in attention_cases(target):
        yield Check("linear_attention", describe(case, schedule), partial(attention, target, case, schedule))
    ragged = ragged_case(target)
    for decays in ("none", "channel+value") if target.quick else ALL_DECAYS:
        for dtype in DTYPES[:1] if target.quick else DTYPES:
            case = ragged.of(decays=decays, dtype=dtype, length=5)
            yield Check("linear_attention_step", describe(case), partial(steps, target, case))
            case = ragged.of(decays=decays, dtype=dtype)
            yield Check("chunk_states", describe(case), partial(states, target, case))
    for decays in ("head",) if target.quick else ("head", "token", "channel"):
        case = (ragged if target.interpreted else LARGE).of(decays=decays, dtype=torch.bfloat16)
        what = f"decays that are not learned, {describe(case)}"
        yield Check("linear_attention", what, partial(without_decay_gradients, target, case))
        yield Check("chunk_states", what, partial(states, target, case, learns_decays=False))
    for decays in ("head",) if target.quick else ("head", "token", "channel+value"):
        case = ragged.of(decays=decays, dtype=torch.bfloat16)
        if target.device == "cuda":  # enough to keep all of it busy
            case = case.of(batch=4, length=4000, key_size=128, value_size=128)
        yield Check("linear_attention", f"the same bits twice, {describe(case)}", partial(twice, target, case))
    if not target.interpreted:
        yield Check("linear_attention", f"the state of {LONG} tokens without decay", partial(long_sum, target))


def ragged_case(target: Target) -> Case:
    return RAGGED.of(length=19, heads=(1, 1, 1)) if target.interpreted and target.quick else RAGGED


def attention_cases(target: Target) -> Iterator[tuple[Case, str]]:
    """Every decay in every dtype; then lengths, schedules, packed sequences, shared heads and extreme decays."""
    if target.quick:
        ragged = ragged_case(target)
        for decays, dtype in zip(("none", "head", "token", "channel+value"), (*DTYPES, torch.bfloat16), strict=True):
            yield ragged.of(decays=decays, dtype=dtype), "auto"
        yield ragged.of(decays="token", packed=(0, 18, 1)), "parallel"
        return
    yield from ((RAGGED.of(decays=decays, dtype=dtype), "auto") for decays in ALL_DECAYS for dtype in DTYPES)
    for decays in ("none", "head", "token", "channel", "channel+value"):
        yield from ((Case(decays=decays, length=length), "auto") for length in (0, 1, 64, 130, 257))
        yield from ((RAGGED.of(decays=decays, length=300), schedule) for schedule in SCHEDULES)
        yield RAGGED.of(decays=decays, packed=(0, 33, 150, 0, 1), heads=(1, 2, 2)), "auto"
        yield RAGGED.of(decays=decays, packed=(0, 33, 150, 0, 1), heads=(4, 2, 1)), "parallel"
        yield RAGGED.of(decays=decays, initial=False), "auto"
        if decays != "none":
            yield from (
                (RAGGED.of(decays=decays, values=v), "auto") for v in ("zero", "tiny", "strong", "mixed", "forget")
            )
        if target.device == "cuda":
            for dim in (64, 128, 256):
                yield LARGE.of(decays=decays, length=1000, key_size=dim, value_size=dim), "auto"
        elif not target.interpreted:
            yield LARGE.of(decays=decays), "auto"


def describe(case: Case, schedule: str = "") -> str:
    words = [case.decays, str(case.dtype).removeprefix("torch."), f"n = {case.packed or case.length}"]
    words += [f"{case.key_size}×{case.value_size}"] + [case.values] * (case.values != "random")
    words += ["no initial state"] * (not case.initial) + [schedule] * (schedule not in ("", "auto"))
    return ", ".join(words)


def attention(target: Target, case: Case, schedule: str) -> list[str]:
    results = cases.run(case, target.device, schedule=schedule, backend=target.backend)
    return deviations(results, cases.exact(case), target.backend, partial(cases.yardstick, case))


def without_decay_gradients(target: Target, case: Case) -> list[str]:
    """A backward that no decay's gradient is requested from may multiply in bfloat16 what others do not."""
    results = run_frozen(case, target.device, target.backend)
    exact = {name: cases.exact(case)[name] for name in results}
    return deviations(results, exact, target.backend, partial(cases.yardstick, case))


def run_frozen(case: Case, device: str, backend: str, without: str = "") -> Results:
    leaves = frozen_decays(cases.inputs(case, device))
    output, state = fulmen.linear_attention(**leaves, scale=case.scale, return_state=True, backend=backend)
    return cases.differentiate(case, learned(leaves), output, state, without)


def frozen_decays(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: x.detach() if "decay" in name else x for name, x in leaves.items()}


def learned(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in leaves.items() if x.requires_grad}


def twice(target: Target, case: Case) -> list[str]:
    first, second = (cases.run(case, target.device, backend=target.backend) for _ in range(2))
    return [f"{name} differs from call to call" for name, x in first.items() if not torch.equal(x, second[name])]


def long_sum(target: Target) -> list[str]:
    """Σ k vᵀ: sums that are rounded as they grow, rather than once for each chunk, lose digits here."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, LONG, 2, 64, generator=generator).bfloat16().to(target.device) for _ in range(3))
    _, state = fulmen.linear_attention(q, k, v, scale=1.0, return_state=True, schedule="loop", backend=target.backend)
    exact = torch.einsum("bnhd,bnhe->bhde", k.double().cpu(), v.double().cpu())
    return deviations({"state": state}, {"state": exact}, target.backend)


def steps(target: Target, case: Case) -> list[str]:
    """Token by token; outputs of 16 bits may be off by one rounding more than those of the whole."""
    results, expected = run_steps(target, case), cases.exact(case)
    errors = {
        "output": relative_error(results["output"], expected["output"]) / (2 * TOLERANCE[case.dtype]),
        "state": relative_error(results["state"], expected["state"]) / TOLERANCE[torch.float32],
    }
    return [f"{name}: {error:.1f} times the error allowed" for name, error in errors.items() if not error <= 1]


def run_steps(target: Target, case: Case) -> Results:
    given = {name: x.to(target.device) for name, x in cases.tensors(case).items()}
    state, outputs = given["initial_state"].clone(), []
    for t in range(case.length):
        names = [name for name in ("q", "k", "v", "log_decay", "log_decay_v") if name in given]
        token: dict[str, Any] = {name: tokens_of(given[name], t) for name in names}
        outputs.append(fulmen.linear_attention_step(**token, state=state, scale=case.scale, backend=target.backend))
    return {"output": torch.stack(outputs, 1), "state": state}


def states(target: Target, case: Case, learns_decays: bool = True) -> list[str]:
    """And all their gradients."""
    results = run_states(cases.inputs(case, target.device), target.backend, learns_decays)
    return deviations(
        results, exact_states(case, learns_decays), target.backend, lambda: yardstick_states(case, learns_decays)
    )


def run_states(leaves: dict[str, Any], backend: str, learns_decays: bool) -> Results:
    del leaves["q"]
    if not learns_decays:
        leaves = frozen_decays(leaves)
    result = fulmen.chunk_states(**leaves, chunk_size=16, backend=backend)
    # Some cotangent that is the same everywhere.
    cotangent = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape).to(result)
    grads = torch.autograd.grad(result, list(learned(leaves).values()), cotangent)
    return {"states": result.detach()} | {f"d{name}": g for name, g in zip(learned(leaves), grads, strict=True)}


def exact_states(case: Case, learns_decays: bool) -> Results:
    leaves = {name: x.detach().double().requires_grad_() for name, x in cases.inputs(case).items()}
    return run_states(leaves, "reference", learns_decays)


@rounded_products()
def yardstick_states(case: Case, learns_decays: bool) -> Results:
    return run_states(cases.inputs(case), "torch", learns_decays)


# ---- fulmen precision ------------------------------------------------------------------------------------------------


def comparisons(target: Target) -> Iterator[Comparison]:
    """Without gradients of decays, which are float32 whatever the inputs."""
    typical = LARGE.of(batch=1, length=80 if target.quick else 1024, initial=False)
    for decays in ("none", "head", "token", "channel"):
        case = typical.of(decays=decays)
        exact, ours = cases.exact(case, "grad_state"), run_frozen(case, target.device, target.backend, "grad_state")
        with rounded_products():
            found = {OURS: ours, GPU_STYLE: run_frozen(case, "cpu", "torch", "grad_state")}
        if decays != "channel":
            found[TORCH] = in_plain_torch(case)
        yield Comparison(f"linear_attention, {decays}", {name: exact[name] for name in ours}, found)
    for decays in ("head", "channel"):
        case = typical.of(decays=decays)
        ours = run_states(cases.inputs(case, target.device), target.backend, False)
        found = {OURS: ours, GPU_STYLE: yardstick_states(case, False)}
        yield Comparison(f"chunk_states, {decays}", exact_states(case, False), found)
    case = typical.of(decays="token", length=64, initial=True)
    ours = run_steps(target, case)
    yield Comparison("linear_attention_step, token", {name: cases.exact(case)[name] for name in ours}, {OURS: ours})


def in_plain_torch(case: Case) -> Results:
    """The masked product of the whole sequence, which has no state."""
    leaves = frozen_decays(cases.inputs(case))
    q, k, v = (leaves[name].transpose(1, 2) for name in "qkv")
    scores = case.factor * (q @ k.mT)
    if "log_decay" in leaves:
        sums = leaves["log_decay"].expand(*leaves["q"].shape[:3]).cumsum(1).transpose(1, 2)
        scores = scores * (sums[..., None] - sums[..., None, :]).tril().exp().to(scores)
    output = (scores.tril() @ v).transpose(1, 2)
    grads = torch.autograd.grad(output, list(learned(leaves).values()), cases.tensors(case)["grad_output"])
    return {"output": output.detach()} | {f"d{name}": g for name, g in zip(learned(leaves), grads, strict=True)}
