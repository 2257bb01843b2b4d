from contextlib import nullcontext

import pytest
import torch

from fulmen.runtime.architectures import interpreted

# Tests run in as many processes as there are cores; more threads each would only get in each other's way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def device(request):
    """What tensors are made on: for tests of the Triton kernels the GPU, where there is one; else the CPU."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    of_triton = request.node.get_closest_marker("gpu") or parameters.get("backend") == "triton"
    chosen = "cuda" if of_triton and not interpreted() and torch.cuda.is_available() else "cpu"
    # A device context costs every call a little, and torch.compile does not see through all of it: not for the default.
    with torch.device(chosen) if chosen == "cuda" else nullcontext():
        yield chosen


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


@pytest.fixture(scope="module")
def empty_inspection_cache(tmp_path_factory):
    """Kernels are compiled, not remembered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def medium_precision():
    """torch's own permission to round float32 factors of products, as kᵀv and weights are, to bfloat16."""
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
