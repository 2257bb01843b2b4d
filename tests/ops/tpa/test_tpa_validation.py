"""Wrong input: the error names the argument, what it was and what it must be."""

import re

import numpy as np
import pytest
import torch

import fulmen
from cases import BACKENDS
from fulmen.runtime import core

B, M, H, R, D, E = 2, 6, 4, 3, 8, 5


def decode(**changes):
    given = {
        "aq": torch.randn(B, 1, H, R),
        "ak": torch.randn(B, M, H),
        "av": torch.randn(B, M, H),
        "bq": torch.randn(B, 1, R, D),
        "bk": torch.randn(B, M, D),
        "bv": torch.randn(B, M, E),
    }
    return fulmen.tpa_decode(**given | changes)


WRONG = [
    ({"aq": [1.0]}, TypeError, r"aq must be a torch.Tensor; got list"),
    ({"bv": None}, TypeError, r"bv must be a torch.Tensor; got NoneType"),
    ({"ak": torch.ones(B, M, H).long()}, TypeError, r"ak must be float32, .*; got torch.int64"),
    ({"bk": torch.randn(B, M, D).half()}, TypeError, r"bk must have the dtype of aq, torch.float32; got torch.float16"),
    ({"bk": torch.randn(B, M, D, device="meta")}, ValueError, r"bk must be on the device of aq, cpu; got meta"),
    ({"bk": torch.randn(B, M, D).to_sparse()}, TypeError, r"bk must be a dense tensor; got layout"),
    ({"aq": torch.randn(B, H, R)}, ValueError, r"aq must have shape \[B, 1, H, R\]; got \[2, 4, 3\]"),
    ({"aq": torch.randn(B, 2, H, R)}, ValueError, r"aq must have shape \[B, 1, H, R\]; got \[2, 2, 4, 3\]"),
    ({"aq": torch.randn(B, 1, 0, R)}, ValueError, r"aq must have at least one head; got shape \[2, 1, 0, 3\]$"),
    ({"aq": torch.randn(B, 1, H, 0)}, ValueError, r"aq must have R of 1 to 512; got shape"),
    ({"bq": torch.randn(B, 1, R + 1, D)}, ValueError, r"bq must have the R of aq, 3; got shape \[2, 1, 4, 8\]"),
    ({"bq": torch.randn(B, 1, R, 513)}, ValueError, r"bq must have D of 1 to 512; got shape"),
    ({"ak": torch.randn(B, M)}, ValueError, r"ak must have shape \[B, M, H\] or \[B, M, H, Rk\]; got \[2, 6\]"),
    ({"av": torch.randn(B, M, H, 2)}, ValueError, r"bv must have shape \[B, M, Rv, E\] beside av .* got \[2, 6, 5\]"),
    ({"bk": torch.randn(B, M, 2, D)}, ValueError, r"bk must have shape \[B, M, D\] beside ak \[2, 6, 4\]; got"),
    (
        {"ak": torch.randn(B, M, H, 2), "bk": torch.randn(B, M, 3, D)},
        ValueError,
        r"bk must have the Rk of ak, 2; got shape \[2, 6, 3, 8\]",
    ),
    ({"av": torch.randn(B, M, H, 0), "bv": torch.randn(B, M, 0, E)}, ValueError, r"av must have Rv of 1 to 512"),
    ({"bv": torch.randn(B, M, 0)}, ValueError, r"bv must have E of 1 to 512; got shape \[2, 6, 0\]"),
    (
        {"bk": torch.randn(B, M, D + 1)},
        ValueError,
        r"bk must have the last dimension of bq, D = 8; got shape \[2, 6, 9\]$",
    ),
    ({"bk": torch.randn(1, M, D)}, ValueError, r"bk must have the B of aq, 2; got shape \[1, 6, 8\]"),
    ({"bv": torch.randn(B, M + 1, E)}, ValueError, r"bv must have the M of ak, 6; got shape \[2, 7, 5\]"),
    ({"av": torch.randn(B, M, 1)}, ValueError, r"av must have the H of aq, 4; got shape \[2, 6, 1\]"),
    ({"scale": "1"}, TypeError, r"scale must be a real number or None; got '1'"),
    ({"split": "tokens"}, ValueError, r"split must be one of 'auto', 'batch', 'head', 'sequence'; got 'tokens'"),
    ({"seqlens": [1, 2]}, TypeError, r"seqlens must be a torch.Tensor or None; got list"),
    ({"seqlens": torch.ones(B)}, TypeError, r"seqlens must be int32 or int64; got torch.float32"),
    ({"seqlens": torch.ones(B + 1).int()}, ValueError, r"seqlens must have shape \[B\] = \[2\]; got \[3\]"),
    (
        {"seqlens": torch.ones(B, device="meta").int()},
        ValueError,
        r"seqlens must be on the device of the factors, cpu; got meta$",
    ),
    ({"seqlens": torch.tensor([1, M + 1])}, ValueError, r"seqlens must be 0 to M = 6; got 7 at entry 1"),
    ({"seqlens": torch.tensor([-1, M])}, ValueError, r"seqlens must be 0 to M = 6; got -1 at entry 0"),
    ({"backend": "fastest"}, ValueError, r"backend must be one of"),
    ({"scal": 1.0}, TypeError, r"unexpected keyword argument 'scal'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_input(changes, error, message):
    with pytest.raises(error, match=message):
        decode(**changes)


def test_a_scale_of_another_library():
    outputs = []
    for scale in (np.float32(0.5), 0.5):
        torch.manual_seed(0)
        outputs.append(decode(scale=scale))
    assert torch.equal(*outputs)


@pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
def test_the_core_refuses_lengths_and_python_names_them():
    from fulmen.ops.tpa import native
    from fulmen.ops.tpa.problem import decode_of

    given = [torch.randn(s) for s in ((1, 1, H, R), (1, M, H), (1, M, H), (1, 1, R, D), (1, M, D), (1, M, E))]
    output = torch.full((1, 1, H, E), torch.nan)
    with pytest.raises(ValueError, match="seqlens must be 0 to M = 6; got 7 at entry 0") as raised:
        native.forward(decode_of(*given, seqlens=torch.tensor([M + 1])), output)
    assert "lengths must be 0 to M" in str(raised.value.__context__)
    assert output.isnan().all()


SHAPES = {"aq": (B, 1, H, R), "ak": (B, M, H), "av": (B, M, H), "bq": (B, 1, R, D), "bk": (B, M, D), "bv": (B, M, E)}


def another(name, axis, size):
    return {name: torch.randn((*SHAPES[name][:axis], size, *SHAPES[name][axis + 1 :]))}


@pytest.mark.parametrize("name", ["ak", "av", "bq", "bk", "bv"])
def test_a_batch_of_another_size(name):
    with pytest.raises(ValueError, match=rf"^{name} must have the B of aq, 2; got shape \[3, "):
        decode(**another(name, 0, 3))


@pytest.mark.parametrize("name", ["av", "bk", "bv"])
def test_another_number_of_tokens(name):
    with pytest.raises(ValueError, match=rf"^{name} must have the M of ak, 6; got shape \[2, 5, "):
        decode(**another(name, 1, 5))


@pytest.mark.parametrize("name", ["ak", "av"])
def test_another_number_of_heads(name):
    with pytest.raises(ValueError, match=rf"^{name} must have the H of aq, 4; got shape \[2, 6, 3\]$"):
        decode(**another(name, 2, 3))


@pytest.mark.parametrize(
    ("name", "shape", "letters"),
    [
        ("aq", (B, 1, H), r"\[B, 1, H, R\]"),
        ("bq", (B, 1, D), r"\[B, 1, R, D\]"),
        ("bq", (B, 2, R, D), r"\[B, 1, R, D\]"),
        ("ak", (B, M, H, 2, 2), r"\[B, M, H\] or \[B, M, H, Rk\]"),
        ("av", (B, M), r"\[B, M, H\] or \[B, M, H, Rv\]"),
        ("bv", (B, M, 2, E), r"\[B, M, E\] beside av \[2, 6, 4\]"),
    ],
)
def test_other_dimensions(name, shape, letters):
    with pytest.raises(ValueError, match=f"^{name} must have shape {letters}; got {re.escape(str(list(shape)))}$"):
        decode(**{name: torch.randn(shape)})


@pytest.mark.parametrize("x", "kv")
def test_ranks(x):
    size = {"k": D, "v": E}[x]
    for rank in (1, 512):
        factors = {f"a{x}": torch.randn(B, M, H, rank), f"b{x}": torch.randn(B, M, rank, size)}
        assert decode(**factors).shape == (B, 1, H, E)
    factors[f"b{x}"] = torch.randn(B, M, 3, size)
    with pytest.raises(ValueError, match=rf"^b{x} must have the R{x} of a{x}, 512; got shape \[2, 6, 3, {size}\]$"):
        decode(**factors)
    factors[f"b{x}"] = torch.randn(B, M, size)
    with pytest.raises(ValueError, match=rf"^b{x} must have shape \[B, M, R{x}, {'DE'[x == 'v']}\] beside a{x} \[2, "):
        decode(**factors)
    for rank in (0, 513):
        factors = {f"a{x}": torch.randn(B, M, H, rank), f"b{x}": torch.randn(B, M, rank, size)}
        with pytest.raises(ValueError, match=rf"^a{x} must have R{x} of 1 to 512; got shape \[2, 6, 4, {rank}\]$"):
            decode(**factors)


@pytest.mark.parametrize("size", [1, 512])
def test_the_smallest_and_the_largest_sizes(size):
    other = 513 - size
    shapes = {"aq": (1, 1, 1, size), "ak": (1, 2, 1), "av": (1, 2, 1)}
    shapes |= {"bq": (1, 1, size, other), "bk": (1, 2, other), "bv": (1, 2, size)}
    assert decode(**{name: torch.randn(shape) for name, shape in shapes.items()}).shape == (1, 1, 1, size)


@pytest.mark.parametrize("name", SHAPES)
def test_there_is_no_gradient(name):
    x = torch.randn(SHAPES[name], requires_grad=True)
    message = rf"^{name} must not require grad: tpa_decode has no gradient; call it under torch\.no_grad\(\)$"
    with pytest.raises(ValueError, match=message):
        decode(**{name: x})
    with torch.no_grad():
        decode(**{name: x})


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_from_none_to_all(backend):
    for split in ("auto", "sequence"):
        assert decode(seqlens=torch.tensor([0, M]), split=split, backend=backend).shape == (B, 1, H, E)
    for length in (-1, M + 1):
        with pytest.raises(ValueError, match=f"^seqlens must be 0 to M = 6; got {length} at entry 1$"):
            decode(seqlens=torch.tensor([M, length]).int(), backend=backend)
