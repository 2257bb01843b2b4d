"""``fla.ops.hgrn``: the gated recurrence of HGRN, ``h_t = exp(g_t) h_{t-1} + x_t``.

x, the log-decay g and the outputs h ``[B, T, D]``; states ``[N, D]``, of as many sequences as cu_seqlens packs. To our
operator, x are values with a decay of their own, under queries and keys that are all 1.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

import fulmen
from fulmen.integrations.fla.recurrence import Results, check_gate, run, sequences
from fulmen.runtime.checks import MAX_SIZE, check_alike


def chunk_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False) -> Results:
    """As :func:`fused_recurrent_hgrn`."""
    return fused_recurrent_hgrn(x, g, initial_state, output_final_state)


def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Results:
    """h, and the last of each sequence."""
    check_alike("[B, T, D]", {"x": x})
    if x.ndim != 3:
        raise ValueError(f"x must have 3 dimensions, [B, T, D]; got shape {list(x.shape)}")
    check_gate("g", g, "[B, T, D]", x.shape)
    channels = x.shape[-1]
    if initial_state is not None:
        check_gate("initial_state", initial_state, "[N, D]", (sequences(x, cu_seqlens), channels))
    heads = -(-channels // MAX_SIZE)
    filling = -channels % heads

    def by_head(tensor: Tensor) -> Tensor:
        """``[..., D]`` as ``[..., H, E]``, with zeros where D is not a multiple of H."""
        return (pad(tensor, (0, filling)) if filling else tensor).unflatten(-1, (heads, -1))

    ones = x.new_ones(()).expand(*x.shape[:2], 1, 1)
    output, state = run(
        fulmen.linear_attention,
        ones,
        ones,
        by_head(x),
        log_decay_v=by_head(g),
        scale=1.0,
        initial_state=None if initial_state is None else by_head(initial_state).unsqueeze(2),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        schedule="recurrent",  # with a key size of 1, a chunk saves nothing
    )
    return output.flatten(2)[..., :channels], None if state is None else state.flatten(1)[..., :channels]
