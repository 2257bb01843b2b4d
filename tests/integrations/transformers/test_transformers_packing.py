"""Packed sequences of a patched model are as if each were alone."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import MAMBA2, build, relative, tokens

from fulmen.integrations.transformers import patch
from fulmen.integrations.transformers.convolution import causal_conv1d_fn
from fulmen.integrations.transformers.mamba2 import mamba2_chunk_scan

LENGTHS = ((5, 1, 11), (9, 2, 6))


def described(rows):
    """Positions and indices of the sequences of rows, ``[rows, N]`` each."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    seq_idx = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in rows])
    return positions, seq_idx.int()


def one_by_one(model, ids, rows, **options):
    parts = [ids[i : i + 1].split(row, 1) for i, row in enumerate(rows)]
    return torch.stack([torch.cat([model(part, **options)[0][0] for part in row]) for row in parts])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", [*MAMBA2, "MiniMax", "Lfm2", "Lfm2Moe", "Inkling", "Qwen3_5", "KimiLinear"])
def test_rows_of_sequences(name, training):
    model, ids = build(name).train(training), tokens(2, 17)
    positions, seq_idx = described(LENGTHS)
    options = {} if name == "Mamba2" else {"position_ids": positions}
    with torch.no_grad(), patch(model):
        expected = one_by_one(model, ids, LENGTHS, use_cache=False)
        assert relative(model(ids, seq_idx=seq_idx, use_cache=False, **options)[0], expected) < 1e-4
        if name != "Inkling":  # which hands on seq_idx alone
            starts = torch.tensor([0, 5, 6, 17], dtype=torch.int32)
            options = {key: value[:1] for key, value in options.items()}
            after = model(ids[:1], cu_seq_lens_q=starts, use_cache=False, **options)[0]
            assert relative(after, expected[:1]) < 1e-4
    if name in ("Bamba", "Lfm2"):
        with pytest.raises(ValueError, match="packed sequences"):
            model(ids, seq_idx=seq_idx, use_cache=False)


def test_gradients_of_packed_sequences():
    ids = tokens(2, 17)
    model = build("Mamba2").train()
    patch(model)
    seq_idx = described(LENGTHS)[1]

    def gradient(logits):
        model.zero_grad()
        logits.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradient(one_by_one(model, ids, LENGTHS))
    assert relative(gradient(model(ids, seq_idx=seq_idx).logits), expected) < 1e-4
    model.gradient_checkpointing_enable()
    assert relative(gradient(model(ids, seq_idx=seq_idx).logits), expected) < 1e-4


def test_a_scan_that_continues():
    """States enter the first sequence of a row, and the last one's leaves it."""
    g = torch.Generator().manual_seed(0)
    x, dt, B, C = (torch.randn(2, 17, *size, generator=g) for size in ((4, 8), (4,), (2, 16), (2, 16)))
    A, initial = -torch.rand(4, generator=g), torch.randn(2, 4, 8, 16, generator=g)

    def scan(begin, end, row=slice(None), **options):
        parts = (tensor[row, begin:end] for tensor in (x, dt))
        return mamba2_chunk_scan(
            *parts, A, B[row, begin:end], C[row, begin:end], 8, dt_softplus=True, return_final_states=True, **options
        )

    output, state = scan(0, 17, seq_idx=described(LENGTHS)[1], initial_states=initial)
    for i, lengths in enumerate(LENGTHS):
        begin, row = 0, slice(i, i + 1)
        for n in lengths:
            alone, last = scan(begin, begin + n, row, initial_states=initial[row] if begin == 0 else None)
            torch.testing.assert_close(output[row, begin : begin + n], alone)
            begin += n
        torch.testing.assert_close(state[row], last)
    starts = torch.tensor([0, 5, 5, 17])  # an empty sequence between them
    state = scan(0, 17, slice(0, 1), cu_seq_lens_q=starts, initial_states=initial[:1])[1]
    torch.testing.assert_close(state, scan(5, 17, slice(0, 1))[1])


def test_a_convolution_that_continues():
    """Tokens before those that are described belong to the first sequence of their row."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 6, 4 + 17, generator=g), torch.randn(6, 4, generator=g)
    y = causal_conv1d_fn(x, weight, activation="silu", seq_idx=described(LENGTHS)[1])
    for i, (first, second, _) in enumerate(LENGTHS):
        for begin, end in ((0, 4 + first), (4 + first, 4 + first + second), (4 + first + second, 21)):
            alone = causal_conv1d_fn(x[i : i + 1, :, begin:end], weight, activation="silu")
            torch.testing.assert_close(y[i : i + 1, :, begin:end], alone)


@pytest.mark.parametrize(
    "options",
    [
        {"seq_idx": torch.zeros(1, 17, dtype=torch.int32)},
        {"seq_idx": torch.zeros(2, 16, dtype=torch.int32)},
        {"cu_seq_lens_q": torch.tensor([0, 17])},
    ],
    ids=["rows", "tokens", "flattened"],
)
def test_what_does_not_describe_the_tokens_is_refused(options):
    model = build("Mamba2")
    patch(model)
    with pytest.raises(ValueError, match=next(iter(options)) + "|cu_seqlens"):
        model(tokens(2, 17), **options)
