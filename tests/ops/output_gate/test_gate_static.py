"""The Triton kernels compiled and their launches recorded, without a GPU."""

import pytest
import torch

from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile"),
    pytest.mark.usefixtures("empty_inspection_cache"),
]
pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_one_architecture_of_each_vendor(arch):
    from fulmen.lab.inspect.inspection import reports

    table = reports([arch], ["none"], "gate", False)
    uses = ("kv", "output", "output, kept", "dgate", "dq", "dkv", "dk", "dv")
    assert {r.kernel for r in table} == {f"gate {use}" for use in uses}
    for report in table:
        assert report.shared <= report.shared_limit, report
        assert report.tensor_core_ops > 0, report


def test_workspace_at_the_published_size():
    """Beyond inputs, results and what is kept: kv and dkv, no copy of anything that grows with the tokens."""
    from fulmen.lab.inspect.dry_run import dry_run
    from fulmen.lab.operators.output_gate import workloads as workloads_gate
    from fulmen.ops.output_gate.problem import Gated, Kept

    backend = workloads_gate._backend
    with dry_run(ARCHITECTURES["sm_80"]) as (_, memory):
        p = workloads_gate.call(torch.bfloat16, 128, 128)
        output, grads = torch.empty_like(p.gate), Gated(*map(torch.empty_like, p))
        with memory.workspace() as forward:
            backend.forward(p, output, Kept(None, None))
        with memory.workspace() as backward:
            backend.backward(p, Kept(None, None), output, grads)
    one_matrix = 4 * 12 * 12 * 128 * 128
    assert forward == [one_matrix]
    assert backward == [2 * one_matrix]
