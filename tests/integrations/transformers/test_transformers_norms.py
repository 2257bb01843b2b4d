"""The norms of models with a mixer that is ours: what transformers computes, forward and backward."""

import re
from importlib import import_module

import pytest
import torch

pytest.importorskip("transformers")
from fulmen.integrations.transformers import patch
from fulmen.integrations.transformers.functions import OUR_FORWARDS

SIZE, GROUP = 48, 16
# Arguments of the class, where they are more than a size. Those of MODULES are in a file of another name.
GROUPED = {"NemotronHRMSNormGated", "Zamba2RMSNormGated", "Qwen4ExpTextRMSNorm"}
NORMS = [name for name in OUR_FORWARDS if "Norm" in name]
MODULES = {
    "MambaRMSNormGated": "mamba2",
    "GraniteMoeHybrid": "granitemoehybrid",
    "MiniMax": "minimax",
    "OlmoHybrid": "olmo_hybrid",
}


def module_of(name):
    """The name of the file: that of the class in small letters, or said above."""
    family = re.sub(r"(Text)?RMSNorm(Gated)?$", "", name)
    return MODULES.get(name) or MODULES.get(family) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", family).lower()


def inputs_of(name, shape, dtype=torch.float32, requires_grad=False):
    """Tokens, and a gate if it takes one."""
    count = 2 if name.endswith("Gated") else 1
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for _ in range(count)]


def made(name, dtype=torch.float32):
    file = module_of(name)
    cls = getattr(import_module(f"transformers.models.{file}.modeling_{file}"), name)
    norm = cls(SIZE, GROUP) if name in GROUPED else cls(SIZE)
    torch.nn.init.normal_(norm.weight)
    return norm.to(dtype)


def compared(norm, inputs):
    """What transformers and what Fulmen computes, with gradients; that the first is back at the end."""
    cotangent = torch.randn(inputs[0].shape)

    def results():
        with torch.no_grad():
            decoded = norm(*inputs)
        output = norm(*inputs)
        return decoded, output, *torch.autograd.grad(output, (*inputs, norm.weight), cotangent.to(output.dtype))

    theirs = results()
    with patch(norm) as patched:
        assert OUR_FORWARDS[type(norm).__name__].__name__ in repr(patched)
        ours = results()
    assert all(torch.equal(a, b) for a, b in zip(results(), theirs, strict=True))  # undone
    return ours, theirs


@pytest.mark.parametrize("shape", [(2, 5, SIZE), (3, SIZE), (2, 5, 3, SIZE)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_output_and_gradients(name, shape):
    torch.manual_seed(0)
    for found, expected in zip(*compared(made(name), inputs_of(name, shape, requires_grad=True)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in NORMS if OUR_FORWARDS[name].__name__ == "rms_norm_gated"])
def test_a_gate_that_is_left_out(name):
    torch.manual_seed(0)
    for found, expected in zip(*compared(made(name), [torch.randn(3, SIZE, requires_grad=True)]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_bfloat16_is_no_further_from_float32(name):
    torch.manual_seed(0)
    norm, inputs = made(name, torch.bfloat16), inputs_of(name, (64, SIZE), torch.bfloat16)
    with torch.no_grad():
        theirs = norm(*inputs)
        with patch(norm):
            ours = norm(*inputs)
        exact = norm.float()(*(x.float() for x in inputs))
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() <= (theirs - exact).norm()


@pytest.mark.parametrize(("tokens", "weights"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("name", NORMS)
def test_two_dtypes(name, tokens, weights):
    """As under autocast. The result has transformers' dtype, but for gated norms: that of the tokens, as autocast makes
    of it anyway."""
    torch.manual_seed(0)
    norm, inputs = made(name, getattr(torch, weights)), inputs_of(name, (64, SIZE), getattr(torch, tokens))
    with torch.no_grad():
        theirs = norm(*inputs)
        with patch(norm):
            ours = norm(*inputs)
        exact = norm.float()(*(x.float() for x in inputs))
    assert ours.dtype == (inputs[0].dtype if name.endswith("Gated") else theirs.dtype)
    assert (ours - exact).norm() <= max(
        (theirs - exact).norm(), 1e-6 * exact.norm(), (exact - exact.to(ours.dtype)).norm()
    )


def test_an_activation_that_is_not_ours_stays_with_transformers():
    norm, inputs = made("Qwen3NextRMSNormGated"), inputs_of("Qwen3NextRMSNormGated", (3, SIZE))
    norm.activation = "gelu"
    theirs = norm(*inputs)
    with patch(norm), pytest.warns(UserWarning, match="activation must be one of"):
        assert torch.equal(norm(*inputs), theirs)
