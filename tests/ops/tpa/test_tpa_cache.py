"""The cache of factors, against decoding over whole tensors."""

import pytest
import torch

import fulmen
from cases import BACKENDS
from tpa_cases import Case, factors

PAIRS = ("ak", "av", "bk", "bv")


def tokens(case, first, last):
    return [factors(case)[name][:, first:last] for name in PAIRS]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_decode_loop(backend, ranks):
    case = Case(tokens=40, key_rank=ranks, value_rank=ranks, value_size=9)
    given = factors(case)
    cache = fulmen.TPACache(capacity=4)
    cache.append(*tokens(case, 0, 6))
    for t in range(6, 40):
        cache.append(*tokens(case, t, t + 1))
        so_far = {name: x[:, : t + 1] if name in PAIRS else x for name, x in given.items()}
        output = cache.decode(given["aq"], given["bq"], backend=backend)
        assert torch.equal(output, fulmen.tpa_decode(**so_far, backend=backend))
    assert cache.lengths.tolist() == [40, 40]
    assert cache.capacity == 64


def test_samples_of_different_lengths():
    """A prompt with padding, and tokens that only some samples get; the padding is overwritten or ignored."""
    case = Case(batch=3, tokens=12)
    given = factors(case)
    cache = fulmen.TPACache(capacity=2)
    prompt = [x.clone() for x in tokens(case, 0, 5)]
    for x in prompt:
        x[1, 2:] = torch.nan
        x[2] = torch.nan
    cache.append(*prompt, lengths=torch.tensor([5, 2, 0]))
    kept = [list(range(5)), [0, 1], []]
    for t in range(5, 12):
        gets = torch.tensor([1, 1, t % 2], dtype=torch.int32)
        cache.append(*tokens(case, t, t + 1), lengths=gets if t != 8 else None)
        for sample in range(3):
            if t == 8 or gets[sample]:
                kept[sample].append(t)
        output = cache.decode(given["aq"], given["bq"], scale=0.3, backend="reference")
        for sample, numbers in enumerate(kept):
            alone = {n: x[[sample]] for n, x in given.items()}
            alone |= {n: alone[n][:, numbers] for n in PAIRS}
            expected = fulmen.tpa_decode(**alone, scale=0.3, backend="reference")
            torch.testing.assert_close(output[[sample]], expected)
    assert cache.lengths.tolist() == [len(numbers) for numbers in kept]


def test_lengths_are_a_copy():
    cache = fulmen.TPACache()
    cache.append(*tokens(Case(), 0, 5), lengths=torch.tensor([1, 5]))
    cache.lengths.zero_()
    assert cache.lengths.tolist() == [1, 5]


def test_growing_does_not_happen_at_every_token():
    cache, capacities = fulmen.TPACache(capacity=1), []
    for t in range(70):
        cache.append(*tokens(Case(), t, t + 1))
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [1, 2, 4, 8, 16, 32, 64, 128]


def test_an_empty_cache():
    cache = fulmen.TPACache()
    with pytest.raises(RuntimeError, match="call append first"):
        cache.decode(torch.randn(1, 1, 2, 3), torch.randn(1, 1, 3, 4))
    with pytest.raises(RuntimeError, match="call append first"):
        _ = cache.lengths


WRONG = [
    (0, torch.randn(2, 1, 4), ValueError, r"ak must have shape \[2, 1, 3\], as the tokens before; got \[2, 1, 4\]"),
    (2, torch.randn(2, 2, 16), ValueError, r"bk must have the B and N of ak, \[2, 1\]; got shape \[2, 2, 16\]"),
    (1, torch.randn(2, 1, 3).half(), TypeError, r"av must be torch.float32 on cpu; got torch.float16 on cpu"),
]


@pytest.mark.parametrize(("index", "wrong", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_tokens_that_do_not_fit(index, wrong, error, message):
    cache, given = fulmen.TPACache(), tokens(Case(), 0, 1)
    cache.append(*given)
    given[index] = wrong
    with pytest.raises(error, match=message):
        cache.append(*given)
    assert cache.lengths.tolist() == [1, 1]


def test_wrong_numbers():
    with pytest.raises(ValueError, match="capacity must be at least 1; got 0"):
        fulmen.TPACache(0)
    with pytest.raises(TypeError, match=r"capacity must be an integer; got 1\.5"):
        fulmen.TPACache(1.5)
    cache, given = fulmen.TPACache(), tokens(Case(), 0, 4)
    with pytest.raises(ValueError, match=r"lengths must be 0 to N = 4; got \[1, 5\]"):
        cache.append(*given, lengths=torch.tensor([1, 5]))
    with pytest.raises(ValueError, match=r"lengths must have shape \[B\] = \[2\]; got \[3\]"):
        cache.append(*given, lengths=torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match=r"lengths must be int32 or int64; got torch\.float32"):
        cache.append(*given, lengths=torch.ones(2))
    cache.append(*given)
    with pytest.raises(ValueError, match=r"ak must have shape \[2, 4, 3\], as the tokens before; got \[1, 4, 3\]"):
        cache.append(*(x[:1] for x in given))


def test_padding_takes_no_room():
    case = Case(batch=2, tokens=8)
    cache = fulmen.TPACache(capacity=8)
    for _ in range(6):
        cache.append(*tokens(case, 0, 4), lengths=torch.tensor([1, 0]))
    assert cache.lengths.tolist() == [6, 0]
    assert cache.capacity == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda new: new | {"bk": new["bk"].half()}, "bk must have the dtype of ak"),
        (lambda new: new | {"av": new["av"][:, :, :1]}, "av must have the H of ak"),
        (lambda new: new | {"bk": new["bk"][:, :, None]}, "bk must have shape"),
        (lambda new: new | {"ak": [1.0]}, "ak must be a torch.Tensor"),
        (lambda new: new | {"lengths": [1, 2]}, "lengths must be a torch.Tensor"),
        (lambda new: new | {"bv": new["bv"].clone().requires_grad_()}, "bv must not require grad"),
    ],
)
def test_the_first_append_is_checked(change, message):
    cache = fulmen.TPACache()
    given = dict(zip(PAIRS, tokens(Case(batch=2, heads=3), 0, 2), strict=True))
    with pytest.raises((TypeError, ValueError), match=message):
        cache.append(**change(given))
    cache.append(**given)  # and nothing was settled


def test_a_prompt_in_inference_mode():
    case = Case(tokens=6)
    given = factors(case)
    cache = fulmen.TPACache(capacity=8)
    with torch.inference_mode():
        cache.append(*tokens(case, 0, 4))
    with torch.no_grad():
        cache.append(*tokens(case, 4, 6))
    assert torch.equal(cache.decode(given["aq"], given["bq"]), fulmen.tpa_decode(**given))


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_the_cache_keeps_its_dtype_under_autocast(first):
    case = Case(tokens=6)
    given = factors(case)
    cache = fulmen.TPACache()
    with torch.autocast("cpu", torch.bfloat16, enabled=first == torch.bfloat16):
        cache.append(*tokens(case, 0, 4))
    with torch.autocast("cpu", torch.bfloat16):
        cache.append(*tokens(case, 4, 6))
        output = cache.decode(given["aq"], given["bq"])
    assert output.dtype == first
    assert torch.equal(output, fulmen.tpa_decode(**{name: x.to(first) for name, x in given.items()}))


def test_a_failed_allocation_leaves_the_cache_as_it_was(monkeypatch):
    case = Case(tokens=5)
    given = factors(case)
    cache = fulmen.TPACache(capacity=4)
    cache.append(*tokens(case, 0, 4))
    allocate, calls = torch.empty, []

    def fail_at_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return allocate(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", fail_at_the_second)
        with pytest.raises(torch.OutOfMemoryError):
            cache.append(*tokens(case, 4, 5))
    assert cache.capacity == 4
    cache.append(*tokens(case, 4, 5))
    assert torch.equal(cache.decode(given["aq"], given["bq"]), fulmen.tpa_decode(**given))
