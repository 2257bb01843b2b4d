"""The short convolution before a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fulmen.nn.call import Call
from fulmen.runtime.checks import check_count


class ShortConv(nn.Module):
    """Causal convolution of each channel with weights of its own, then SiLU.

    ``weight`` is ``[C, 1, K]`` and ``bias`` ``[C]``, as torch.nn.Conv1d with groups has them.

    Args:
        channels: C. width: K. bias: whether there is one.
    """

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        check_count("conv_size", width)
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.width**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, call: Call, name: str = "conv") -> Tensor:
        """``[..., C]``; ``name`` is that of its state in the cache."""
        return call.causal_conv1d(name, x, self.weight.squeeze(1), self.bias, "silu")

    def of_parts(self, parts: dict[str, Tensor], call: Call) -> list[Tensor]:
        """The same of channels in several tensors, by the names of their states, without a copy that has them all."""
        sizes = [x.shape[-1] for x in parts.values()]
        weights = self.weight.squeeze(1).split(sizes)
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        return [
            call.causal_conv1d(name, x, weight, bias, "silu")
            for (name, x), weight, bias in zip(parts.items(), weights, biases, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}, silu"
