"""What only the CPU core has: ISA builds, threads, segments, rounds of heads, workspace."""

import pytest
import torch
from gate_cases import SAVES, Case, assert_close, exact, run, tensors
from torch.utils._python_dispatch import TorchDispatchMode

import fulmen
from fulmen.runtime import core

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
BUILDS = core.core.builds if core.core else []


@pytest.mark.parametrize("save", SAVES, ids=lambda save: "+".join(save) or "nothing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_every_build_with_poisoned_workspace(build, dtype, save):
    case = Case(queries=70, keys=130, key_size=60, value_size=33, dtype=dtype)
    with core.core.using(build):
        assert core.core.isa == build
        assert_close(run(case, backend="native", save=save), exact(case), build)


# One head of many tokens (partitioned into segments), and several, which walk together where threads are few.
FEW_HEADS = Case(batch=1, queries=2100, keys=1600, heads=1, key_size=16, value_size=48)
INTERLEAVED = Case(batch=3, queries=1100, keys=1100, heads=7, key_size=16, value_size=16)


@pytest.mark.parametrize("case", [FEW_HEADS, INTERLEAVED])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.usefixtures("poisoned_workspace")
def test_bits_do_not_depend_on_threads(case, deterministic):
    before = torch.get_num_threads()
    results = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(case, backend="native"))
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    assert_close(results[0], exact(case))
    for other in results[1:]:
        for name, x in other.items():
            assert torch.equal(x, results[0][name]), name


def test_a_sample_does_not_depend_on_the_batch_around_it_in_deterministic_mode():
    case = Case(batch=3, queries=1100, keys=1100)
    torch.use_deterministic_algorithms(True)
    try:
        whole = run(case, backend="native")["output"]
        alone = [x[1:2] for name, x in tensors(case).items() if name != "grad"]
        assert torch.equal(fulmen.output_gated_attention(*alone, backend="native"), whole[1:2])
    finally:
        torch.use_deterministic_algorithms(False)


class Calls(TorchDispatchMode):
    """The ops that are called, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.one_build
@pytest.mark.parametrize("save", SAVES, ids=lambda save: "+".join(save) or "nothing")
def test_the_backward_is_one_call_that_clears_nothing_for_it(save):
    """No gradient of what the forward kept, which nobody reads, is made."""
    leaves = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(4)]
    output = fulmen.output_gated_attention(*leaves, save=save, backend="native")
    with Calls() as calls:
        torch.autograd.grad(output, leaves, torch.ones_like(output.detach()))
    assert [name for name in calls.names if "ones_like" not in name and "detach" not in name] == [
        "fulmen.output_gated_attention_backward.default"
    ]


def test_more_heads_than_one_round():
    case = Case(batch=5, heads=31, queries=20, keys=20, key_size=5, value_size=3)
    assert_close(run(case, backend="native", save=()), exact(case))


@pytest.mark.parametrize("backward", [False, True])
def test_workspace_does_not_grow_with_tokens_and_heads(backward):
    from fulmen.ops.output_gate.native import workspace_bytes
    from fulmen.ops.output_gate.problem import Gated

    def needed(length, heads):
        x = torch.empty(1).expand(4, length, heads, 128)
        return workspace_bytes(Gated(x, x, x, x), backward)

    assert needed(65536, 32) == needed(4096, 32) == needed(4096, 64)
    assert needed(4096, 12) < 16 << 20
