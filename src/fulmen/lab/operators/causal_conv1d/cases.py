"""Calls of the convolution that are worth a comparison with the specification, made on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import fulmen


class Case(NamedTuple):
    """
    Attributes:
        width: K. state: W of the initial state; None: no initial state.
        dense: "channels" as ``[B, N, C]`` has them, "tokens" as a transposed ``[B, C, N]``, "neither".
        lengths: of packed sequences, whose sum is N; None: two samples.
        seed: of all values.
    """

    length: int = 37
    channels: int = 21
    width: int = 4
    state: int | None = 4
    bias: bool = True
    activation: str | None = "silu"
    dense: str = "channels"
    lengths: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0


def tensors(case: Case) -> dict[str, Tensor]:
    """The arguments, and the gradients of both results."""
    generator = torch.Generator().manual_seed(case.length + 100 * case.width + 1_000_000 * case.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(case.dtype)

    batch, length = (2, case.length) if case.lengths is None else (1, sum(case.lengths))
    states = batch if case.lengths is None else len(case.lengths)
    found = {"weight": random(case.channels, case.width)}
    if case.dense == "tokens":
        found["x"] = random(batch, case.channels, length).transpose(1, 2)
    elif case.dense == "channels":
        found["x"] = random(batch, length, case.channels)
    else:
        found["x"] = random(batch, length, 2 * case.channels)[:, :, ::2]
    if case.bias:
        found["bias"] = random(case.channels)
    if case.state is not None:
        found["initial_state"] = random(states, case.channels, case.state)
    found["grad_output"] = random(batch, length, case.channels)
    width = case.width - 1 if case.state is None else case.state
    found["grad_state"] = random(states, case.channels, width)
    return found


def cu_seqlens(case: Case, device: str) -> Tensor | None:
    if case.lengths is None:
        return None
    return torch.tensor([0, *torch.tensor(case.lengths, device="cpu").cumsum(0).tolist()], device=device)


def run(case: Case, given: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Both results and all gradients, by name."""
    grads = given["grad_output"], given["grad_state"]
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if not name.startswith("grad")}
    results = fulmen.causal_conv1d(
        **leaves,
        activation=case.activation,
        return_state=True,
        cu_seqlens=cu_seqlens(case, str(given["x"].device)),
        backend=backend,
    )
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    output, state = (x.detach() for x in results)
    return {"output": output, "state": state} | {f"d{name}": x for name, x in zip(leaves, found, strict=True)}


def exact(case: Case) -> dict[str, Tensor]:
    return run(case, {name: x.double() for name, x in tensors(case).items()}, "reference")
