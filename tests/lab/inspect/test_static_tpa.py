"""The kernels of tpa_decode compiled and their launches recorded, without a GPU."""

import pytest

from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile"),
    pytest.mark.usefixtures("empty_inspection_cache"),
]
pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "gfx950"])
def test_one_architecture_of_each_vendor(arch):
    from fulmen.lab.inspect.inspection import reports

    table = reports([arch], ["none"], "tpa", False)
    kernels = {"tpa batch", "tpa head", "tpa sequence", "tpa merge", "tpa sequence, rank 2"}
    assert kernels <= {report.kernel for report in table}
    for report in table:
        assert report.shared <= report.shared_limit, report
        assert (report.tensor_core_ops > 0) == (report.kernel != "tpa merge"), report


def test_workspace_at_the_published_size():
    """Only the sequence split has any: at batch 8 and 32 heads on 108 multiprocessors, 27 slices of each sample."""
    from fulmen.lab.operators.tpa.workloads import workspace

    assert workspace(ARCHITECTURES["sm_80"], 256) == 0
    assert workspace(ARCHITECTURES["sm_80"], 32768) == 8 * 27 * 32 * (128 + 2) * 4
