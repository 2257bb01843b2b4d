"""Every check of what a caller hands in, before any work is done.

A message names the argument, what it was and what it must be. Only attributes of tensors are looked at, never values
(that would break torch.compile and synchronise a GPU); the one exception, :func:`packed_bounds`, is called by the
backends that need the values anyway.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from fulmen.checks import DTYPES, check_choice, check_inputs, check_scale, check_tensor, once_per_signature

SCHEDULES = ("auto", "recurrent", "loop", "parallel", "recompute")


@once_per_signature
def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    decay_v: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
    schedule: str,
) -> None:
    check_inputs("[B, N, H, D]", q=q, k=k, v=v)
    check_key_size(q, k)
    heads = shared_heads(q=q.shape[2], k=k.shape[2], v=v.shape[2])
    check_token_decays(decay, decay_v, k, v, heads)
    check_scale(scale)
    if not isinstance(return_state, bool):
        raise TypeError(f"return_state must be True or False; got {return_state!r}")
    check_choice("schedule", schedule, SCHEDULES)
    if cu_seqlens is None:
        check_state("initial_state", initial_state, "[B, H, D, E]", (q.shape[0], heads, q.shape[3], v.shape[3]), q)
    else:
        check_cu_seqlens(cu_seqlens, q)
        shape = (cu_seqlens.shape[0] - 1, heads, q.shape[3], v.shape[3])
        check_state("initial_state", initial_state, "[sequences, H, D, E]", shape, q)


@once_per_signature
def check_states(
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    decay_v: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int,
    schedule: str,
) -> None:
    check_inputs("[B, N, H, D]", k=k, v=v)
    counts = {"k": k.shape[2], "v": v.shape[2]}
    for name, x in (("decay", decay), ("decay_v", decay_v)):
        if isinstance(x, Tensor) and x.ndim in (1, 3, 4):
            counts[name] = x.shape[0 if x.ndim == 1 else 2]
    heads = shared_heads(**counts)
    check_token_decays(decay, decay_v, k, v, heads)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral):
        raise TypeError(f"chunk_size must be an integer; got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}")
    check_choice("schedule", schedule, SCHEDULES)
    check_state("initial_state", initial_state, "[B, H, D, E]", (k.shape[0], heads, k.shape[3], v.shape[3]), k)


@once_per_signature
def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor | None,
    decay_v: Tensor | None,
    scale: float,
) -> None:
    check_inputs("[B, H, D]", q=q, k=k, v=v)
    check_key_size(q, k)
    batch, _, key_dim = q.shape
    value_dim = v.shape[2]
    heads = shared_heads(q=q.shape[1], k=k.shape[1], v=v.shape[1])
    if state is None:
        raise TypeError("state must be a torch.Tensor [B, H, D, E]; got None")
    check_state("state", state, "[B, H, D, E]", (batch, heads, key_dim, value_dim), q)
    check_updatable(state)
    if decay is not None:
        forms = {1: ("[H]", (heads,)), 2: ("[B, H]", (batch, heads)), 3: ("[B, H, D]", (batch, heads, key_dim))}
        check_decay("decay", decay, q, forms)
    if decay_v is not None:
        check_decay("decay_v", decay_v, q, {3: ("[B, H, E]", (batch, heads, value_dim))})
    check_scale(scale)
    if torch.is_grad_enabled():
        for name, x in (("q", q), ("k", k), ("v", v), ("state", state), ("decay", decay), ("decay_v", decay_v)):
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} must not require grad: linear_attention_step updates the state in place and has no "
                    "gradient; call it under torch.no_grad(), or use linear_attention to train"
                )


def check_key_size(q: Tensor, k: Tensor) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the last dimension of q, {q.shape[-1]}; got shape {list(k.shape)}")


def shared_heads(**counts: int) -> int:
    """The number of heads H, the largest; the others must divide it."""
    heads = max(counts.values())
    for name, count in counts.items():
        if count < 1 or heads % count:
            listed = ", ".join(f"{other}: {n}" for other, n in counts.items())
            raise ValueError(f"{name} must have a number of heads that divides the largest one; got {count} ({listed})")
    return heads


def check_token_decays(decay: Tensor | None, decay_v: Tensor | None, k: Tensor, v: Tensor, heads: int) -> None:
    batch, length, _, key_dim = k.shape
    forms = {
        1: ("[H]", (heads,)),
        3: ("[B, N, H]", (batch, length, heads)),
        4: ("[B, N, H, D]", (batch, length, heads, key_dim)),
    }
    if decay is not None:
        check_decay("decay", decay, k, forms)
    if decay_v is not None:
        check_decay("decay_v", decay_v, v, {4: ("[B, N, H, E]", (batch, length, heads, v.shape[3]))})


def check_decay(name: str, decay: Tensor, like: Tensor, forms: dict[int, tuple[str, tuple[int, ...]]]) -> None:
    """A decay must have one of the ``forms``, listed by their number of dimensions."""
    check_tensor(name, decay, like)
    if decay.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64; got {decay.dtype}")
    if decay.ndim not in forms or decay.shape != forms[decay.ndim][1]:
        allowed = " or ".join(f"{letters} = {list(shape)}" for letters, shape in forms.values())
        raise ValueError(f"{name} must have shape {allowed}; got {list(decay.shape)}")


def check_state(name: str, state: Tensor | None, letters: str, shape: tuple[int, ...], like: Tensor) -> None:
    if state is None:
        return
    check_tensor(name, state, like)
    if state.shape != shape:
        raise ValueError(f"{name} must have shape {letters} = {list(shape)}; got {list(state.shape)}")
    wanted = torch.float64 if like.dtype == torch.float64 else torch.float32
    if state.dtype != wanted:
        raise TypeError(f"{name} must be {wanted} for {like.dtype} inputs; got {state.dtype}")


def check_updatable(state: Tensor) -> None:
    """The step updates the state in place: every element must have its own place in memory, D or E dense."""
    strides, sizes = state.stride(), state.shape
    extent = 1  # of the dimensions with smaller strides
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < extent:
            raise ValueError(
                f"state must have memory of its own for each element, to be updated in place; got shape {list(sizes)} "
                f"with strides {list(strides)}"
            )
        extent += (size - 1) * stride if size > 1 else 0
    if not any(strides[i] == 1 or sizes[i] == 1 for i in (2, 3)):
        raise ValueError(f"state must be dense (stride 1) along D or along E; got strides {list(strides)}")


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    check_tensor("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64; got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have one dimension and at least 2 entries, [sequences + 1]; got shape "
            f"{list(cu_seqlens.shape)}"
        )
    if q.shape[0] != 1:
        raise ValueError(f"q, k and v must have B = 1 with cu_seqlens (sequences are packed along N); got {q.shape[0]}")


def packed_bounds(cu_seqlens: Tensor, length: int) -> list[int]:
    """The values of ``cu_seqlens``, checked: where each packed sequence starts, and N."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0; got {bounds[0]}")
    if bounds[-1] != length:
        raise ValueError(f"cu_seqlens must end at N = {length}; got {bounds[-1]}")
    for i in range(1, len(bounds)):
        if bounds[i] < bounds[i - 1]:
            raise ValueError(f"cu_seqlens must never decrease; got {bounds[i]} after {bounds[i - 1]} at entry {i}")
    return bounds
