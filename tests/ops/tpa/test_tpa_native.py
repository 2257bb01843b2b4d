"""What only the CPU core has: ISA builds, threads, workspace."""

import pytest
import torch

import fulmen
from cases import relative_error
from fulmen.ops.tpa.native import workspace_bytes
from fulmen.ops.tpa.problem import decode_of
from fulmen.ops.tpa.torch_factorised import factorised
from fulmen.runtime import core
from tpa_cases import SPLITS, Case, assert_exact, exact, factors, run

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
BUILDS = core.core.builds if core.core else []
RAGGED = Case(batch=3, tokens=1100, heads=37, rank=20, key_size=20, value_size=33, lengths=(1100, 0, 700))
WHOLE = Case(batch=1, tokens=150, heads=32, rank=3, key_size=64, value_size=96)  # rows that need no padding


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("poisoned_workspace")
def test_every_build_with_poisoned_workspace(build, dtype):
    for case in (RAGGED, WHOLE, Case(key_rank=3, value_rank=2, heads=5, rank=40), WHOLE.of(key_rank=2, value_rank=3)):
        case = case.of(dtype=dtype)
        with core.core.using(build):
            for split in SPLITS:
                assert_exact(run(case, split=split, backend="native"), case, f"{build} {split}")


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_wherever_they_are(build, dtype):
    """Amid NaN, in rows of even and odd lengths, from even and odd places."""
    case = WHOLE.of(dtype=dtype)
    with core.core.using(build):
        expected = run(case, backend="native")
        for before, after in ((2, 0), (1, 1), (1, 0)):
            given = dict(factors(case))
            for name in ("bk", "bv"):
                inside = slice(before, before + given[name].shape[-1])
                amid = torch.nn.functional.pad(given[name], (before, after), value=torch.nan)
                given[name] = amid[..., inside]
            assert torch.equal(fulmen.tpa_decode(**given, backend="native"), expected)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_better_than_torch_in_bfloat16(build):
    """There scores are rounded as well, not only what is multiplied further."""
    for case in (RAGGED.of(dtype=torch.bfloat16, lengths=None), WHOLE.of(dtype=torch.bfloat16, value_rank=2)):
        torch_result = factorised(decode_of(*(factors(case)[name] for name in ("aq", "ak", "av", "bq", "bk", "bv"))))
        with core.core.using(build):
            for split in SPLITS:
                error = relative_error(run(case, split=split, backend="native"), exact(case))
                assert error < relative_error(torch_result, exact(case)), split


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_threads_nor_on_the_split(dtype):
    before = torch.get_num_threads()
    case = RAGGED.of(dtype=dtype)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [run(case, split=split, backend="native") for split in SPLITS]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, results[0]) for x in results)


def test_a_sample_does_not_depend_on_the_batch_around_it():
    whole = run(RAGGED, backend="native")
    alone = {name: x[2:] for name, x in factors(RAGGED).items()}
    output = fulmen.tpa_decode(**alone, seqlens=torch.tensor(RAGGED.lengths[2:]), backend="native")
    assert torch.equal(output, whole[2:])


def test_nor_on_the_padding_after_it():
    cut = {name: x[2:, :700] if name[1] in "kv" else x[2:] for name, x in factors(RAGGED).items()}
    assert torch.equal(fulmen.tpa_decode(**cut, backend="native"), run(RAGGED, backend="native")[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_is_below_a_hundredth_of_the_factors(dtype):
    """At the published size, where a sample is a task; it does not grow with the tokens."""

    def call(tokens):
        shapes = [(8, 1, 32, 16), (8, tokens, 32), (8, tokens, 32), (8, 1, 16, 128), *2 * [(8, tokens, 128)]]
        return decode_of(*(torch.empty(1, dtype=dtype).expand(shape) for shape in shapes))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        p = call(4096)
        assert workspace_bytes(p) < sum(x.numel() for x in p[:6]) * p.aq.element_size() / 100
        assert workspace_bytes(call(131072)) == workspace_bytes(p)
    finally:
        torch.set_num_threads(before)
