"""An operator's folder and its record are all that the lab needs: a toy one is inspected, counted and verified."""

import json
import os
from typing import Protocol

import pytest
import torch

import fulmen.lab.cli
from fulmen.lab.verify.check import Target, all_checks
from fulmen.runtime import operators
from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytest.importorskip("triton")


class ToyBackend(Protocol):
    def forward(self, x: torch.Tensor, result: torch.Tensor) -> None: ...


@pytest.fixture
def toy(monkeypatch):
    """Declared for one test."""
    monkeypatch.setattr(operators, "_declared", operators._declared.copy())
    return operators.Operator(
        name="toy",
        protocol=ToyBackend,
        backends={"native": "toy_operator.cpu", "triton": "toy_operator.triton"},
        workloads="toy_operator.workloads",
        checks="toy_operator.checks",
    )


@pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile")
@pytest.mark.usefixtures("toy", "empty_inspection_cache")
def test_it_is_inspected(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # each process that compiles imports torch and Triton first
    path = tmp_path / "table.json"
    assert fulmen.lab.cli.main(["inspect", "--arch", "sm_80", "--kernel", "toy", "--json", str(path)]) == 0
    assert {(r["kernel"], r["D"]) for r in json.loads(path.read_text())} == {("toy double", 64), ("toy double", 128)}
    assert "toy double" in capsys.readouterr().out


@pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not record")
def test_its_traffic_is_counted(toy):
    from fulmen.lab.inspect.dry_run import dry_run
    from fulmen.lab.inspect.traffic import requested_bytes

    with dry_run(ARCHITECTURES["sm_80"]) as (launches, _):
        x = torch.empty(300, dtype=torch.bfloat16)
        toy.backend("triton").forward(x, torch.empty_like(x))
    assert requested_bytes(launches) == 2 * 300 * 2


@pytest.mark.either
@pytest.mark.usefixtures("toy")
def test_it_is_verified(device):
    backend = "triton" if interpreted() or device == "cuda" else "native"
    found = {check.operator: check for check in all_checks(Target(device, backend, True))}
    assert found["toy"].run() == []
    assert len(found) > 1


def test_it_is_gone_again():
    assert "toy" not in {operator.name for operator in operators.operators()}
    assert "toy" not in {check.operator for check in all_checks(Target("cpu", "native", True))}
