"""A language model of Fulmen's layers, as the other examples use it: embeddings, blocks of mixer and MLP, a head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import silu

from fulmen.nn import RMSNorm, StateCache


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up_and_gate = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_and_gate(x).chunk(2, dim=-1)
        return self.down(up * silu(gate))


class Block(nn.Module):
    def __init__(self, hidden: int, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = RMSNorm(hidden), mixer
        self.mlp_norm, self.mlp = RMSNorm(hidden), MLP(hidden)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), **options)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """ids ``[B, N]`` to logits ``[B, N, vocabulary]``; options are those of the layers, with a StateCache."""

    def __init__(self, vocabulary: int, hidden: int, mixers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, mixer) for mixer in mixers)
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(
        self,
        ids: Tensor,
        *,
        cache: StateCache | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            entry = None if cache is None else cache[i]
            x = block(x, cache=entry, cu_seqlens=cu_seqlens, attention_mask=attention_mask)
        return self.head(self.norm(x))
