"""Wrong input: the error names the argument, what it was and what it must be."""

import pytest
import torch

import fulmen

B, N, M, H, D, E = 2, 6, 7, 4, 8, 5


def call(**changes):
    shapes = {"q": (B, N, H, D), "k": (B, M, H, D), "v": (B, M, H, E), "gate": (B, N, H, E)}
    return fulmen.output_gated_attention(**{name: torch.randn(shape) for name, shape in shapes.items()} | changes)


WRONG = [
    ({"q": [1.0]}, TypeError, r"q must be a torch.Tensor \[B, N, H, D\]; got list"),
    ({"v": None}, TypeError, r"v must be a torch.Tensor \[B, M, H, D\]; got NoneType"),
    ({"gate": torch.randn(B, N, E)}, ValueError, r"gate must have 4 dimensions, .*; got shape \[2, 6, 5\]"),
    ({"gate": torch.ones(B, N, H, E).long()}, TypeError, r"gate must be float32, .*; got torch.int64"),
    (
        {"gate": torch.randn(B, N, H, E).half()},
        TypeError,
        r"gate must have the dtype of q, torch.float32; got torch.float16",
    ),
    ({"v": torch.randn(B, M, H, E).half()}, TypeError, r"v must have the dtype of k, torch.float32; got torch.float16"),
    (
        {"k": torch.randn(B, M, H, D).half(), "v": torch.randn(B, M, H, E).half()},
        TypeError,
        r"k must have the dtype of q, torch.float32; got torch.float16",
    ),
    (
        {"k": torch.randn(B, M, H, D, device="meta"), "v": torch.randn(B, M, H, E, device="meta")},
        ValueError,
        r"k must be on the device of q, cpu; got meta",
    ),
    (
        {"gate": torch.randn(B, N + 1, H, E)},
        ValueError,
        r"gate must have the same B and N as q, .*; got shape \[2, 7, 4, 5\]",
    ),
    (
        {"v": torch.randn(B, M + 1, H, E)},
        ValueError,
        r"v must have the same B and M as k, .*; got shape \[2, 8, 4, 5\]",
    ),
    (
        {"k": torch.randn(3, M, H, D), "v": torch.randn(3, M, H, E)},
        ValueError,
        r"k must have the same B as q, .*; got shape \[3, 7, 4, 8\]",
    ),
    ({"k": torch.randn(B, M, 1, D)}, ValueError, r"k must have the heads of q, 4; got shape \[2, 7, 1, 8\]"),
    ({"v": torch.randn(B, M, 1, E)}, ValueError, r"^v must have the heads of q, 4; got shape \[2, 7, 1, 5\]"),
    ({"gate": torch.randn(B, N, 1, E)}, ValueError, r"^gate must have the heads of q, 4; got shape \[2, 6, 1, 5\]"),
    (
        {"k": torch.randn(B, M, H, D + 1)},
        ValueError,
        r"^k must have the last dimension of q, 8; got shape \[2, 7, 4, 9\]",
    ),
    (
        {"gate": torch.randn(B, N, H, E + 1)},
        ValueError,
        r"^gate must have the last dimension of v, 5; got shape \[2, 6, 4, 6\]",
    ),
    ({"v": torch.randn(B, M, H, 513)}, ValueError, r"v must have a last dimension of 1 to 512"),
    ({"save": ("qkv",)}, ValueError, r"save must be one of \(\), \('kv',\), \('kv', 'qkv'\); got \('qkv',\)"),
    ({"save": "kv"}, ValueError, r"save must be one of .*; got 'kv'"),
    ({"backend": "fastest"}, ValueError, r"backend must be one of 'auto'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_no_heads():
    with pytest.raises(ValueError, match=r"q must have at least one head; got shape \[2, 6, 0, 8\]"):
        call(**{name: torch.randn(B, 6, 0, 8) for name in ("q", "k", "v", "gate")})


def test_one_head_and_the_largest_sizes():
    given = {"q": (B, N, 1, 512), "k": (B, M, 1, 512), "v": (B, M, 1, 1), "gate": (B, N, 1, 1)}
    assert call(**{name: torch.randn(shape) for name, shape in given.items()}).shape == (B, N, 1, 1)


def test_an_unknown_option():
    with pytest.raises(TypeError, match="scale"):
        call(scale=1.0)
