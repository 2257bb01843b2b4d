"""What the tokens of one chunk do to each other, and the gradients of that.

A decay that all channels share has one C×C matrix of weights. A decay per channel has none that serves all channels;
there, neighbouring blocks are merged (:mod:`fulmen.ops.chunks.weights`), and at every merge the tokens of the
second block read those of the first through their common boundary: matmuls only, and no exponent of a pair.

The gradient of a decay counts, for each token t, the pairs j < t ≤ i. With i in the second block and j in the first,
these are all i ≥ t of the second block (where t is there) or all j < t of the first (where t is there): sums that
never subtract, so nothing cancels.

Tensors are ``[..., C, size]``; ``a`` and ``c`` are the decays of the key and of the value axis.
"""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.chunks.weights import Decay, first, second, sum_before, sum_channels, sum_from, weigh


def scalar_forward(q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None) -> Tensor:
    """Outputs for one matrix of weights ``[..., C, C]``, or without decay."""
    return _scores(q, k, weights).tril_() @ v


def scalar_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, weights: Tensor | None, da: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; adds to that of the decay, ``[..., C, 1]``, where given."""
    scores = _scores(q, k, weights).tril_()
    grad_scores = _scores(do, v, weights).tril_()
    dq, dk, dv = grad_scores @ k, grad_scores.mT @ q, scores.mT @ do
    if da is not None:
        pairs = scores.mul_(do @ v.mT).tril_(-1)
        da.add_(sum_from(pairs).tril_(-1).sum(-1, keepdim=True))
    return dq, dk, dv


def channel_forward(q: Tensor, k: Tensor, v: Tensor, a: Decay, c: Decay) -> Tensor:
    """Outputs for decays per channel. Merges ``a`` and ``c`` to the whole chunk on the way."""
    out = own_scores(q, k) * v
    while (size := a.size) < q.shape[-2]:
        scores = weigh(second(q, size), a.weights_second()) @ weigh(first(k, size), a.weights_first()).mT
        second(out, size).add_(weigh(scores @ weigh(first(v, size), c.weights_first()), c.weights_second()))
        a.double()
        c.double()
    return out


def channel_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, a: Decay, c: Decay, da: Tensor | None, dc: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; adds to those of the decays, ``[..., C, K]``, where given. Merges ``a`` and ``c``."""
    diagonal = own_scores(do, v)
    dq, dk, dv = diagonal * k, diagonal * q, own_scores(q, k) * do
    while (size := a.size) < q.shape[-2]:
        a1, a2, c1, c2 = a.weights_first(), a.weights_second(), c.weights_first(), c.weights_second()
        q2, k1 = weigh(second(q, size), a2), weigh(first(k, size), a1)
        do2, v1 = weigh(second(do, size), c2), weigh(first(v, size), c1)
        scores, grad_scores = q2 @ k1.mT, do2 @ v1.mT
        gq, gk, gv = grad_scores @ k1, grad_scores.mT @ q2, scores.mT @ do2
        second(dq, size).add_(weigh(gq, a2))
        first(dk, size).add_(weigh(gk, a1))
        first(dv, size).add_(weigh(gv, c1))
        if da is not None:
            second(da, size).add_(sum_from(sum_channels(q2 * gq, da)))
            first(da, size).add_(sum_before(sum_channels(k1 * gk, da)))
        if dc is not None:
            second(dc, size).add_(sum_from(do2 * (scores @ v1)))
            first(dc, size).add_(sum_before(v1 * gv))
        a.double()
        c.double()
    return dq, dk, dv


def own_scores(rows: Tensor, columns: Tensor) -> Tensor:
    """Of each token with itself, ``[..., C, 1]``."""
    return (rows * columns).sum(-1, keepdim=True)


def _scores(rows: Tensor, columns: Tensor, weights: Tensor | None) -> Tensor:
    """Weighed but whole: the triangle is cut afterwards and not by multiplying with zeros, so that NaN in a later
    token's key does not reach earlier outputs."""
    scores = rows @ columns.mT
    return scores if weights is None else scores.mul_(weights)
