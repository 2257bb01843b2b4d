import pytest
import torch

import fulmen.distributed
from cases import Results, assert_close
from distributed import sharded
from fulmen.lab.operators.delta_rule.cases import DECAYS, Case, exact, options, tensors
from fulmen.lab.operators.delta_rule.cases import run as run_here
from fulmen.lab.yardstick import rounded_products


def results(crew, case, lengths, without=(), **more):
    given = tensors(case)
    arguments = (fulmen.distributed.delta_rule, given, lengths, options(case) | more, without)
    return sharded.together(crew.run(len(lengths), sharded.run, *arguments), given)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("decays", DECAYS)
def test_every_decay(crew, decays, world):
    case = Case(decays=decays, heads=(1, 1, 2), value_size=12)
    for lengths in sharded.splits(case.length, world):
        assert_close(results(crew, case, lengths), exact(case), str(lengths))


@pytest.mark.parametrize("values", ["strong", "far", "forget"])
def test_extreme_decays(crew, values):
    for decays in ("token", "channel"):
        case = Case(decays=decays, values=values, betas="near two", normalizes=False)
        assert_close(results(crew, case, (20, 5, 40)), exact(case), values)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("initial", [True, False])
def test_packed_sequences(crew, world, initial):
    for decays in ("head", "channel"):
        case = Case(decays=decays, packed=(5, 0, 30, 1, 1, 28, 0), initial=initial)
        for lengths in [*sharded.splits(65, world), {2: (35, 30), 3: (35, 1, 29), 4: (5, 30, 1, 29)}[world]]:
            assert_close(results(crew, case, lengths), exact(case), str(lengths))


def test_only_one_result_is_used(crew):
    case = Case()
    for without in ("output", "state"):
        assert_close(results(crew, case, (30, 5, 30), (without,)), exact(case, (without,)), without)


def test_bfloat16(crew):
    """Of the same precision as on one rank."""
    case = Case(length=130, dtype=torch.bfloat16)

    def yardstick():
        with rounded_products():
            return run_here(case, tensors(case), "torch")

    assert_close(Results(results(crew, case, (60, 70)), "native", yardstick), exact(case))
