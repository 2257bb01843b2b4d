"""Packed sequences of a patched model are as if each were alone."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import CONFIGS, build, relative, tokens

from fulmen.integrations.transformers import patch, stepping_aside
from fulmen.integrations.transformers.convolution import causal_conv1d_fn
from fulmen.integrations.transformers.mamba2 import mamba2_chunk_scan

LENGTHS = ((5, 1, 11), (9, 2, 6))
# Mamba-1's recurrence is transformers' own; Glm5Next refuses.
PACKING = [name for name in CONFIGS if name not in ("Mamba", "FalconMamba", "Jamba", "Zamba", "Glm5Next")]
# A family of each kind of mixer, where that is what matters.
MIXERS = ("Mamba2", "Bamba", "MiniMax", "Lfm2", "Qwen3_5", "KimiLinear")


def described(rows):
    """Positions and indices of the sequences of rows, ``[rows, N]`` each."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    seq_idx = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in rows])
    return positions, seq_idx.int()


def cumulative(*rows):
    """Where the sequences of rows start and end, the rows one after the other."""
    return torch.tensor([0, *(n for row in rows for n in row)]).cumsum(0).int()


def one_by_one(model, ids, rows, **options):
    parts = [ids[i : i + 1].split(row, 1) for i, row in enumerate(rows)]
    return torch.stack([torch.cat([model(part, **options)[0][0] for part in row]) for row in parts])


@pytest.mark.parametrize(("name", "training"), [*((name, False) for name in PACKING), *((n, True) for n in MIXERS)])
def test_rows_of_sequences(name, training):
    model, ids = build(name).train(training), tokens(2, 17)
    positions, seq_idx = described(LENGTHS)
    options = {"use_cache": False} if name == "Mamba2" else {"use_cache": False, "position_ids": positions}
    with torch.no_grad(), patch(model):
        expected = one_by_one(model, ids, LENGTHS, use_cache=False)
        assert relative(model(ids, **options)[0], expected) > 0.1  # what is described is needed
        assert relative(model(ids, seq_idx=seq_idx, **options)[0], expected) < 1e-4
        assert relative(model(ids, cu_seq_lens_q=cumulative(*LENGTHS), **options)[0], expected) < 1e-4
    if name in ("Bamba", "Lfm2"):
        with pytest.raises(ValueError, match="packed sequences"):
            model(ids, seq_idx=seq_idx, use_cache=False)


@pytest.mark.parametrize("options", [{"seq_idx": described(LENGTHS)[1]}, {"cu_seq_lens_q": cumulative(*LENGTHS)}])
def test_a_model_that_cannot_keep_them_apart_refuses(options):
    model = build("Glm5Next")
    assert "1 x Glm5NextTextModel: packed sequences are refused" in repr(patch(model))
    with pytest.raises(ValueError, match=f"{next(iter(options))}: Glm5NextTextModel cannot keep sequences apart"):
        model(tokens(2, 17), **options)


@pytest.mark.parametrize("lengths", [(15, 2), (17,)], ids=["the last is short", "one"])
def test_decoding_goes_on_from_the_last_sequence(lengths):
    """The convolution does not see the tokens before it, also where the model goes on by a packed row."""
    model, ids, more = build("Mamba2"), tokens(1, 17), tokens(1, 6, seed=2)
    with torch.no_grad(), patch(model):
        expected = model(torch.cat((ids[:, -lengths[-1] :], more), 1)).logits[:, -6:]
        cache = model(ids, cu_seq_lens_q=cumulative(lengths), use_cache=True).cache_params
        first = model(more[:, :1], cache_params=cache, use_cache=True).logits
        row = model(more[:, 1:], cu_seq_lens_q=cumulative((4, 1)), cache_params=cache, use_cache=True).logits
        assert relative(torch.cat((first, row[:, :4]), 1), expected[:, :5]) < 1e-4
        assert relative(row[:, 4:], model(more[:, 5:]).logits) < 1e-4
        last = model(ids[:, :1], cache_params=cache, use_cache=True).logits
        assert relative(last, model(torch.cat((more[:, 5:], ids[:, :1]), 1)).logits[:, 1:]) < 1e-4


@pytest.mark.parametrize("name", ["Bamba", "MiniMax", "Inkling"])
def test_softmax_attention_with_a_cache_is_said_to_leak(name, monkeypatch):
    monkeypatch.setattr(stepping_aside, "_said", set())
    model, (positions, seq_idx) = build(name), described(LENGTHS)
    patch(model)
    with torch.no_grad(), pytest.warns(UserWarning, match="pass use_cache=False"):
        model(tokens(2, 17), seq_idx=seq_idx, position_ids=positions, use_cache=True)


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
        {"cu_seq_lens_q": torch.tensor([0, 16, 32])},
        {"cu_seq_lens_q": torch.tensor([0, 10, 34])},
        {"cu_seq_lens_q": torch.tensor([3, 17, 34])},
    ],
    ids=["rows", "tokens", "one row", "short rows", "across rows", "not from the start"],
)
def test_what_does_not_describe_the_tokens_is_refused(options):
    model = build("Mamba2")
    patch(model)
    with pytest.raises(ValueError, match=next(iter(options))):
        model(tokens(2, 17), **options)
