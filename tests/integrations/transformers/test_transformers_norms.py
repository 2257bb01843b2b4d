"""The gated norms of the Mamba-2 family: what transformers computes, forward and backward."""

from importlib import import_module

import pytest
import torch

pytest.importorskip("transformers")
from fulmen.integrations.transformers import patch
from fulmen.integrations.transformers.functions import OUR_FORWARDS

SIZE, GROUP = 48, 16
NORMS = {
    "mamba2.modeling_mamba2.MambaRMSNormGated": (SIZE,),
    "bamba.modeling_bamba.BambaRMSNormGated": (SIZE,),
    "granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridRMSNormGated": (SIZE,),
    "nemotron_h.modeling_nemotron_h.NemotronHRMSNormGated": (SIZE, GROUP),
    "zamba2.modeling_zamba2.Zamba2RMSNormGated": (SIZE, GROUP),
}


def made(name, dtype=torch.float32):
    module, _, cls = name.rpartition(".")
    norm = getattr(import_module(f"transformers.models.{module}"), cls)(*NORMS[name])
    torch.nn.init.normal_(norm.weight)
    return norm.to(dtype)


def test_every_norm_that_is_ours_is_tested():
    assert {name.rpartition(".")[2] for name in NORMS} == {name for name in OUR_FORWARDS if "Norm" in name}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, SIZE), (3, SIZE)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_output_and_gradients(name, shape, gated):
    torch.manual_seed(0)
    norm = made(name)
    x, gate = (torch.randn(shape, requires_grad=True) for _ in range(2))
    inputs = (x, gate) if gated else (x,)
    leaves, cotangent = (*inputs, norm.weight), torch.randn(shape)

    def results():
        with torch.no_grad():
            decoded = norm(*inputs)
        output = norm(*inputs)
        return decoded, output, *torch.autograd.grad(output, leaves, cotangent)

    theirs = results()
    with patch(norm) as patched:
        assert "rms_norm_gated" in repr(patched)
        ours = results()
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(results(), theirs, strict=True))  # undone


@pytest.mark.parametrize("name", NORMS)
def test_bfloat16_is_no_further_from_float32(name):
    torch.manual_seed(0)
    norm = made(name, torch.bfloat16)
    x, gate = (torch.randn(64, SIZE, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        theirs = norm(x, gate)
        with patch(norm):
            ours = norm(x, gate)
        exact = norm.float()(x.float(), gate.float())
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= (theirs - exact).norm()
