"""The CPU core's delta rule (csrc/delta_worker.h): describes a call to it, and nothing else."""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.chunks.native import Problem, Token, decay, readable, token
from fulmen.ops.delta_rule.problem import DeltaRule, Gradients, Step
from fulmen.runtime import core as c
from fulmen.runtime.core_structs import (
    DELTA_RULE_BACKWARD,
    DELTA_RULE_FORWARD,
    DELTA_RULE_PROBLEM,
    DELTA_RULE_STEP,
    Words,
)


def forward(p: DeltaRule, output: Tensor, state: Tensor | None) -> None:
    problem, words = _described(p, c.header(DELTA_RULE_FORWARD))
    packed = DELTA_RULE_FORWARD.pack(problem=words, output=c.tensor(output), final_state=c.state(state))
    problem.run(DELTA_RULE_FORWARD, packed)


def backward(p: DeltaRule, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    problem, words = _described(p, c.header(DELTA_RULE_BACKWARD))
    packed = DELTA_RULE_BACKWARD.pack(
        problem=words,
        grad_output=problem.tensor(grad_output),
        grad_state=c.state(grad_state),
        **_gradients(grads),
    )
    problem.run(DELTA_RULE_BACKWARD, packed)


def step(p: Step, output: Tensor) -> None:
    beta = readable(p.beta, channels=False)
    attention = Token(c.header(DELTA_RULE_STEP), p.q, p.k, p.v, p.state, p.log_decay, None, p.scale, output)
    packed = DELTA_RULE_STEP.pack(attention=attention.words, beta=token(beta), normalize_qk=p.normalize_qk)
    c.require().run(DELTA_RULE_STEP, packed)


def workspace_bytes(p: DeltaRule, backward: bool = False) -> int:
    """The workspace of a call, in bytes; of its tensors only shapes and dtypes matter."""
    call = DELTA_RULE_BACKWARD if backward else DELTA_RULE_FORWARD
    _, words = _described(p, c.measuring_header(call))
    like_v = c.tensor(p.v)
    if not backward:
        return c.require().workspace_bytes(call, call.pack(problem=words, output=like_v, final_state=c.NO_STATE))
    grads = _gradients(Gradients(p.q, p.k, p.v, p.beta, p.log_decay, None))
    packed = call.pack(problem=words, grad_output=like_v, grad_state=c.NO_STATE, **grads)
    return c.require().workspace_bytes(call, packed)


def _described(p: DeltaRule, header: Words) -> tuple[Problem, Words]:
    problem = Problem(p, header, p.q, p.scale, p.cu_seqlens)
    words = DELTA_RULE_PROBLEM.words(
        attention=problem.words, beta=problem.per_token(p.beta), normalize_qk=p.normalize_qk
    )
    return problem, words


def _gradients(grads: Gradients) -> dict[str, Words]:
    return {
        "dq": c.tensor(grads.q),
        "dk": c.tensor(grads.k),
        "dv": c.tensor(grads.v),
        "dbeta": c.tensor(grads.beta),
        "dlog_decay": decay(grads.log_decay),
        "dinitial": c.state(grads.initial_state),
    }
