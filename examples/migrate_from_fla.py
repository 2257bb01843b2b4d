"""A layer written for flash-linear-attention, on a CPU: the code is as it was, but for the import.

It learns to recall which value it has seen with a key, then decodes token by token from its state, as it would with FLA
on a GPU.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

# from fla.ops.gla import chunk_gla, fused_recurrent_gla
from fulmen.integrations.fla.gla import chunk_gla, fused_recurrent_gla

KEYS, VALUES = 8, 8


class GatedLinearAttention(nn.Module):
    """Prompts are computed in chunks, decoded tokens by the recurrence."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.gate, self.out = (
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, hidden),
        )

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        g = logsigmoid(self.gate(x)).unflatten(-1, (self.heads, -1)) / 16
        if x.shape[1] > 1:
            output, state = chunk_gla(q, k, v, g, initial_state=state, output_final_state=True)
        else:
            output, state = fused_recurrent_gla(q, k, v, gk=g, initial_state=state, output_final_state=True)
        return self.out(output.flatten(2)), state


class Model(nn.Module):
    def __init__(self, tokens: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.mixer = nn.Embedding(tokens, hidden), GatedLinearAttention(hidden, heads)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VALUES)

    def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        mixed, state = self.mixer(x, state)
        return self.head(self.norm(x + mixed)), state


def recall(rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that are a key with its value, the same in all of a row, or in half of the places a key alone; the values;
    and which places are asked for theirs."""
    keys = torch.randint(KEYS, (rows, tokens))
    values = torch.randint(VALUES, (rows, KEYS)).gather(1, keys)
    asked = torch.rand(rows, tokens) < 0.5
    return keys * (VALUES + 1) + values.masked_fill(asked, VALUES), values, asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=50, help="of training")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Model(KEYS * (VALUES + 1), options.hidden, options.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = time.perf_counter()
    for step in range(options.steps):
        rows, values, asked = recall(8, options.tokens)
        logits, _ = model(rows)
        loss = cross_entropy(logits[asked], values[asked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, options.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    print(f"{options.steps * rows.numel() / (time.perf_counter() - begin):.0f} tokens a second in training")

    with torch.no_grad():
        whole, _ = model(rows)
        prompt = options.tokens // 2
        logits, state = model(rows[:, :prompt])
        parts = [logits]
        for t in range(prompt, options.tokens):
            logits, state = model(rows[:, t : t + 1], state)
            parts.append(logits)
    error = (torch.cat(parts, 1) - whole).abs().max().item()
    print(f"prompt and decoded tokens agree with the whole row to {error:.1e}")


if __name__ == "__main__":
    main()
