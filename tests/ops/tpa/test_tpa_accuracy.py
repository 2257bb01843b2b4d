"""Every backend against q, k and v in float64."""

import pytest
import torch

import fulmen
from cases import BACKENDS, TOLERANCE, relative_error
from tpa_cases import SPLITS, Case, assert_exact, factors, options, run

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

SIZES = {
    "plain": Case(),
    "one of everything": Case(batch=1, tokens=1, heads=1, rank=1, key_size=1, value_size=1),
    "odd": Case(batch=3, tokens=67, heads=5, rank=7, key_size=20, value_size=33),
    "many ranks for few heads": Case(heads=2, rank=40, key_size=24, value_size=8),
    "many heads": Case(batch=1, heads=37, rank=3, key_size=8, value_size=17),
    "key rank": Case(key_rank=3, key_size=20),
    "value rank": Case(value_rank=2, value_size=33),
    "both ranks": Case(heads=5, key_rank=2, value_rank=3, key_size=9, value_size=24),
    "ranks of one, spelled out": Case(key_rank=1, value_rank=1),
    "ragged": Case(batch=5, lengths=(70, 0, 1, 33, 64)),
    "ragged, with ranks": Case(batch=3, key_rank=2, value_rank=2, lengths=(0, 69, 16)),
    "a scale": Case(scale=0.7),
    "no scale": Case(scale=0.0),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_dtypes(backend, size, dtype):
    case = SIZES[size].of(dtype=dtype)
    assert_exact(run(case, backend=backend), case)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_splits(backend, split, dtype):
    case = Case(tokens=300, heads=17, key_size=20, value_size=9, lengths=(300, 129), dtype=dtype)
    assert_exact(run(case, split=split, backend=backend), case, split)


@pytest.mark.parametrize("split", SPLITS[1:])
def test_more_than_one_slice(backend, split):
    case = Case(batch=3, tokens=1100, heads=2, rank=2, key_size=8, value_size=8, lengths=(1100, 512, 513))
    assert_exact(run(case, split=split, backend=backend), case, split)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_any_size(backend, split, dtype):
    """Scores of tens of thousands, of which every exponential overflows or vanishes on its own."""
    case = Case(tokens=600, heads=4, size=1e4, lengths=(600, 77), dtype=dtype)
    given = factors(case)
    q = given["aq"].double() @ given["bq"].double() / case.rank
    scores = torch.einsum("bnhd,bmd,bmh->bhm", q, *(given[name].double() for name in ("bk", "ak")))
    assert scores.nan_to_num().abs().max() > 1e4
    assert_exact(run(case, split=split, backend=backend), case)


def test_large_scores_that_differ_little(backend):
    """Factors of small integers, so that scores near 10000 are exact, and differences between them of order 1."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads, size = 90, 2, 4
    ak = torch.ones(1, tokens, heads)
    bk = torch.zeros(1, tokens, size)
    bk[..., 0], bk[..., 1] = 10000.0, torch.randint(-3, 4, (1, tokens), generator=generator).float()
    aq, bq = torch.ones(1, 1, heads, 1), torch.tensor([1.0, 1.0, 0.0, 0.0]).view(1, 1, 1, size)
    av, bv = (torch.randn(1, tokens, n, generator=generator) for n in (heads, 5))
    given = aq, ak, av, bq, bk, bv
    output = fulmen.tpa_decode(*given, scale=1.0, backend=backend)
    expected = fulmen.tpa_decode(*(x.double() for x in given), scale=1.0, backend="reference")
    assert relative_error(output, expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("key_rank", [None, 2])
def test_views(backend, key_rank):
    """Factors cut out of larger tensors full of NaN, with and without a dense last dimension."""
    case = Case(heads=5, key_size=20, value_size=9, key_rank=key_rank, value_rank=key_rank, lengths=(70, 9))
    expected = run(case, backend=backend)

    def amid_nan(x):
        around = torch.full([n + 3 for n in x.shape], torch.nan)
        inside = around[tuple(slice(1, n + 1) for n in x.shape)]
        return inside.copy_(x)

    def transposed(x):
        return x.mT.contiguous().mT

    for view in (amid_nan, transposed):
        given = {name: view(x) for name, x in factors(case).items()}
        assert not given["bk"].is_contiguous()
        output = fulmen.tpa_decode(**given, **options(case), backend=backend)
        assert relative_error(output, expected.double()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, -1])
def test_nan_stays_in_its_head_and_sample(backend, bits):
    """Whatever the rest of the bits of a NaN are."""
    case = Case(heads=4)
    given = {name: x.clone() for name, x in factors(case).items()}
    given["ak"].view(torch.int32)[0, 5, 1] = bits
    given["av"][1, 6, 3] = torch.nan
    output = fulmen.tpa_decode(**given, backend=backend)
    wrong = output.isnan().any(-1)[:, 0]
    assert wrong.tolist() == [[False, True, False, False], [False, False, False, True]]


def test_a_weight_that_vanishes_is_zero(backend):
    """Scores 0 and -200, values 1 and 1e37."""
    one = torch.ones(1, 1, 1, 1)
    ak, av = torch.tensor([0.0, -200.0]).view(1, 2, 1), torch.tensor([1.0, 1e37]).view(1, 2, 1)
    output = fulmen.tpa_decode(one, ak, av, one, torch.ones(1, 2, 1), torch.ones(1, 2, 1), scale=1.0, backend=backend)
    assert output.item() == 1.0


@pytest.mark.parametrize("tokens", [3, 600])
def test_scores_of_minus_infinity(backend, tokens):
    """Of some tokens they weigh nothing; of all, the softmax is NaN, unlike that of no tokens."""
    one = torch.ones(3, 1, 1, 1)
    ak = torch.full((3, tokens, 1), -torch.inf)
    ak[0, 1] = 0.0
    av, bk, bv = torch.arange(3.0 * tokens).view(3, tokens, 1), torch.ones(3, tokens, 1), torch.ones(3, tokens, 1)
    lengths = torch.tensor([tokens, tokens, 0])
    for split in SPLITS:
        output = fulmen.tpa_decode(one, ak, av, one, bk, bv, seqlens=lengths, split=split, backend=backend).flatten()
        assert output[0] == 1.0
        assert output[1].isnan()
        assert output[2] == 0.0


def test_no_tokens_at_all(backend):
    case = Case(tokens=0)
    assert torch.equal(run(case, backend=backend), torch.zeros(2, 1, 3, 16))


def test_an_empty_batch(backend):
    given = {name: x[:0] for name, x in factors(Case()).items()}
    assert fulmen.tpa_decode(**given, backend=backend).shape == (0, 1, 3, 16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_either_dtype(backend, dtype):
    case = Case(lengths=(70, 7))
    lengths = torch.tensor([70, 1, 7, 1], dtype=dtype)[::2]  # a view that is not dense
    assert torch.equal(fulmen.tpa_decode(**factors(case), seqlens=lengths, backend=backend), run(case, backend=backend))


def test_float64(backend):
    case = Case(key_rank=2, lengths=(70, 7), dtype=torch.float64)
    if backend in ("native", "triton"):
        with pytest.raises(ValueError, match="cannot run this call"):
            run(case, backend=backend)
    else:
        assert_exact(run(case, backend=backend), case)
        assert torch.equal(run(case), run(case, backend="torch"))


def test_the_same_call_gives_the_same_bits(backend):
    case = Case(tokens=600)
    assert torch.equal(run(case, backend=backend), run(case, backend=backend))
