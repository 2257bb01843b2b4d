"""The suite of sequence parallelism: columns run in processes of their own, and are checked before they are timed."""

import pytest
import torch

from fulmen.lab.bench import suites
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.suites import sp

SUITE = suites.find("sp")


@pytest.fixture(scope="module", autouse=True)
def crew():
    """What the columns have begun ends with this module: pytest's own processes do not run what is left for exit."""
    yield
    if sp._crew.cache_info().currsize:
        sp._crew().close()
        sp._crew.cache_clear()


@pytest.mark.parametrize("section", SUITE.sections)
def test_columns_agree_with_the_specification(section):
    check = CorrectnessCheck(torch.float32, "cpu")
    sizes = SUITE.presets["quick"].sizes[0]
    for column in SUITE.sections[section]:
        assert check.verdict(SUITE, column, sizes, "fwd").problem == ""
