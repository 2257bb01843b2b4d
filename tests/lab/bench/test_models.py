"""The suite of whole models: each family and function is checked before it is timed, as it is and patched."""

import pytest
import torch

from fulmen.lab.bench import suites
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.plan import Options, plan

pytest.importorskip("transformers")
SUITE = suites.find("models")


@pytest.mark.parametrize("section", ["Mamba2 decode", "MiniMax decode", "Lfm2 training", "mamba2_chunk_scan"])
def test_patched_is_checked_and_right(section):
    check, sizes = CorrectnessCheck(torch.float32, "cpu"), SUITE.presets["quick"].sizes[0]
    for column in SUITE.sections[section]:
        verdict = check.verdict(SUITE, column, sizes, "fwd")
        assert not verdict.problem
        assert verdict.error < 1e-5


def test_a_wrong_model_is_not_timed(monkeypatch):
    """The check would see a layer that computes something else."""
    from fulmen.integrations.transformers import mamba2

    scan = mamba2.fulmen.linear_attention
    monkeypatch.setattr(mamba2.fulmen, "linear_attention", lambda q, k, v, **options: scan(q, k, 1.5 * v, **options))
    sizes = SUITE.presets["quick"].sizes[0]
    column = next(c for c in SUITE.sections["Mamba2 prefill"] if c.name == "patched")
    verdict = CorrectnessCheck(torch.float32, "cpu").verdict(SUITE, column, sizes, "fwd")
    assert verdict.problem.startswith("wrong: off by")


def test_the_quick_preset_has_few_sections():
    parts = plan(Options(("models",), "cpu", "fp32"))
    assert {part.section for part in parts} == set(SUITE.presets["quick"].sections) < set(SUITE.sections)


def test_sections_are_chosen_by_name():
    parts = plan(Options(("models",), "cpu", "fp32", sections=("Zamba2 training",)))
    assert [part.section for part in parts] == ["Zamba2 training"]
    with pytest.raises(ValueError, match="no section 'Zamba3 training' in models; there are Mamba2 prefill, Mamba2"):
        Options(("models",), "cpu", "fp32", sections=("Zamba3 training",))
