"""The checks that operators share: what they accept, and what they say of what they refuse, to the letter."""

import re

import numpy as np
import pytest
import torch

from fulmen.runtime import checks
from fulmen.runtime.checks import (
    check_alike,
    check_choice,
    check_count,
    check_flag,
    check_inputs,
    check_rows,
    check_scale,
    check_tensor,
    once_per_signature,
)

X = torch.zeros(2, 3, 4, 5)
SPARSE, META, INTEGER = X.to_sparse(), X.to("meta"), X.int()
LAYOUT = "[B, N, H, D]"


def refuses(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, "x must be a torch.Tensor [B, N, H, D]; got list"),
        (SPARSE, TypeError, "x must be a dense tensor; got layout torch.sparse_coo"),
        (INTEGER, TypeError, "x must be float32, bfloat16, float16 or float64; got torch.int32"),
        (X.half(), TypeError, "x must have the dtype of first, torch.float32; got torch.float16"),
        (META, ValueError, "x must be on the device of first, cpu; got meta"),
        (X[0], ValueError, "x must have 4 dimensions, [B, N, H, D]; got shape [3, 4, 5]"),
        (X[:1], ValueError, "x must have the same B and N as first, [2, 3, 4, 5]; got shape [1, 3, 4, 5]"),
        (X[:, :2], ValueError, "x must have the same B and N as first, [2, 3, 4, 5]; got shape [2, 2, 4, 5]"),
        (X[..., :0], ValueError, "x must have a last dimension of 1 to 512; got shape [2, 3, 4, 0]"),
        (
            X[..., :1].expand(2, 3, 4, 513),
            ValueError,
            "x must have a last dimension of 1 to 512; got shape [2, 3, 4, 513]",
        ),
    ],
)
def test_inputs_of_one_layout(x, error, message):
    with refuses(error, message):
        check_inputs(LAYOUT, first=X, x=x)


def test_inputs_that_are_accepted():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        check_inputs(LAYOUT, q=X.to(dtype), k=X.to(dtype)[:, :, :1, :1], v=X.to(dtype)[..., :1].expand(2, 3, 4, 512))
    check_inputs("[B, H, D]", q=X[0], k=X[0, :, :1])
    with refuses(ValueError, "k must have the same B as q, [3, 4, 5]; got shape [2, 4, 5]"):
        check_inputs("[B, H, D]", q=X[0], k=X[0, :2])


def test_a_layout_that_differs_is_not_named():
    with refuses(TypeError, "x must be a torch.Tensor; got NoneType"):
        check_alike("", {"x": None})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (0.5, TypeError, "x must be a torch.Tensor or None; got float"),
        (META, ValueError, "x must be on the device of q, k and v, cpu; got meta"),
        (SPARSE, TypeError, "x must be a dense tensor; got layout torch.sparse_coo"),
    ],
)
def test_a_tensor_beside_the_inputs(x, error, message):
    check_tensor("x", INTEGER, X)
    with refuses(error, message):
        check_tensor("x", x, X)


def test_a_tensor_beside_another():
    with refuses(ValueError, "x must be on the device of y, cpu; got meta"):
        check_tensor("x", META, X, "y")


@pytest.mark.parametrize("scale", [None, 0, -2, 0.5, np.float16(0.5), 10**300])
def test_scales(scale):
    check_scale(scale)


@pytest.mark.parametrize("scale", [True, "1", 1j, np.bool_(True)])
def test_what_is_no_scale(scale):
    with refuses(TypeError, f"scale must be a real number or None; got {scale!r}"):
        check_scale(scale)


@pytest.mark.parametrize("scale", [float("nan"), -float("inf"), 10**400])
def test_scales_that_are_not_finite(scale):
    with refuses(ValueError, f"scale must be finite; got {scale!r}"):
        check_scale(scale)


def test_counts():
    check_count("n", 1)
    check_count("n", np.int64(7))
    check_count("n", 0, least=0)
    for count in (1.0, True, None):
        with refuses(TypeError, f"n must be an integer; got {count!r}"):
            check_count("n", count)
    with refuses(ValueError, "n must be at least 1; got 0"):
        check_count("n", 0)
    with refuses(ValueError, "n must be at least 3; got 2"):
        check_count("n", 2, least=3)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [0, 1, -2],
        [np.int64(1)],
        slice(5),
        torch.tensor([1, -2]),
        torch.ones(7).bool(),
        META[0, 0, 0].int(),
    ],
)
def test_rows(rows):
    check_rows(rows, 2)


def test_rows_of_an_empty_cache_and_masks_are_not_counted():
    check_rows([7], None)
    check_rows(torch.tensor([True]), 1)


@pytest.mark.parametrize("rows", [1, (0, 1), [0, 1.0], "01"])
def test_what_are_no_rows(rows):
    with refuses(TypeError, f"rows must be a tensor or list of indices, or a slice; got {rows!r}"):
        check_rows(rows, 2)


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        (torch.tensor(1), "torch.int64 of shape []"),
        (torch.zeros(1, 2).long(), "torch.int64 of shape [1, 2]"),
        (torch.zeros(1), "torch.float32 of shape [1]"),
        (torch.zeros(1, dtype=torch.complex64), "torch.complex64 of shape [1]"),
    ],
)
def test_tensors_that_are_no_rows(rows, got):
    with refuses(TypeError, f"rows must be indices [rows]; got {got}"):
        check_rows(rows, 2)


@pytest.mark.parametrize("rows", [[0, 2], [-3], torch.tensor([2])])
def test_rows_that_there_are_not(rows):
    with refuses(ValueError, f"rows must be below 2, the rows that there are; got {list(map(int, rows))}"):
        check_rows(rows, 2)


def test_flags_and_choices():
    check_flag("flag", False)
    for flag in (0, None, np.bool_(True)):
        with refuses(TypeError, f"flag must be True or False; got {flag!r}"):
            check_flag("flag", flag)
    check_choice("way", "a", ("a", "b"))
    with refuses(ValueError, "way must be one of 'a', 'b'; got 'c'"):
        check_choice("way", "c", ("a", "b"))


@pytest.fixture
def check():
    """One that remembers what it has looked at."""
    seen = []

    @once_per_signature
    def looks(*args):
        """Looks."""
        seen.append(args)
        if args[0] is None:
            raise ValueError("nothing")

    looks.seen = seen
    return looks


def test_what_was_accepted_is_not_looked_at_again(check):
    assert (check.__name__, check.__doc__) == ("looks", "Looks.")
    for _ in range(2):
        assert check(X, 1) is None
        check(X, True)
        check(X, 1.0)
        check(X.clone(), 1)
    assert check.seen == [(X, 1), (X, True), (X, 1.0)]


def test_a_refusal_is_repeated(check):
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing"):
            check(None)


@pytest.mark.parametrize(
    "other",
    [
        X[:1],
        X.mT.contiguous().mT,
        X.half(),
        X.to("meta"),
        X.to_sparse(),
        X.clone().requires_grad_(),
        torch._neg_view(X),
        None,
    ],
    ids=["shape", "strides", "dtype", "device", "layout", "gradient", "negated", "none"],
)
def test_what_differs_is_looked_at(check, other):
    check(1, X)
    check(1, other)
    assert len(check.seen) == 2


def test_so_is_what_differs_in_whether_gradients_are_recorded(check):
    check(X)
    with torch.no_grad():
        check(X)
    assert len(check.seen) == 2


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_cannot_be_remembered_is_looked_at(check):
    for _ in range(2):
        check([1])
        check(X[0, 0].to_sparse_csr())  # has no strides
    assert len(check.seen) == 4


def test_compilers_look_every_time(check, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for _ in range(2):
        check(X)
    assert len(check.seen) == 2


def test_not_everything_is_remembered(check, monkeypatch):
    monkeypatch.setattr(checks, "_MOST_REMEMBERED", 2)
    for number in (1, 2, 1, 2, 3, 3, 1):
        check(number)
    assert [number for (number,) in check.seen] == [1, 2, 3, 1]


def test_tangents_are_refused(check):
    with torch.autograd.forward_ad.dual_level():
        check(X)
        dual = torch.autograd.forward_ad.make_dual(X, X)
        with pytest.raises(RuntimeError, match="forward-mode"):
            check(dual)
