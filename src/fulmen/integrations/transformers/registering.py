"""``register()``: Fulmen's functions for the kernels package, which transformers asks with ``use_kernels=True``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from fulmen.integrations.transformers.functions import OURS
from fulmen.integrations.transformers.mamba2 import mamba2_selective_state_update
from fulmen.integrations.transformers.stepping_aside import or_original

# The kernels package's names of functions that transformers' files name otherwise.
_KERNELS = {
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
    "mamba_chunk_scan_combined": "mamba2_chunk_scan",
    "selective_state_update": "mamba2_selective_state_update",
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kda": "chunk_kimi_delta_attention",
    "fused_recurrent_kda": "recurrent_kimi_delta_attention",
}


def register() -> None:
    """Has ``from_pretrained(..., use_kernels=True)`` find Fulmen's functions for models on a CPU.

    The kernels package replaces a function of a modeling file once and for all: every model of that file in this
    process computes with ours from then on, those loaded without ``use_kernels`` too, and nothing undoes it. Packed
    sequences stay refused. :func:`fulmen.integrations.transformers.patch` has neither drawback.
    """
    try:
        from kernels import Mode, register_kernel_mapping
    except ImportError as missing:
        raise ImportError("register() needs the kernels package: pip install kernels") from missing
    modes = (Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE)
    register_kernel_mapping(
        {name: {"cpu": dict.fromkeys(modes, _Repository(OURS[ours]))} for name, ours in _KERNELS.items()}
    )


class _Repository:
    """What the kernels package loads a layer from, without a download."""

    def __init__(self, ours: Callable[..., Any]) -> None:
        self._ours = ours

    def load(self) -> type[nn.Module]:
        ours = self._ours

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            original = MethodType(type(self).forward, self)
            # Mamba-1 updates its state [B, C, S] under the name that Mamba-2 has for its [B, H, P, S].
            if ours is mamba2_selective_state_update and args[0].ndim == 3:
                return original(*args, **kwargs)
            return or_original(ours, original, packs=False)(*args, **kwargs)

        # The kernels package compares signatures; that a function has this attribute, its type does not say.
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [itself, *inspect.signature(ours).parameters.values()]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return type(ours.__name__, (nn.Module,), {"forward": forward, "can_torch_compile": True, "has_backward": True})
