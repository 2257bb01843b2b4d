import shutil
import warnings
from dataclasses import replace

import pytest
import torch

import fulmen
from fulmen.backends import _BACKENDS, Backend, choose
from fulmen.gpu.availability import why_gpus_are_too_old


def test_every_backend_says_what_it_takes_or_why_it_is_unavailable():
    found = fulmen.backends()
    assert {"reference", "torch"} <= set(found)
    for name, backend in found.items():
        assert backend.name == name
        assert backend.devices
        assert backend.dtypes
        assert backend.auto
        assert backend.available or backend.reason


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler, so no core")
def test_where_there_is_a_compiler_there_is_a_core():
    """Tests of the core are skipped without one; this is what keeps a broken build from looking like that."""
    assert fulmen.backends()["native"].available, fulmen.backends()["native"].reason


def test_the_list_is_a_copy():
    fulmen.backends().clear()
    assert fulmen.backends()


def test_auto_never_chooses_the_reference():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert choose("auto", "cpu", dtype) != "reference"
        assert choose("auto", "xpu", dtype) == "torch"


def test_a_backend_refuses_with_a_reason():
    backend = Backend("x", True, "", ("cuda",), (torch.bfloat16,), "")
    assert backend.refuses("cpu", torch.bfloat16) == "it runs on cuda tensors, not on cpu"
    assert backend.refuses("cuda", torch.float64) == "it takes torch.bfloat16, not torch.float64"
    assert backend.refuses("cuda", torch.bfloat16) == ""
    assert (
        Backend("x", False, "no compiler", ("cpu",), (torch.float32,), "").refuses("cpu", torch.float32)
        == "no compiler"
    )


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend must be one of 'auto'"):
        choose("fastest", "cpu", torch.float32)


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "torch"), ((8, 0), "triton"), ((12, 0), "triton")])
def test_old_gpus_are_left_to_torch_with_a_warning(monkeypatch, capability, chosen):
    triton = fulmen.backends()["triton"]
    monkeypatch.setitem(_BACKENDS, "triton", replace(triton, available=True, reason="", devices=("cuda",)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    why_gpus_are_too_old.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert choose("auto", "cuda", torch.float16) == chosen
        assert [str(w.message) for w in told if "compute capability 8.0" in str(w.message)] or chosen == "triton"
    finally:
        why_gpus_are_too_old.cache_clear()
