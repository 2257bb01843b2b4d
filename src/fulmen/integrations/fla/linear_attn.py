"""``fla.ops.linear_attn``: linear attention without a decay, which may divide by the sum of its weights.

q and k ``[B, T, H, K]``, v ``[B, T, H, V]``. A state is ``[N, H, K, V]``; with ``normalize`` it is a pair of that and
the sum of the keys, z ``[N, 1, H, K]``, here in float32, as is all from the read to the division. N is the number of
sequences that cu_seqlens packs. The forms are one computation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fulmen.integrations.fla.recurrence import attend, check_gate, checked, sequences
from fulmen.runtime.tensors import at_least_float32

State = Tensor | tuple[Tensor | None, Tensor | None] | None
EPSILON = 1e-10


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """With ``normalize`` z is returned whatever ``output_final_state`` says, as FLA does."""
    return fused_recurrent_linear_attn(
        q, k, v, scale, initial_state, output_final_state, normalize=normalize, cu_seqlens=cu_seqlens
    )


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:
    """``reverse``: from the last token of each sequence to its first. Otherwise as :func:`chunk_linear_attn`."""
    options: dict[str, Any] = {"scale": scale, "reverse": reverse, "cu_seqlens": cu_seqlens}
    q, k, v = checked(q=q, k=k, v=v)
    dtype = q.dtype
    if normalize:  # neither of what is divided need be in the range of a 16-bit dtype
        q, k, v = map(at_least_float32, (q, k, v))
    given = initial_state if normalize and isinstance(initial_state, (tuple, list)) else (initial_state, None)
    state, z = given
    output, state = attend(q, k, v, initial_state=state, output_final_state=output_final_state, **options)  # type: ignore[arg-type]  # attend's check says what a state must be
    if not normalize:
        return output, state
    # The sum of the weights is what attention makes of values that are all 1, and its state the sum of the keys.
    ones = k.new_ones(()).expand(*k.shape[:2], 1, 1)
    if z is not None:
        check_gate("z of initial_state", z, "[N, 1, H, K]", (sequences(q, cu_seqlens), 1, *k.shape[2:]))
        z = z.permute(0, 2, 3, 1)
    weights, z = attend(q, k, ones, initial_state=z, output_final_state=True, **options)
    assert z is not None
    return (output / (weights + EPSILON)).to(dtype), (state, z.permute(0, 3, 1, 2))
