"""The acceptance kit: on the native core, and in a process with TRITON_INTERPRET=1 on the Triton kernels."""

import json

import pytest
import torch

import fulmen.lab.cli
from fulmen.lab import tolerances
from fulmen.lab.verify.check import Check, Target, all_checks
from fulmen.lab.verify.run import outcome
from fulmen.runtime.architectures import interpreted

pytestmark = pytest.mark.either
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
BACKEND = "triton" if interpreted() or DEVICE == "cuda" else "native"


@pytest.mark.long if interpreted() else pytest.mark.either
def test_all_is_right(tmp_path, capsys):
    path = tmp_path / "verified.json"
    assert fulmen.lab.cli.main(["verify", "--device", DEVICE, "--quick", "--json", str(path)]) == 0
    assert "all is right" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["failures"] == []
    assert found["target"] == {"device": DEVICE, "backend": BACKEND, "quick": True}
    expected = {
        "causal_conv1d", "causal_conv1d_step", "linear_attention", "linear_attention_step", "chunk_states",
        "tpa_decode", "output_gated_attention", "delta_rule", "delta_rule_step",
    }  # fmt: skip
    assert {check["operator"] for check in found["checks"]} == expected
    assert {w["mode"] for w in found["workspace"]} == {"forward", "backward"}
    assert all(timing["median"] > 0 for timing in found["seconds"].values())


@pytest.mark.not_interpreted  # once is enough, and the interpreter is slow
def test_what_fails_is_listed_and_the_exit_code_is_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tolerances, "OVER_YARDSTICK", 0.1)
    monkeypatch.setattr(tolerances, "LARGE", tolerances.Error(1e-9, 1e-9))
    path = tmp_path / "verified.json"
    assert fulmen.lab.cli.main(["verify", "--device", DEVICE, "--quick", "--json", str(path)]) == 1
    failures = json.loads(path.read_text())["failures"]
    assert any("output: norm off by" in failure and "bfloat16" in failure for failure in failures)
    assert not any("float32" in failure for failure in failures)
    assert failures[0] in capsys.readouterr().out


def test_a_check_that_raises_has_failed():
    def raises():
        raise ValueError("no such kernel")

    assert outcome(Check("linear_attention", "", raises)) == ["ValueError: no such kernel"]


def test_the_whole_kit_has_every_decay_dtype_and_schedule():
    checks = [check.what for check in all_checks(Target(DEVICE, BACKEND, False))]
    for word in ("none", "token+value", "float32", "bfloat16", "float16", "recompute", "forget", "the same bits twice"):
        assert any(word in what for what in checks), word


@pytest.mark.not_interpreted
@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_no_gpu_is_one_clear_sentence(capsys):
    assert fulmen.lab.cli.main(["verify", "--device", "cuda"]) == 1
    assert "cannot be verified on 'cuda': torch finds no CUDA or HIP device" in capsys.readouterr().err
