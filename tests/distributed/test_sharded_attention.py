import pytest
import torch

import fulmen.distributed
from cases import ALL_DECAYS, Case, Results, assert_close, exact
from distributed import sharded
from fulmen.lab.operators.linear_attention import cases

PACKED = (5, 0, 30, 1, 1, 28, 0)


def results(crew, case, lengths, without=(), **options):
    tensors = dict(cases.tensors(case))
    options |= {"scale": case.scale, "cu_seqlens": None if case.bounds is None else torch.tensor(case.bounds)}
    world = len(lengths)
    parts = crew.run(world, sharded.run, fulmen.distributed.linear_attention, tensors, lengths, options, without)
    return sharded.together(parts, tensors)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_every_decay(crew, decays, world):
    case = Case(decays=decays)
    for lengths in sharded.splits(case.length, world):
        assert_close(results(crew, case, lengths), exact(case), str(lengths))


@pytest.mark.parametrize("values", ["zero", "tiny", "strong", "mixed", "far", "forget"])
@pytest.mark.parametrize("decays", ["head", "token", "channel+value"])
def test_extreme_decays(crew, decays, values):
    case = Case(decays=decays, values=values)
    assert_close(results(crew, case, (20, 5, 40)), exact(case), values)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("decays", ["none", "head", "token", "channel+value"])
@pytest.mark.parametrize("initial", [True, False])
def test_packed_sequences(crew, decays, world, initial):
    """That begin and end anywhere: within a shard, at its boundaries, beyond several ranks."""
    case = Case(decays=decays, packed=PACKED, initial=initial)
    for lengths in [*sharded.splits(65, world), {2: (35, 30), 3: (35, 1, 29), 4: (5, 30, 1, 29)}[world]]:
        assert_close(results(crew, case, lengths), exact(case), str(lengths))


def test_shared_heads_and_float64(crew):
    for heads in ((1, 2, 4), (4, 1, 2), (4, 4, 1)):
        case = Case(heads=heads, decays="token", dtype=torch.float64)
        found = results(crew, case, (30, 35), backend="torch")
        assert_close(found, exact(case), str(heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(crew, dtype):
    case = Case(length=130, dtype=dtype, decays="token")
    found = Results(results(crew, case, (60, 70)), "native", lambda: cases.yardstick(case))
    assert_close(found, exact(case))


def test_only_one_result_is_used(crew):
    case = Case(decays="channel")
    for without in ("output", "state"):
        found = results(crew, case, (30, 5, 30), (without,))
        want = cases.exact(case, f"grad_{without}")
        assert_close(found, want, without)
