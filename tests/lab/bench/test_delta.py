"""The suite of the delta rule: every column that runs on a CPU is checked before it is timed, and right."""

import pytest
import torch

import fulmen
from fulmen.lab.bench import suites
from fulmen.lab.bench.correctness import CorrectnessCheck

pytest.importorskip("transformers")
SUITE = suites.find("delta")
SIZES = SUITE.presets["quick"].sizes[0]
MODES = [
    (section, mode)
    for section in SUITE.sections
    for mode in (("fwd",) if section in SUITE.forward_only else SUITE.modes)
]


@pytest.mark.parametrize(("section", "mode"), MODES)
def test_columns_are_checked_and_right(section, mode):
    check = CorrectnessCheck(torch.float32, "cpu")
    columns = [column for column in SUITE.sections[section] if not column.why_not("cpu")]
    assert {column.name for column in columns} >= {"Fulmen", "transformers"}
    for column in columns:
        verdict = check.verdict(SUITE, column, SIZES, mode)
        assert not verdict.problem, column.name
        assert verdict.error < 1e-5, column.name


@pytest.mark.parametrize("section", SUITE.sections)
def test_a_wrong_result_is_not_timed(section, monkeypatch):
    """The check would see a β that is off."""

    def spoiled(right):
        def wrong(q, k, v, beta, *args, backend="auto", **options):
            beta = beta if backend == "reference" else 0.9 * beta
            return right(q, k, v, beta, *args, backend=backend, **options)

        return wrong

    for name in ("delta_rule", "delta_rule_step"):
        monkeypatch.setattr(fulmen, name, spoiled(getattr(fulmen, name)))
    column = next(column for column in SUITE.sections[section] if column.name == "Fulmen")
    verdict = CorrectnessCheck(torch.float32, "cpu").verdict(SUITE, column, SIZES, "fwd")
    assert verdict.problem.startswith("wrong: off by")


def test_shared_heads_are_those_of_the_models():
    """q and k have fewer heads than v, which transformers' functions get repeated."""
    assert all(sizes.rank < sizes.heads for preset in SUITE.presets.values() for sizes in preset.sizes)
    assert SUITE.check_sizes(SIZES).rank < SUITE.check_sizes(SIZES).heads
