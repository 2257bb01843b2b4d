"""Models that lose on the way what says where packed sequences start, and models that mix them where we do not reach.

Each entry of HANDING_ON makes a forward for one class, which calls the class's own and hands on what that drops.
REFUSING has classes that cannot keep packed sequences apart, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from fulmen.integrations.transformers.packing import Packing, packed

Forward = Callable[..., Any]


def to(*children: str) -> Callable[[Forward], Forward]:
    """The class calls these children without the keyword arguments that it does not know."""

    def of(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def handing_on(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            sequences = packed(kwargs)
            if not sequences:
                return forward(self, *args, **kwargs)
            told = {child: functools.partial(getattr(self, child), **sequences) for child in children}
            return forward(_With(self, told), *args, **kwargs)

        return handing_on

    return of


def inkling_layer(forward: Forward) -> Forward:
    """An InklingDecoderLayer, whose convolutions and those of its attention know ``seq_idx`` alone."""
    forward = to("attn_sconv", "mlp_sconv")(forward)

    @functools.wraps(forward)
    def handing_on(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packing = Packing.of(kwargs, *hidden_states.shape[:2])
        sequences = {} if packing is None else {"seq_idx": packing.seq_idx()}
        return forward(self, hidden_states, *args, **{**kwargs, **sequences})

    return handing_on


def refusing(forward: Forward, why: str) -> Forward:
    @functools.wraps(forward)
    def unpacked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sequences = packed(kwargs)
        if sequences:
            raise ValueError(f"{' and '.join(sequences)}: {type(self).__name__} cannot keep sequences apart: {why}")
        return forward(self, *args, **kwargs)

    return unpacked


def granite_moe_hybrid_model(forward: Forward) -> Forward:
    """GraniteMoeHybridModel makes the mask of its softmax attention without the positions, by which transformers tells
    sequences apart."""

    @functools.wraps(forward)
    def handing_on(
        self: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        if packed(kwargs) and attention_mask is None and position_ids is not None:
            if inputs_embeds is None:
                input_ids, inputs_embeds = None, self.embed_tokens(input_ids)
            mask = create_causal_mask(self.config, inputs_embeds, None, past_key_values, position_ids=position_ids)
            attention_mask = {"full_attention": mask, "linear_attention": None}
        return forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    return handing_on


class _With:
    """A module with other attributes, for the time of a call."""

    def __init__(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


HANDING_ON: Mapping[str, Callable[[Forward], Forward]] = {
    "Mamba2ForCausalLM": to("backbone"),
    "InklingDecoderLayer": inkling_layer,
    "InklingAttention": to("k_sconv", "v_sconv"),
    "GraniteMoeHybridModel": granite_moe_hybrid_model,
}

REFUSING: Mapping[str, str] = {"Glm5NextTextModel": "its sparse attention chooses among the tokens of a whole row"}
