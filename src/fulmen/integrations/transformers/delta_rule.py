"""The functions that transformers' mixers with a gated delta rule call, under their names and with their arguments.

query and key ``[B, N, Hk, D]``, value ``[B, N, Hv, E]``, beta ``[B, N, Hv]``, states ``[B, Hv, D, E]``. The log-decay g
is ``[B, N, Hv]`` in Gated DeltaNet and ``[B, N, Hv, D]`` in Kimi Delta Attention: to the operator no other difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fulmen
from fulmen.integrations.transformers.recurrence import over_rows

Results = tuple[Tensor, Tensor | None]


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Results:
    """All tokens. ``chunk_size`` is transformers' own; the operator has its own chunks."""
    output, state = over_rows(
        fulmen.delta_rule,
        query,
        key,
        value,
        beta,
        log_decay=g,
        state=initial_state,
        packed=kwargs,
        normalize_qk=use_qk_l2norm_in_kernel,
    )
    return output, state if output_final_state else None


def torch_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Results:
    """The same; a decoded token updates a cache's state where it is."""
    tensors = query, key, value, beta, g, initial_state
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if query.shape[1] != 1 or initial_state is None or not output_final_state or differentiated:
        options = initial_state, output_final_state, use_qk_l2norm_in_kernel
        return torch_chunk_gated_delta_rule(query, key, value, g, beta, 0, *options, **kwargs)
    q, k, v, beta, log_decay = (x[:, 0] for x in (query, key, value, beta, g))
    output = fulmen.delta_rule_step(
        q, k, v, beta, initial_state, log_decay=log_decay, normalize_qk=use_qk_l2norm_in_kernel
    )
    return output.unsqueeze(1), initial_state


def chunk_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Results:
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel
    return torch_chunk_gated_delta_rule(query, key, value, g, beta, chunk_size, *options, **kwargs)


def recurrent_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Results:
    options = initial_state, output_final_state, use_qk_l2norm_in_kernel
    return torch_recurrent_gated_delta_rule(query, key, value, g, beta, *options, **kwargs)
