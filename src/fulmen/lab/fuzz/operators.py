"""The public functions as the fuzzer calls them: tensors by name, and one call for every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fulmen
from fulmen.lab.fuzz.problem import Problem, Setting
from fulmen.lab.operators.causal_conv1d import cases as convolution
from fulmen.lab.operators.delta_rule import cases as delta
from fulmen.lab.operators.linear_attention import cases as attention
from fulmen.lab.operators.output_gate import checks as gate
from fulmen.lab.operators.tpa import checks as tpa
from fulmen.ops.chunks.decay_form import tokens_of

Tensors = dict[str, Tensor]
# Their overloads are about a literal return_state.
_linear_attention: Callable[..., Any] = fulmen.linear_attention
_delta_rule: Callable[..., Any] = fulmen.delta_rule
_causal_conv1d: Callable[..., Any] = fulmen.causal_conv1d


class Subject(NamedTuple):
    """
    Attributes:
        folder: of the operator.
        tensors: of a case; those of ``grad_*`` are the gradients of results.
        call: gives the results by name; of a step, the ``state`` that it was handed, too.
        differentiable: whether it has gradients.
        rounds: whether bfloat16 results are held to arithmetic with rounded factors (:mod:`fulmen.lab.yardstick`).
        keeps: whether that arithmetic rounds what a setting has kept for the backward, too.
    """

    folder: str
    tensors: Callable[[Problem], Tensors]
    call: Callable[[Problem, dict[str, Any], Setting], Tensors]
    differentiable: bool = True
    rounds: bool = True
    keeps: bool = False


def _both(problem: Problem, found: Any) -> Tensors:
    return {"output": found} if problem.without == "state" else dict(zip(("output", "state"), found, strict=True))


def _attend(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    case, state = problem.case, problem.without != "state"
    bounds = None if case.bounds is None else torch.tensor(case.bounds, device=given["q"].device)
    return _both(problem, _linear_attention(
        **given, scale=case.scale, return_state=state, cu_seqlens=bounds, schedule=setting.schedule,
        backend=setting.backend,
    ))  # fmt: skip


def _one_token(tensors: Tensors) -> Tensors:
    """Of a sequence, the first."""
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        if name == "initial_state":
            found["state"] = x
        elif name.startswith("log_decay"):
            found[name] = tokens_of(x, 0)
        elif not name.startswith("grad"):
            found[name] = x[:, 0]
    return found


def _step(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    output = fulmen.linear_attention_step(**given, scale=problem.case.scale, backend=setting.backend)
    return {"output": output, "state": given["state"]}


def _state_tensors(problem: Problem) -> Tensors:
    found = {name: x for name, x in attention.tensors(problem.case).items() if name not in ("q", "grad_output")}
    state = found.pop("grad_state")
    chunks = -(-found["k"].shape[1] // problem.chunk_size)
    found["grad_states"] = torch.stack([state.roll(i, -1) for i in range(chunks + 1)], 2)
    return found


def _states(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    schedule = setting.schedule
    return {"states": fulmen.chunk_states(
        **given, chunk_size=problem.chunk_size, schedule=schedule, backend=setting.backend
    )}  # fmt: skip


def _delta(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    options = delta.options(problem.case, str(given["q"].device))
    return _both(problem, _delta_rule(
        **given, **options, return_state=problem.without != "state", schedule=setting.schedule, backend=setting.backend
    ))  # fmt: skip


def _delta_step(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    case = problem.case
    output = fulmen.delta_rule_step(**given, normalize_qk=case.normalizes, scale=case.scale, backend=setting.backend)
    return {"output": output, "state": given["state"]}


def _convolve(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    case = problem.case
    return _both(problem, _causal_conv1d(
        **given, activation=case.activation, return_state=problem.without != "state",
        cu_seqlens=convolution.cu_seqlens(case, str(given["x"].device)), backend=setting.backend,
    ))  # fmt: skip


def _convolve_step(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    output = fulmen.causal_conv1d_step(**given, activation=problem.case.activation, backend=setting.backend)
    return {"output": output, "state": given["state"]}


def _convolution_token(problem: Problem) -> Tensors:
    found = convolution.tensors(problem.case)
    kept = {name: found[name] for name in ("weight", "bias") if name in found}
    return kept | {"x": found["x"][:, 0], "state": found["initial_state"]}


def _decode(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    return {"output": fulmen.tpa_decode(**given, split=setting.schedule, backend=setting.backend)}


def _gate_tensors(problem: Problem) -> Tensors:
    return dict(zip(("q", "k", "v", "gate", "grad_output"), gate.tensors(problem.case), strict=True))


def _gate(problem: Problem, given: dict[str, Any], setting: Setting) -> Tensors:
    save = () if setting.schedule == "auto" else tuple(setting.schedule.split("+"))
    return {"output": fulmen.output_gated_attention(**given, save=save, backend=setting.backend)}


SUBJECTS = {
    "linear_attention": Subject("linear_attention", lambda p: attention.tensors(p.case), _attend),
    "linear_attention_step": Subject(
        "linear_attention", lambda p: _one_token(attention.tensors(p.case)), _step, differentiable=False, rounds=False
    ),
    "chunk_states": Subject("linear_attention", _state_tensors, _states),
    "delta_rule": Subject("delta_rule", lambda p: delta.tensors(p.case), _delta),
    "delta_rule_step": Subject(
        "delta_rule", lambda p: _one_token(delta.tensors(p.case)), _delta_step, differentiable=False, rounds=False
    ),
    "causal_conv1d": Subject("causal_conv1d", lambda p: convolution.tensors(p.case), _convolve, rounds=False),
    "causal_conv1d_step": Subject(
        "causal_conv1d", _convolution_token, _convolve_step, differentiable=False, rounds=False
    ),
    "tpa_decode": Subject(
        "tpa",
        lambda p: {name: x for name, x in tpa.factors(p.case).items() if x is not None},
        _decode,
        differentiable=False,
    ),
    "output_gated_attention": Subject("output_gate", _gate_tensors, _gate, keeps=True),
}
