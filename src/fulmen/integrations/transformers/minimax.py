"""MiniMax's lightning attention: transformers computes it inside one forward, so the forward is ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

import fulmen
from fulmen.integrations.transformers.recurrence import over_rows
from fulmen.nn.lightning_attention import split_heads


def lightning_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The forward of a MiniMaxLightningAttention: prefill, decoding and continuation.

    Returns the output ``[B, N, C]`` and the state ``[B, H, D, D]`` in the dtype of the values.
    """
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = qkv * attention_mask.unsqueeze(-1).to(qkv.dtype)
    q, k, v = split_heads(qkv, self.num_attention_heads)
    state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    log_decay = -self.slope_rate.flatten()
    if qkv.shape[1] == 1 and state is not None and not torch.is_grad_enabled():
        state = state.clone()  # as recorded attentions, earlier states stay what they are
        output = fulmen.linear_attention_step(q[:, 0], k[:, 0], v[:, 0], state, log_decay=log_decay, scale=1.0)
    else:
        output, state = over_rows(
            fulmen.linear_attention, q, k, v, log_decay=log_decay, state=state, packed=kwargs, scale=1.0
        )
        state = state.to(v.dtype)
    output = output.view(*hidden_states.shape[:2], -1)
    output = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(output)
    if past_key_values is not None:
        _keep(past_key_values, self.layer_idx, state, tokens=qkv.shape[1])
    return self.out_proj(output), state


def _keep(cache: Any, layer_idx: int, state: Tensor, tokens: int) -> None:
    """The state, and how many tokens it has seen: transformers counts the tokens of layer 0, which has no keys to count
    if it is a lightning layer, and so masks and positions of a continuation are wrong there."""
    cache.set_linear_cache(layer_idx, state)
    while len(cache.layers) <= layer_idx:
        cache.layers.append(DynamicLayer())
    if not isinstance(cache.layers[layer_idx], LightningCacheLayer):
        cache.layers[layer_idx] = LightningCacheLayer(cache.linear_cache, layer_idx)
    cache.layers[layer_idx].tokens += tokens


class LightningCacheLayer(DynamicLayer):
    """In the place of a MiniMaxCache's layer that has no keys: the tokens that its state in ``states`` has seen."""

    def __init__(self, states: list[Tensor], layer_idx: int) -> None:
        super().__init__()
        self.states, self.layer_idx, self.tokens = states, layer_idx, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        state = self.states[self.layer_idx]
        self.states[self.layer_idx] = state.index_select(0, beam_idx.to(state.device))
