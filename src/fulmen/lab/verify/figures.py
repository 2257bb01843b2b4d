"""The figures of `fulmen verify`: workspace, against what is promised, and a short table of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import fulmen
from fulmen.lab.bench.measure import Timing, interleaved, memory_use, seconds_of, seconds_on_cuda
from fulmen.lab.operators.linear_attention.cases import DECAYS
from fulmen.lab.verify.check import Target
from fulmen.ops.chunks.decay_form import Decays

SOFTMAX = "softmax"
LARGEST_CALL = 36  # bytes for each element of q: decays for keys and values, all gradients, and a little to spare


class Size(NamedTuple):
    batch: int
    length: int
    heads: int
    dim: int


class Workspace(NamedTuple):
    """Bytes beyond inputs and results, and how many are allowed."""

    decays: str
    mode: str
    bytes: int
    allowed: int


@cache
def size_of(target: Target) -> Size:
    """That of the published tables on a GPU, or as many of its tokens as the free memory takes; what takes seconds
    elsewhere, and next to nothing in the interpreter."""
    if target.device == "cuda":
        size = Size(4, 4096 if target.quick else 32768, 32, 128)
        while prod(size) * LARGEST_CALL > torch.cuda.mem_get_info()[0]:
            size = size._replace(length=size.length // 2)
        return size
    if target.interpreted:
        return Size(1, 32, 1, 16)
    return Size(1, 512 if target.quick else 8192, 4, 128)


def allowed_workspace(target: Target, mode: str, decays: str) -> int:
    """On a GPU 64 MiB forward and 128 MiB backward, and with a decay per channel of the keys what is prepared of q and
    k; per thread of a CPU 1 MiB and 8 MiB."""
    if target.backend == "triton":
        prepared = 3 * 2 * prod(size_of(target)) if decays == "channel" else 0
        return ((64 if mode == "forward" else 128) << 20) + prepared
    return torch.get_num_threads() * (1 if mode == "forward" else 8) << 20


def tensors(size: Size, decays: str, device: str) -> dict[str, Tensor]:
    """The arguments of a call in bfloat16, with the values of the lasd report."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tokens = size.batch, size.length, size.heads
    call = {name: normalize(random(*tokens, size.dim), dim=-1).bfloat16() for name in "qk"}
    call["v"] = random(*tokens, size.dim).bfloat16()
    shapes = Decays.named(decays).shapes(*tokens, size.dim, size.dim)
    return call | {name: logsigmoid(random(*shape)) for name, shape in shapes.items()}


def decays_of(target: Target) -> tuple[str, ...]:
    return ("none", "token") if target.interpreted else DECAYS


def workspaces(target: Target) -> Iterator[Workspace]:
    size = size_of(target)
    for decays in decays_of(target):
        call = {name: x.requires_grad_() for name, x in tensors(size, decays, target.device).items()}

        def forward(call: dict[str, Any] = call) -> Tensor:
            return fulmen.linear_attention(**call, scale=1.0, backend=target.backend)

        with torch.no_grad():
            used = memory_use(forward, target.device)
        yield Workspace(decays, "forward", used.peak - used.held, allowed_workspace(target, "forward", decays))
        output, leaves = forward(), list(call.values())
        gradient = torch.ones_like(output)
        # Called before the loop goes on.
        used = memory_use(lambda: torch.autograd.grad(output, leaves, gradient), target.device)  # noqa: B023
        yield Workspace(decays, "backward", used.peak - used.held, allowed_workspace(target, "backward", decays))


def times(target: Target, seconds: float) -> dict[str, Timing]:
    """Of the forward with each decay, and of causal softmax attention at the same size."""
    size = size_of(target)
    calls: dict[str, Callable[[], object]] = {}
    shared = tensors(size, "none", target.device)
    for decays in decays_of(target):
        call = tensors(size, decays, target.device) | shared  # one q, k and v for all
        # mypy has no type for the default that binds this round's call.
        calls[decays] = lambda call=call: fulmen.linear_attention(  # type: ignore[misc]
            **call, scale=1.0, backend=target.backend
        )
    q, k, v = (shared[name].transpose(1, 2).contiguous() for name in "qkv")
    calls[SOFTMAX] = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    with torch.inference_mode():
        clock = seconds_on_cuda if target.device == "cuda" else seconds_of
        return interleaved(calls, seconds, repeats=1 if target.interpreted else 3, clock=clock)
