"""The Triton backend, for NVIDIA and AMD GPUs.

    forward     prepare chunks in parallel, then walk them with the state and read the output
    backward    prepare, walk (keeping S and Y of every chunk), walk back (G and dV), differentiate chunks in parallel

What the kernels of one pass hand to each other takes memory for every token. So a long sequence is partitioned into
segments that are done one after the other: the backward first finds the states that enter them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.ops.chunks.decay_form import DecayForm, as_sequence, tokens_of
from fulmen.ops.delta_rule.problem import DeltaRule, Gradients, Step
from fulmen.ops.delta_rule.triton.launch import Launcher
from fulmen.ops.delta_rule.triton.prepare import FACTORS
from fulmen.triton_common.launching import on_its_device
from fulmen.triton_common.operands import UNIT, readable, readable_state
from fulmen.triton_common.packed import clear_after_last
from fulmen.triton_common.tiles import few_channels

SEGMENT_BYTES = 256 << 20  # that the rows and states of a segment may take
SHORTEST_SEGMENT = 1024  # tokens


@on_its_device
def forward(p: DeltaRule, output: Tensor, state: Tensor | None) -> None:
    p = with_readable_rows(p)
    if p.schedule == "recurrent":
        Launcher(p, precision(p)).recur(output, readable_state(p.initial_state), state)
    else:
        walk_segments(p, segments(p), output, state)
    if p.cu_seqlens is not None:
        clear_after_last(p.cu_seqlens, output)


def walk_segments(p: DeltaRule, parts: list[slice], output: Tensor, state: Tensor | None) -> None:
    entering = p.initial_state
    for i, tokens in enumerate(parts):
        run = Launcher(select(p, tokens, entering), precision(p))
        last = i == len(parts) - 1
        leaving = state if last else new_state(p)
        run.walk(run.prepare(), leaving, output=output[:, tokens])
        entering = leaving


@on_its_device
def backward(p: DeltaRule, grad_output: Tensor | None, grad_state: Tensor | None, grads: Gradients) -> None:
    p = with_readable_rows(p)
    grad = p.v.new_zeros(p.output_shape) if grad_output is None else readable(grad_output)
    parts = segments(p, grads)
    entering = states_between(p, parts, grads)
    for tokens in reversed(parts):
        part = select(p, tokens, entering.pop())
        first = tokens is parts[0]
        leaving = grads.initial_state if first else new_state(p)
        whole = grads._replace(initial_state=leaving)
        backward_segment(part, grad[:, tokens], grad_state, whole.select(tokens, slice(None)))
        grad_state = leaving
    if p.cu_seqlens is not None:
        clear_after_last(p.cu_seqlens, *grads[:5])


def states_between(p: DeltaRule, parts: list[slice], grads: Gradients) -> list[Tensor | None]:
    """Those that enter the segments."""
    entering = [p.initial_state]
    for tokens in parts[:-1]:
        run = Launcher(select(p, tokens, entering[-1]), precision(p, grads))
        leaving = new_state(p)
        run.walk(run.prepare(), leaving)
        entering.append(leaving)
    return entering


def backward_segment(p: DeltaRule, grad: Tensor, grad_state: Tensor | None, grads: Gradients) -> None:
    run = Launcher(p, precision(p, grads))
    x = run.prepare(backward=True, with_overlaps=needs_overlaps(grads))
    states, errors = run.new_states(), run.new_rows(run.value_size, torch.float32)
    run.walk(x, None, states=states, errors=errors)

    grad_states, dv = run.new_states(), run.new_rows(run.value_size)
    dbeta = None if grads.beta is None else run.new_rows(run.value_tiles, torch.float32)
    run.walk_backward(x, grad, errors, grad_state, grads.initial_state, grad_states, dv, dbeta)
    if grads.beta is not None and dbeta is not None:
        grads.beta.copy_(dbeta.sum(3))
    if grads.v is not None:
        run.finish(dv, p.v, grads.v, normalized=False)

    dq, dk = (None if into is None else run.new_rows(run.key_size, torch.float32) for into in (grads.q, grads.k))
    ddecay, form = None, DecayForm.of(grads.log_decay)
    if grads.log_decay is not None:
        ddecay = grads.log_decay if form.by_channel else run.new_rows(run.key_tiles, torch.float32)
    if dq is dk is ddecay is None:
        return
    run.differentiate(x, grad, dv, errors, states, grad_states, dq, dk, ddecay)
    for of_heads, given, into in ((dq, p.q, grads.q), (dk, p.k, grads.k)):
        if of_heads is not None and into is not None:
            run.finish(of_heads, given, into, normalized=p.normalize_qk)
    if grads.log_decay is not None and ddecay is not None and not form.by_channel:
        if p.cu_seqlens is not None:
            clear_after_last(p.cu_seqlens, ddecay)
        grads.log_decay.add_(form.reduced(ddecay))


@on_its_device
def step(p: Step, output: Tensor) -> None:
    """A sequence of one token, its state updated where it is."""
    q, k, v, beta = (x[:, None] for x in (p.q, p.k, p.v, p.beta))
    log_decay = as_sequence(p.log_decay)
    token = DeltaRule(q, k, v, beta, log_decay, p.normalize_qk, p.scale, p.state, None, "recurrent")
    token = with_readable_rows(token)
    Launcher(token, precision(token)).recur(output[:, None], p.state, p.state)


def precision(p: DeltaRule, grads: Gradients | None = None) -> str:
    """How factors of products enter them. A decay's gradient is float32, and wants more than bfloat16 has; one for a
    whole head adds up over all tokens what is a difference at each."""
    if p.q.dtype == torch.float16 or few_channels(p.q.shape[3], p.v.shape[3]):
        return "three terms"
    if grads is None or grads.log_decay is None:
        return "one term"
    return "three terms" if DecayForm.of(p.log_decay).by_head else "two terms"


def segments(p: DeltaRule, grads: Gradients | None = None) -> list[slice]:
    """Packed sequences are one: what they take grows with N alone."""
    batch, length, heads = p.beta.shape
    if p.cu_seqlens is not None:
        return [slice(0, length)]
    of_token = batch * heads * token_bytes(Launcher(p, precision(p, grads)), needs_overlaps(grads))
    tokens = max(SEGMENT_BYTES // max(of_token, 1), SHORTEST_SEGMENT) // UNIT.value * UNIT.value
    return [slice(i, min(i + tokens, length)) for i in range(0, max(length, 1), tokens)]


def needs_overlaps(grads: Gradients | None) -> bool:
    """Whether L has a part of its own in a gradient: in that of a decay that channels share."""
    return grads is not None and grads.log_decay is not None and not DecayForm.of(grads.log_decay).by_channel


def token_bytes(run: Launcher, overlaps: bool) -> int:
    """What a backward keeps of a token of one head; a forward keeps less."""
    key_size, value_size, single = run.key_size, run.value_size, torch.float32.itemsize
    states = 2 * key_size * value_size // run.chunk  # S and G
    weighed = 2 * key_size if run.form.by_channel else 0
    pairs = (2 + overlaps) * run.chunk  # X, M and L
    rows = weighed + value_size  # later(q) and earlier(k); dV
    in_single = pairs + 3 * key_size + value_size + FACTORS  # R, dq and dk; Y
    return (states + rows) * run.kept.itemsize + in_single * single


def select(p: DeltaRule, tokens: slice, entering: Tensor | None) -> DeltaRule:
    """A segment as a call of its own."""
    q, k, v, beta = (x[:, tokens] for x in (p.q, p.k, p.v, p.beta))
    return p._replace(q=q, k=k, v=v, beta=beta, log_decay=tokens_of(p.log_decay, tokens), initial_state=entering)


def new_state(p: DeltaRule) -> Tensor:
    return p.v.new_empty(p.state_shape, dtype=torch.float32)


def with_readable_rows(p: DeltaRule) -> DeltaRule:
    """The call with tensors copied where kernels cannot read them. (The launcher sees to states.)"""
    q, k, v, beta = (readable(x) for x in (p.q, p.k, p.v, p.beta))
    log_decay = p.log_decay
    if log_decay is not None and DecayForm.of(log_decay).has_tokens:
        log_decay = readable(log_decay)
    cu_seqlens = None if p.cu_seqlens is None else p.cu_seqlens.contiguous()
    return p._replace(q=q, k=k, v=v, beta=beta, log_decay=log_decay, cu_seqlens=cu_seqlens)
