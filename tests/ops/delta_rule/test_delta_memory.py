"""What the Triton backend allocates, in a dry run."""

import pytest
import torch

from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(interpreted(), reason="a dry run launches compiled kernels")


@pytest.mark.parametrize(
    ("decays", "dtype"),
    [("none", torch.float32), ("token", torch.bfloat16), ("channel", torch.bfloat16), ("channel", torch.float32)],
)
def test_a_segment_stays_within_its_budget(decays, dtype):
    """Where the shortest segment does; states between segments, and what summing heads takes, come on top of it."""
    from fulmen.lab.operators.delta_rule.workloads import workspace
    from fulmen.ops.delta_rule.triton import SEGMENT_BYTES

    sizes = {"batch": 1, "heads": 8, "dim": 128, "length": 65536}
    forward, backward = workspace(ARCHITECTURES["sm_80"], Decays.named(decays), **sizes, dtype=dtype)
    assert forward < SEGMENT_BYTES
    assert SEGMENT_BYTES / 2 < backward < 1.15 * SEGMENT_BYTES
