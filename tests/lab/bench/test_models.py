"""The suite of whole models: each family and function is checked before it is timed, as it is and patched."""

from pathlib import Path

import pytest
import torch

from fulmen.lab.bench import suites
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.families import FAMILIES
from fulmen.lab.bench.plan import Options, plan
from fulmen.lab.bench.suites import models

pytest.importorskip("transformers")
SUITE = suites.find("models")


@pytest.mark.parametrize(
    "section",
    [
        "Mamba2 decode",
        "MiniMax decode",
        "MiniMax lightning attention",
        "Lfm2 training",
        "mamba2_chunk_scan",
        *(f"{family} decode" for family in ("FalconMamba", "Jamba", "Zamba", "Inkling")),
        *(f"{family} training" for family in ("Qwen3.5", "Qwen3.5-MoE", "Qwen3Next", "Qwen4-Exp", "OlmoHybrid")),
        *(f"{family} decode" for family in ("KimiLinear", "BailingHybrid")),
    ],
)
def test_patched_is_checked_and_right(section):
    check, sizes = CorrectnessCheck(torch.float32, "cpu"), SUITE.presets["quick"].sizes[0]
    for column in SUITE.sections[section]:
        verdict = check.verdict(SUITE, column, sizes, "fwd")
        assert not verdict.problem
        assert verdict.error < 1e-5


def test_a_wrong_model_is_not_timed(monkeypatch):
    """The check would see a layer that computes something else."""
    from fulmen.integrations.transformers import mamba2

    scan = mamba2.scan
    monkeypatch.setattr(mamba2, "scan", lambda C, B, x, dt, **options: scan(C, B, 1.5 * x, dt, **options))
    sizes = SUITE.presets["quick"].sizes[0]
    column = next(c for c in SUITE.sections["Mamba2 prefill"] if c.name == "patched")
    verdict = CorrectnessCheck(torch.float32, "cpu").verdict(SUITE, column, sizes, "fwd")
    assert verdict.problem.startswith("wrong: off by")


def test_the_quick_preset_has_few_sections():
    parts = plan(Options(("models",), "cpu", "fp32"))
    assert {part.section for part in parts} == set(SUITE.presets["quick"].sections) < set(SUITE.sections)


def test_figures_are_a_preset():
    """Every row of the table in docs/models.md, at the sizes it names."""
    parts = plan(Options(("models",), "cpu", "bf16", preset="published"))
    assert {part.section for part in parts} == set(models.FIGURES) <= set(SUITE.sections)
    assert {(part.sizes.heads * part.sizes.dim // 2, part.lengths) for part in parts} == {(1024, (1024, 2048))}


def test_every_family_that_is_patched_is_measured():
    """By the classes that docs/models.md names. Glm5Next has no language model of text alone."""
    docs = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    table = docs.partition("| family | classes |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in row.split("|")[2].strip().split(", ")}
    assert named - {"Glm5Next"} == set(FAMILIES) == {section.split()[0] for section in SUITE.sections if " " in section}


def test_sections_are_chosen_by_name():
    parts = plan(Options(("models",), "cpu", "fp32", sections=("Zamba2 training",)))
    assert [part.section for part in parts] == ["Zamba2 training"]
    with pytest.raises(ValueError, match="no section 'Zamba3 training' in models; did you mean Zamba2 training, "):
        Options(("models",), "cpu", "fp32", sections=("Zamba3 training",))
