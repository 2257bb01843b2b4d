"""What errors become: over the steps of a training, and over the tokens of a long decode."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

import fulmen
from fulmen.lab.tolerances import relative_error
from fulmen.runtime import core

pytestmark = [
    pytest.mark.skipif(core.core is None, reason=core.why_unavailable),
    pytest.mark.not_interpreted,
    pytest.mark.one_build,
]
TOKENS, HEADS, SIZE, WORDS = 24, 2, 8, 16


class Model(nn.Module):
    """Embedding, one mixer with a decay and β from the token, and the logits of the next word."""

    def __init__(self, operator, dtype, backend):
        super().__init__()
        self.operator, self.dtype, self.backend = operator, dtype, backend
        self.embedding = nn.Embedding(WORDS, HEADS * SIZE)
        self.qkv = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.gates = nn.Linear(HEADS * SIZE, 2 * HEADS)
        self.logits = nn.Linear(HEADS * SIZE, WORDS)

    def forward(self, words):
        x = self.embedding(words)
        q, k, v = self.qkv(x).to(self.dtype).unflatten(-1, (3, HEADS, SIZE)).unbind(-3)
        decay, beta = self.gates(x).chunk(2, -1)
        options = {"log_decay": logsigmoid(decay + 3), "backend": self.backend}
        if self.operator == "delta_rule":
            mixed = fulmen.delta_rule(q, k, v, beta.sigmoid(), normalize_qk=True, **options)
        else:
            mixed = fulmen.linear_attention(q, k, v, **options)
        return self.logits(x + mixed.flatten(2).float())


def losses(operator, dtype, backend, steps):
    """Of each step: the model learns four sequences by heart."""
    torch.manual_seed(0)
    model = Model(operator, dtype, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    words = torch.randint(WORDS, (4, TOKENS + 1))
    found = []
    for _ in range(steps):
        loss = cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


# The largest difference of two losses at one step, which are of order 1. A step multiplies the differences before it.
ALLOWED = {20: {torch.float32: 1e-5, torch.bfloat16: 1e-3}, 300: {torch.float32: 1e-2, torch.bfloat16: 2e-2}}


@pytest.mark.parametrize("steps", [20, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", ["linear_attention", "delta_rule"])
def test_backends_train_alike(operator, dtype, steps):
    curves = {backend: losses(operator, dtype, backend, steps) for backend in ("reference", "native", "torch")}
    for curve in curves.values():
        assert (curve - curves["reference"]).abs().max() <= ALLOWED[steps][dtype]
    if steps == 300:
        assert curves["native"][-1] < 0.7 * curves["native"][0], "it learns"


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("decay", [0.999, 1.0])
@pytest.mark.parametrize("operator", ["linear_attention", "delta_rule"])
@pytest.mark.parametrize("steps", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_decoding_does_not_drift(operator, decay, backend, steps):
    """A float32 state, token by token, against the whole sequence in float64. The factor of a decay is off by up to
    half a unit in the last place, and it is so at each of the 1000 tokens that 0.999 remembers."""
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(1, steps, HEADS, 32, generator=generator) for name in "qkv"}
    options = {"log_decay": torch.full((HEADS,), math.log(decay))}
    if operator == "delta_rule":
        given["beta"] = torch.rand(1, steps, HEADS, generator=generator)
        options["normalize_qk"] = True
    of_sequence, of_token = getattr(fulmen, operator), getattr(fulmen, f"{operator}_step")
    exact = {name: x.double() for name, x in given.items()}
    log_decay = {"log_decay": options["log_decay"].double()}
    expected, last = of_sequence(**exact, **options | log_decay, return_state=True, backend="torch")
    state = torch.zeros(1, HEADS, 32, 32)
    outputs = [
        of_token(**{name: x[:, t] for name, x in given.items()}, state=state, **options, backend=backend)
        for t in range(steps)
    ]
    of_factor = 0.0 if decay == 1.0 else 2**-25 / (1 - decay)
    errors = relative_error(state, last), relative_error(torch.stack(outputs[-100:], 1), expected[:, -100:])
    assert max(errors) <= 1e-5 + of_factor, errors
