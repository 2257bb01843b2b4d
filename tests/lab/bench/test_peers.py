"""Packages of others, where they are installed and can run without a GPU."""

import pytest
import torch

from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.suite import Sizes
from fulmen.lab.bench.suites.lasd import SUITE


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_lightning_attn_is_lc_where_it_is_installed(mode, device, monkeypatch):
    lightning_attn = pytest.importorskip("lightning_attn")
    calls = []
    theirs = lightning_attn.ops.lightning_attn_func
    monkeypatch.setattr(
        lightning_attn.ops, "lightning_attn_func", lambda *tensors: calls.append(tensors) or theirs(*tensors)
    )
    check = CorrectnessCheck(torch.float32, device)
    verdict = check.verdict(SUITE, SUITE.column("LC"), Sizes(1, 2, 32), mode)
    assert verdict.problem == ""
    assert verdict.error < 1e-5
    assert calls
