"""What only the CPU core has: threads, and parts of what torch hands out."""

import pytest
import torch

import fulmen
from cases import assert_close
from fulmen.lab.operators.causal_conv1d.cases import Case, exact, run, tensors

pytestmark = pytest.mark.skipif(not fulmen.backends()["native"].available, reason="there is no CPU core")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dense", ["channels", "tokens"])
def test_native_bits_do_not_depend_on_the_number_of_threads(threads, dense):
    """The tokens are partitioned, across sequences, and partial sums added up in order; all of it is right."""
    case = Case(lengths=(700, 0, 1500, 3), channels=21, dense=dense)
    found = []
    for n in (1, 2, 3):
        threads(n)
        found.append(run(case, tensors(case), "native"))
    assert_close(found[0], exact(case))
    for other in found[1:]:
        for name, x in found[0].items():
            assert torch.equal(x, other[name]), name


@pytest.mark.usefixtures("poisoned_workspace")
@pytest.mark.parametrize(
    "case", [Case(channels=5), Case(channels=5, dense="tokens"), Case(channels=5, dense="neither")]
)
def test_native_reads_nothing_of_its_workspace(case):
    assert_close(run(case, tensors(case), "native"), exact(case))


def test_native_step_on_threads(threads):
    """Each thread has its own channels."""
    x, weight = torch.randn(3, 5000), torch.randn(5000, 4)
    states = torch.randn(2, 3, 5000, 4)
    states[1] = states[0]
    outputs = []
    for n, state in zip((1, 3), states, strict=True):
        threads(n)
        outputs.append(fulmen.causal_conv1d_step(x, state, weight, activation="silu", backend="native"))
    assert torch.equal(*outputs)
    assert torch.equal(*states)
