"""Gated linear attention as the ``fla`` package computes it, in torch operations that autograd differentiates.

Its algorithm, not ours: log-decays are summed inside a chunk, and weights are exponentials of their differences.
Decays are per token and channel, ``[B, N, H, D]`` (GLA), or per token, ``[B, N, H]`` (simple GLA). All in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK, SUB_CHUNK = 64, 16


def gla_states(k: Tensor, v: Tensor, decay: Tensor, chunk_size: int = 128) -> Tensor:
    """The state that enters each chunk, and the final one: ``[B, H, chunks + 1, D, E]``, float32."""
    k, v, b = (_chunks(x, chunk_size) for x in (k, v, decay))
    return _states(k, v, b.cumsum(-2))


def gla(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """The output ``[B, N, H, E]`` for vector decays ``[B, N, H, D]``."""
    length, dtype = q.shape[1], q.dtype
    q, k, v, a = (_chunks(x, CHUNK) for x in (q, k, v, decay))
    b = a.cumsum(-2)
    weights = _vector_weights(q, k, b)
    return _output(q * b.exp(), weights, v, _states(k, v, b), length, dtype)


def simple_gla(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """The output ``[B, N, H, E]`` for scalar decays ``[B, N, H]``."""
    length, dtype = q.shape[1], q.dtype
    q, k, v, a = (_chunks(x, CHUNK) for x in (q, k, v, decay[..., None]))
    b = a.cumsum(-2)
    between = (b - b.mT).tril().exp().tril()
    return _output(q * b.exp(), (q @ k.mT) * between, v, _states(k, v, b), length, dtype)


def _chunks(x: Tensor, size: int) -> Tensor:
    """``[B, N, H, D]`` as ``[B, H, chunks, size, D]`` in float32, padded with zeros (a decay of 0 keeps the state)."""
    x = x.float().transpose(1, 2)
    return pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _states(k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    last = b[..., -1:, :]
    added = (k * (last - b).exp()).mT @ v
    kept = last.exp().mT
    states = [torch.zeros_like(added[:, :, 0])]
    for chunk in range(k.shape[2]):
        states.append(kept[:, :, chunk] * states[-1] + added[:, :, chunk])
    return torch.stack(states, 2)


def _vector_weights(q: Tensor, k: Tensor, b: Tensor) -> Tensor:
    """The weight of token j in output i of the same chunk. Sub-chunk by sub-chunk, each measured from its own start, so
    that no exponent is large: earlier keys by a product of matrices, keys of the sub-chunk itself pair by pair."""
    rows = []
    for start in range(0, CHUNK, SUB_CHUNK):
        now = slice(start, start + SUB_CHUNK)
        q_now, b_now = q[..., now, :], b[..., now, :]
        origin = b[..., start : start + 1, :]
        earlier = (q_now * (b_now - origin).exp()) @ (k[..., :start, :] * (origin - b[..., :start, :]).exp()).mT
        pairs = (b_now[..., :, None, :] - b_now[..., None, :, :]).clamp(max=0.0).exp()
        own = torch.einsum("...id,...jd,...ijd->...ij", q_now, k[..., now, :], pairs).tril()
        rows.append(pad(torch.cat((earlier, own), -1), (0, CHUNK - start - SUB_CHUNK)))
    return torch.cat(rows, -2)


def _output(q_decayed: Tensor, weights: Tensor, v: Tensor, states: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    o = q_decayed @ states[:, :, :-1] + weights @ v
    return o.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype)
