import os
from contextlib import nullcontext

import pytest
import torch

import fulmen
from fulmen.runtime import core
from fulmen.runtime.architectures import interpreted

KERNELS_RUN = interpreted() or torch.cuda.is_available()


def pytest_collection_modifyitems(config, items):
    """What cannot run in this process is another's: Triton interprets kernels, or compiles them, as a process is begun
    (`make test` has one for each). And no backend is handed a dtype that it does not take."""
    kept, left_out = [], []
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        backend, dtype = given.get("backend"), given.get("dtype")
        possible = KERNELS_RUN if item.get_closest_marker("gpu") else True
        possible &= not (item.get_closest_marker("not_interpreted") and interpreted())
        if isinstance(dtype, torch.dtype) and backend in fulmen.backends():
            possible &= dtype in fulmen.backends()[backend].dtypes
        (kept if possible else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


# Tests run in as many processes as there are cores; more threads each would only get in each other's way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    """A test draws the same numbers whichever tests the process has run before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def device(request):
    """What tensors are made on: for tests of the Triton kernels the GPU, where there is one; else the CPU."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    of_triton = request.node.get_closest_marker("gpu") or parameters.get("backend") == "triton"
    chosen = "cuda" if of_triton and not interpreted() and torch.cuda.is_available() else "cpu"
    # A device context costs every call a little, and torch.compile does not see through all of it: not for the default.
    with torch.device(chosen) if chosen == "cuda" else nullcontext():
        yield chosen


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """As many as the core may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_workspace(monkeypatch):
    """Workspace full of NaN, as torch hands out memory that something else has used."""
    empty = torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        if made.dtype == torch.uint8:
            made.fill_(0xFF)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(core._Memory, "KEPT_BYTES", 0)  # or small calls would use what others have left there


@pytest.fixture(autouse="FULMEN_CORE" in os.environ)
def exact_workspace(monkeypatch):
    """Workspace to the byte, which torch aligns as the core needs: a core with sanitizers sees what lies after it."""
    monkeypatch.setattr(core._Memory, "KEPT_BYTES", 0)
    monkeypatch.setattr(core._Memory, "_new", lambda self, size: torch.empty(size, dtype=torch.uint8, device="cpu"))


@pytest.fixture(scope="module")
def empty_inspection_cache(tmp_path_factory):
    """Kernels are compiled, not remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
