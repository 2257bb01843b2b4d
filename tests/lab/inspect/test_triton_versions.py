"""The kernels compiled by whichever Triton is imported; `make test-triton-versions` imports several, one at a time."""

import os

import pytest

from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytestmark = [
    pytest.mark.triton_versions,
    pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile"),
    pytest.mark.usefixtures("empty_inspection_cache"),
]
pytest.importorskip("triton")


def test_it_is_the_triton_that_was_chosen():
    import triton

    assert triton.__version__ == os.environ.get("EXPECTED_TRITON", triton.__version__)


def every_use_once(arch):
    """Of each kernel in bfloat16 with 128 channels; with a scalar decay and the one that takes most, or with none where
    an operator has none."""
    from fulmen.lab.inspect.inspection import record

    launches = [r for r in record([arch], ["none", "token", "channel+value"], None, False) if r.role == "kernel"]
    have_decays = {r.launch.module for r in launches if r.decay != "none"}
    chosen = {}
    for r in launches:
        if r.D == 128 and (r.decay != "none" or r.launch.module not in have_decays):
            use = [r.launch.arguments.get(name) for name in ("WALK", "RESULT")]
            chosen.setdefault((r.decay, r.launch.kernel, *use), r)
    return list(chosen.values())


@pytest.mark.parametrize("arch", ["sm_90", "sm_120", "gfx942"])
def test_kernels_compile(arch):
    from fulmen.lab.inspect.inspection import inspect

    chosen = every_use_once(arch)
    kernels = {
        "walk",
        "prepare",
        "merge_blocks",
        "add_merged_pairs",
        "sum_decay_gradient",
        "sum_before",
        "sum_segments",
        "fold",
        "recur",
        "clear_rest",
        "decode",
        "merge",
    }
    assert kernels | {"sum_outer", "multiply_rows"} == {r.launch.kernel for r in chosen}
    for found in inspect(chosen, os.cpu_count() or 1, print).values():
        assert found.registers > 0
        assert found.shared <= ARCHITECTURES[arch].shared_limit
