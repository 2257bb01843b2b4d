"""The public functions: signature, documentation, checks, and one walk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fulmen.distributed.agreement import Agreement, Call, decay_facts, may_differentiate, packed_facts
from fulmen.distributed.causal_conv1d import ConvolutionShard
from fulmen.distributed.delta_rule import DeltaRuleShard
from fulmen.distributed.exchange import Ranks
from fulmen.distributed.linear_attention import AttentionShard
from fulmen.distributed.recurrence import walk, with_summed_gradient
from fulmen.ops.causal_conv1d.validation import check_convolution
from fulmen.ops.chunks.decay_form import DecayForm
from fulmen.ops.delta_rule.validation import check_delta_rule
from fulmen.ops.linear_attention.validation import check_attention
from fulmen.runtime.backends import choose
from fulmen.runtime.checks import check_flag
from fulmen.runtime.tensors import autocast, in_state_dtype

_Function = TypeVar("_Function", bound=Callable[..., Any])
Group = dist.ProcessGroup | DeviceMesh


def _not_compiled(function: _Function) -> _Function:
    """torch.compile leaves it as it is: what meets other ranks depends on what they bring, which no graph knows."""
    return cast(_Function, torch.compiler.disable(function))


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    log_decay: Tensor | None = ...,
    log_decay_v: Tensor | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    reduce_decay_grad: bool = ...,
    schedule: str = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    log_decay: Tensor | None = ...,
    log_decay_v: Tensor | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    reduce_decay_grad: bool = ...,
    schedule: str = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@_not_compiled
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    log_decay: Tensor | None = None,
    log_decay_v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reduce_decay_grad: bool = False,
    schedule: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fulmen.linear_attention` of a sequence that lies on the ranks of a group, each with its shard of tokens::

        output = fulmen.distributed.linear_attention(q, k, v, group=mesh["sequence"], log_decay=log_decay)

    Exact, for every decay. Every rank must make the call, and the backward of its output, even with no tokens; the
    objective is the sum of the ranks' losses. Each way the ranks exchange one state, whatever the length. Arguments are
    those of the local operator, on this rank's shard, and:

    Args:
        group: a process group, or a DeviceMesh of one dimension: the ranks, in the order of their shards. These may
            differ in length, and be empty.
        log_decay: of one per head ``[H]``, which every rank has, the gradient is this rank's part, as of any replicated
            parameter; see ``reduce_decay_grad``.
        initial_state: ``[B, H, D, E]``, given by the first rank alone, which gets its gradient; the others pass None.
            With cu_seqlens every rank gives that of all sequences, ``[sequences, H, D, E]``, and its gradient is this
            rank's part, of the sequences that begin here.
        return_state: also return the final state of the whole sequence, on every rank; its gradient is the sum of all
            ranks' (with cu_seqlens, the final states of all sequences, which takes a further exchange of these).
        cu_seqlens: of all ranks together, the same on each: sequences may begin and end anywhere, and lie on many
            ranks. Its values are read here, which on a GPU waits for it.
        reduce_decay_grad: sum the gradient of a ``log_decay`` ``[H]`` over the ranks.

    Returns:
        The output of this rank's tokens; with ``return_state=True`` a pair of it and the final state.

    Raises:
        TypeError, ValueError: where arguments are wrong, or differ between ranks (shapes, dtypes, decay forms,
            options): on every rank, by name.
        RuntimeError: where a rank has ended, or does not come within the group's timeout.
    """
    ranks = Ranks(group)
    q, k, v = autocast(q, k, v)

    def described() -> Call:
        check_attention(q, k, v, log_decay, log_decay_v, scale, initial_state, return_state, cu_seqlens, schedule)
        choose(backend, q.device, q.dtype)
        _check_reduction(reduce_decay_grad, log_decay)
        facts, bounds = packed_facts(cu_seqlens)
        facts |= _attention_facts(q, k, v) | {
            "scale": None if scale is None else float(scale),
            **decay_facts(log_decay=log_decay, log_decay_v=log_decay_v),
            **_gradient_facts(reduce_decay_grad, log_decay),
        }
        differentiates = may_differentiate(q, k, v, log_decay, log_decay_v, initial_state)
        return Call(facts, q.shape[1], differentiates, int(initial_state is not None), bounds, return_state)

    agreement = Agreement("linear_attention", ranks, q, described)
    if reduce_decay_grad and log_decay is not None:
        log_decay = with_summed_gradient(log_decay, ranks, "log_decay")
    place = agreement.place
    local = None if cu_seqlens is None else place.cu_seqlens(cu_seqlens)
    shard = AttentionShard(q, k, v, log_decay, log_decay_v, scale, local, schedule, backend, place)
    output, state = walk(shard, agreement, in_state_dtype(initial_state, q))
    return output if state is None else (output, state)


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    group: Group,
    log_decay: Tensor | None = ...,
    normalize_qk: bool = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    reduce_decay_grad: bool = ...,
    schedule: str = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    group: Group,
    log_decay: Tensor | None = ...,
    normalize_qk: bool = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    reduce_decay_grad: bool = ...,
    schedule: str = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@_not_compiled
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    group: Group,
    log_decay: Tensor | None = None,
    normalize_qk: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reduce_decay_grad: bool = False,
    schedule: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fulmen.delta_rule` of a sequence that lies on the ranks of a group, each with its shard of tokens.

    Each way the ranks exchange one state, and forward a D×D matrix for each head too. Arguments are those of the local
    operator, on this rank's shard; ``group``, ``initial_state``, ``return_state``, ``cu_seqlens``,
    ``reduce_decay_grad`` and what every rank must do are as in :func:`fulmen.distributed.linear_attention`.
    """
    ranks = Ranks(group)
    q, k, v = autocast(q, k, v)

    def described() -> Call:
        check_delta_rule(
            q, k, v, beta, log_decay, normalize_qk, scale, initial_state, return_state, cu_seqlens, schedule
        )
        choose(backend, q.device, q.dtype, "delta_rule")
        _check_reduction(reduce_decay_grad, log_decay)
        facts, bounds = packed_facts(cu_seqlens)
        facts |= _attention_facts(q, k, v) | {
            "the dtype of beta": str(beta.dtype),
            "normalize_qk": normalize_qk,
            "scale": None if scale is None else float(scale),
            **decay_facts(log_decay=log_decay),
            **_gradient_facts(reduce_decay_grad, log_decay),
        }
        differentiates = may_differentiate(q, k, v, beta, log_decay, initial_state)
        return Call(facts, q.shape[1], differentiates, int(initial_state is not None), bounds, return_state)

    agreement = Agreement("delta_rule", ranks, q, described)
    if reduce_decay_grad and log_decay is not None:
        log_decay = with_summed_gradient(log_decay, ranks, "log_decay")
    place = agreement.place
    local = None if cu_seqlens is None else place.cu_seqlens(cu_seqlens)
    shard = DeltaRuleShard(q, k, v, beta, log_decay, normalize_qk, scale, local, schedule, backend, place)
    output, state = walk(shard, agreement, in_state_dtype(initial_state, q))
    return output if state is None else (output, state)


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    group: Group,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[False] = ...,
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    *,
    group: Group,
    activation: str | None = ...,
    initial_state: Tensor | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


@_not_compiled
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fulmen.causal_conv1d` of a sequence that lies on the ranks of a group, each with its shard of tokens.

    Each way the ranks exchange the K-1 tokens at the boundaries of shards (W, if there is an initial state of that
    width). Arguments are those of the local operator, on this rank's shard; ``group``, ``initial_state``
    (``[B, C, W]``, or ``[sequences, C, W]``), ``return_state``, ``cu_seqlens`` and what every rank must do are as in
    :func:`fulmen.distributed.linear_attention`. The gradients of weight and bias are this rank's part, as of any
    replicated parameter.
    """
    ranks = Ranks(group)
    (x,) = autocast(x)

    def described() -> Call:
        check_convolution(x, weight, bias, activation, initial_state, return_state, cu_seqlens)
        choose(backend, x.device, x.dtype)
        facts, bounds = packed_facts(cu_seqlens)
        facts |= {
            "the dtype of x": str(x.dtype),
            "B": x.shape[0],
            "C": x.shape[2],
            "K": weight.shape[1],
            "the activation": activation,
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
        }
        initial = 0 if initial_state is None else 1 + initial_state.shape[2]
        return Call(facts, x.shape[1], may_differentiate(x, weight, bias, initial_state), initial, bounds, return_state)

    agreement = Agreement("causal_conv1d", ranks, x, described)
    place, width = agreement.place, agreement.initial - 1 if agreement.initial else weight.shape[1] - 1
    local = None if cu_seqlens is None else place.cu_seqlens(cu_seqlens)
    shard = ConvolutionShard(x, weight, bias, activation, local, backend, width, place)
    initial = initial_state if initial_state is None else initial_state.to(x.dtype)
    output, state = walk(shard, agreement, initial)
    return output if state is None else (output, state)


def _attention_facts(q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
    return {
        "the dtype of q, k and v": str(q.dtype),
        "B": q.shape[0],
        "the heads of q, k and v": [x.shape[2] for x in (q, k, v)],
        "D": q.shape[3],
        "E": v.shape[3],
    }


def _check_reduction(reduce_decay_grad: bool, log_decay: Tensor | None) -> None:
    check_flag("reduce_decay_grad", reduce_decay_grad)
    if reduce_decay_grad and (log_decay is None or DecayForm.of(log_decay).has_tokens):
        raise ValueError(
            "reduce_decay_grad must be False unless log_decay is [H]: other decays belong to the tokens of one rank"
        )


def _gradient_facts(reduce_decay_grad: bool, log_decay: Tensor | None) -> dict[str, object]:
    """What each rank must do alike for the backward's exchanges to meet."""
    summed = reduce_decay_grad and log_decay is not None and log_decay.requires_grad
    return {"torch.is_grad_enabled()": torch.is_grad_enabled(), "log_decay.requires_grad (it is summed)": summed}
