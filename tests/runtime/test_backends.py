import re
import shutil
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fulmen
from fulmen.runtime import architectures, availability, operators
from fulmen.runtime.architectures import architecture_of, why_unsupported
from fulmen.runtime.backends import _BACKENDS, Backend, _remembered, choose
from fulmen.runtime.versions import release


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
        assert choose("auto", torch.device("cpu"), dtype) != "reference"
        assert choose("auto", torch.device("xpu"), dtype) == "torch"


def test_a_backend_refuses_with_a_reason():
    backend = Backend("x", True, "", ("cuda",), (torch.bfloat16,), "")
    assert backend.refuses("cpu", torch.bfloat16) == "it runs on cuda tensors, not on cpu"
    assert backend.refuses("cuda", torch.float64) == "it takes torch.bfloat16, not torch.float64"
    assert backend.refuses("cuda", torch.bfloat16) == ""
    assert (
        Backend("x", False, "no compiler", ("cpu",), (torch.float32,), "").refuses("cpu", torch.float32)
        == "no compiler"
    )


def test_an_operator_without_kernels_is_left_to_torch_and_the_warning_says_why(monkeypatch):
    monkeypatch.setattr(operators, "_declared", operators._declared.copy())
    operators.Operator(name="toy", protocol=object, backends={"torch": "nowhere"}, checks="nowhere")
    with pytest.warns(UserWarning, match=r"the torch backend serves cuda tensors.*: toy has no triton backend"):
        assert choose("auto", torch.device("cuda"), torch.bfloat16, "toy") == "torch"
    with pytest.raises(ValueError, match="'triton' cannot run this call: toy has no triton backend"):
        choose("triton", torch.device("cpu"), torch.float32, "toy")


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend must be one of 'auto'"):
        choose("fastest", torch.device("cpu"), torch.float32)


def a_gpu(major=9, minor=0, name=""):
    return SimpleNamespace(major=major, minor=minor, gcnArchName=name, multi_processor_count=1)


@pytest.fixture
def gpus(monkeypatch):
    """A machine with the GPUs that a test puts into this list, whose kernels are compiled, not interpreted."""
    found = []
    triton = fulmen.backends()["triton"]
    monkeypatch.setitem(_BACKENDS, "triton", replace(triton, available=True, reason="", devices=("cuda",)))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    monkeypatch.setattr(architectures, "interpreted", lambda: False)
    monkeypatch.setattr(architectures, "triton_version", lambda: "3.7.1")
    caches = why_unsupported, architectures._architecture_of, _remembered
    for function in caches:
        function.cache_clear()
    yield found
    for function in caches:
        function.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "hip", "told"),
    [
        (a_gpu(7, 5), None, "need compute capability 8.0 (bfloat16 tensor cores), and this GPU has 7.5"),
        (a_gpu(8, 0), None, "sm_80"),
        (a_gpu(12, 1), None, "sm_120"),
        (a_gpu(name="gfx1100"), "7.0", "and this GPU is gfx1100"),
        (a_gpu(name="gfx90a:sramecc+:xnack-"), "7.0", "gfx942"),
        (a_gpu(name="gfx950:sramecc+"), "7.0", "gfx950"),
    ],
)
def test_gpus_that_kernels_are_not_made_for_are_left_to_torch_with_a_warning(monkeypatch, gpus, gpu, hip, told):
    """Each GPU by itself: a machine may have others. The rest is one of the architectures."""
    monkeypatch.setattr(torch.version, "hip", hip)
    gpus += [a_gpu(name="gfx942"), gpu]
    first, second = (torch.device("cuda", index) for index in range(2))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert choose("auto", first, torch.float16) == "triton"
        assert not warned
        chosen = choose("auto", second, torch.float16)
    if told in architectures.ARCHITECTURES:
        assert chosen == "triton"
        assert architecture_of(second).name == told
    else:
        assert chosen == "torch"
        assert told in str(warned[0].message)
        with pytest.raises(RuntimeError, match="use backend='torch'"):
            architecture_of(second)


@pytest.mark.parametrize("version", ["3.7.0", "3.7", "3.7.0+git0a1b2c"])
def test_triton_before_3_7_1_is_refused_on_hopper_alone(monkeypatch, gpus, version):
    gpus += [a_gpu(8, 0), a_gpu(9, 0), a_gpu(10, 0), a_gpu(12, 0)]
    monkeypatch.setattr(architectures, "triton_version", lambda: version)
    hopper = torch.device("cuda", 1)
    for index in (0, 2, 3):
        assert choose("triton", torch.device("cuda", index), torch.bfloat16) == "triton"
    reason = f"triton {version} miscompiles products of matrices on Hopper GPUs: 3.7.1 or newer is needed"
    with pytest.raises(ValueError, match=re.escape(reason)):
        choose("triton", hopper, torch.bfloat16)
    with pytest.warns(UserWarning, match=re.escape(reason)):
        assert choose("auto", hopper, torch.bfloat16) == "torch"


@pytest.mark.parametrize("version", ["3.7.1", "3.7.1.post1", "3.9.0", "4.0"])
def test_later_ones_serve_hopper_too(monkeypatch, gpus, version):
    gpus += [a_gpu(9, 0)]
    monkeypatch.setattr(architectures, "triton_version", lambda: version)
    assert choose("auto", torch.device("cuda", 0), torch.bfloat16) == "triton"


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (None, "triton is not installed (pip install 'fulmen[gpu]')"),
        ("3.6.2", "triton 3.6.2 is too old: 3.7 or newer is needed"),
        ("3.7.0", ""),
        ("3.10.0", ""),
    ],
)
def test_a_missing_or_old_triton_is_refused_everywhere(monkeypatch, version, told):
    monkeypatch.setattr(availability, "triton_version", lambda: version)
    assert availability.why_triton_is_missing() == told


def test_the_numbers_of_a_version():
    assert release("3.7.1+git0a1b2c") == (3, 7, 1)
    assert release("3.10.0a1") == (3, 10, 0)
