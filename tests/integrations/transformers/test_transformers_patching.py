"""Patching touches one model, and undoing it leaves nothing."""

import copy
import runpy
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import build, relative, tokens  # noqa: E402
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback  # noqa: E402

import fulmen.nn.linear  # noqa: E402
from fulmen.integrations.transformers import patch, patching, stepping_aside  # noqa: E402
from fulmen.integrations.transformers.mamba2 import mamba2_selective_state_update  # noqa: E402
from fulmen.runtime import core  # noqa: E402
from fulmen.runtime.recording import recording  # noqa: E402

IDS = tokens(2, 17)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def mamba():
    return build("Mamba2")


def is_patched(model):
    mixer = model.backbone.layers[0].mixer
    computing = mixer.__dict__.get("_old_forward", mixer.forward)
    return computing.__func__ is not type(mixer).forward


def test_other_models_of_the_same_file_are_untouched(mamba):
    other = build("Mamba2")
    expected = other(IDS).logits
    with patch(mamba):
        assert is_patched(mamba)
        assert not is_patched(other)
        assert torch.equal(other(IDS).logits, expected)
        both = patch(other)
        assert relative(mamba(IDS).logits, other(IDS).logits) == 0
    assert not is_patched(mamba)
    assert is_patched(other)
    both.undo()
    assert not is_patched(other)


def test_patching_and_undoing_twice(mamba):
    first, second = patch(mamba), patch(mamba)
    assert "patched before" in repr(second)
    assert "undone" not in repr(second)
    second.undo()
    assert is_patched(mamba)
    first.undo()
    first.undo()
    assert not is_patched(mamba)
    third = patch(mamba)
    first.undo()
    assert is_patched(mamba)
    third.undo()
    assert not is_patched(mamba)


def test_a_part_of_a_model(mamba):
    patch(mamba.backbone.layers[0])
    assert is_patched(mamba)
    assert "forward" not in mamba.backbone.layers[1].mixer.__dict__
    assert "1 x Mamba2Mixer: patched before" in repr(patch(mamba))


def test_a_copy_is_patched_and_has_a_handle_of_its_own(mamba):
    handle = patch(mamba)
    twin = copy.deepcopy(mamba)
    handle.undo()
    assert is_patched(twin)
    with torch.no_grad():
        for parameter in mamba.parameters():
            parameter.zero_()  # the copy does not compute with the weights of the original
    assert relative(twin(IDS).logits, build("Mamba2")(IDS).logits) < 1e-4
    patch(twin).undo()
    assert not is_patched(twin)


def test_saving_and_loading(mamba, tmp_path):
    expected = mamba(IDS).logits
    keys = [*mamba.state_dict()]
    patch(mamba)
    assert [*mamba.state_dict()] == keys
    mamba.save_pretrained(tmp_path)
    loaded = transformers.Mamba2ForCausalLM.from_pretrained(tmp_path)
    assert not is_patched(loaded)
    assert torch.equal(loaded(IDS).logits, expected)


def test_hooks_of_accelerate(mamba):
    hooks = pytest.importorskip("accelerate.hooks")
    expected = mamba(IDS).logits
    seen = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    mixer = mamba.backbone.layers[0].mixer
    handle = patch(mamba)
    hooks.add_hook_to_module(mixer, Hook())  # after it
    assert is_patched(mamba)
    assert relative(mamba(IDS).logits, expected) < 1e-4
    handle.undo()
    assert not is_patched(mamba)
    assert torch.equal(mamba(IDS).logits, expected)
    handle = patch(mamba)  # under it
    assert is_patched(mamba)
    assert relative(mamba(IDS).logits, expected) < 1e-4
    assert seen == [mixer] * 3
    hooks.remove_hook_from_module(mixer)
    assert is_patched(mamba)
    handle.undo()
    assert torch.equal(mamba(IDS).logits, expected)


def test_weights_that_accelerate_offloads(mamba):
    accelerate = pytest.importorskip("accelerate")
    expected = mamba(IDS).logits
    accelerate.cpu_offload(mamba, execution_device=torch.device("cpu"))
    assert mamba.backbone.layers[0].mixer.conv1d.weight.is_meta  # brought by a hook that the mixer's decorator calls
    patch(mamba)
    assert relative(mamba(IDS).logits, expected) < 1e-4


def test_compile(mamba):
    expected = mamba(IDS).logits
    patch(mamba)
    compiled = torch.compile(mamba, fullgraph=True, backend="eager")
    assert relative(compiled(IDS, use_cache=False).logits, expected) < 1e-4
    cache = mamba(IDS[:, :16]).cache_params
    assert relative(compiled(IDS[:, 16:], cache_params=cache, use_cache=True).logits, expected[:, 16:]) < 1e-4


@pytest.mark.parametrize("name", ["Mamba2", "MiniMax", "Lfm2", "Qwen3_5", "KimiLinear"])
def test_compile_through_aot_autograd(name):
    """One of each kind of mixer, functionalized as for a compiler."""
    torch.compiler.reset()
    model = build(name)
    expected = model(IDS, use_cache=False)[0]
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative(compiled(IDS, use_cache=False)[0], expected) < 1e-4


def test_what_was_left_alone_is_said():
    handle = patch(build("Mamba"))
    assert "2 x MambaMixer: causal_conv1d_update, causal_conv1d_fn" in repr(handle)
    assert "2 x MambaMixer, left alone: mamba_inner_fn, mamba_selective_state_update" in repr(handle)
    assert "nothing that Fulmen computes" in repr(patch(nn.LayerNorm(2)))
    with pytest.raises(TypeError, match="model must be"):
        patch("Mamba2")


@pytest.fixture
def slow_products(monkeypatch):
    """A CPU without instructions for products of 16 bits."""
    patching._our_forward.cache_clear()
    for module in (patching, fulmen.nn.linear):
        monkeypatch.setattr(module, "SLOW", frozenset({torch.bfloat16}))
    yield
    patching._our_forward.cache_clear()


@pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
def test_linear_layers_of_16_bits(slow_products, mamba):
    """Are products of the core where torch's are slow, in prefill and training, and torch's again when undone."""
    with torch.enable_grad():
        exact = mamba(IDS).logits
    mamba.bfloat16()
    expected = mamba(IDS).logits
    handle = patch(mamba)
    assert "5 x Linear: products of 16 bits" in repr(handle)
    with recording() as recorded, torch.enable_grad():
        found = mamba(IDS).logits
        found.float().sum().backward()
    names = Counter(call.name for call, _ in recorded.calls)
    assert names["matmul_call"] == 5 * 3
    assert (found - exact).norm() <= 1.1 * (expected - exact).norm()
    assert all(p.grad.isfinite().all() for p in mamba.parameters())
    handle.undo()
    assert torch.equal(mamba(IDS).logits, expected)


@pytest.mark.parametrize(
    ("slow", "few", "said"),
    [
        ((), (), None),
        ((torch.bfloat16,), (), "Linear: products of 16 bits\n"),
        ((), (torch.float32,), "Linear: products of few rows\n"),
        ((torch.float32,), (), "Linear: products of float32\n"),
        ((torch.bfloat16,), (torch.float32,), "Linear: products of 16 bits, products of few rows\n"),
    ],
)
def test_linear_layers_stay_where_torch_is_fast(slow_products, monkeypatch, mamba, slow, few, said):
    monkeypatch.setattr(patching, "SLOW", frozenset(slow))
    monkeypatch.setattr(patching, "FEW_ROWS", frozenset(few))
    found = repr(patch(mamba))
    assert "Linear" not in found if said is None else said in found
    assert all(("forward" in x.__dict__) == (said is not None) for x in mamba.modules() if type(x) is nn.Linear)


@pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
def test_linear_layers_of_few_rows(slow_products, monkeypatch):
    """Of a decode step in float32, where torch reads weights with one thread."""
    for module in (patching, fulmen.nn.linear):
        monkeypatch.setattr(module, "FEW_ROWS", frozenset({torch.float32}))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layer, token, prompt = nn.Linear(520, 520), torch.randn(2, 1, 520), torch.randn(2, 40, 520)
    with torch.no_grad(), patch(layer):
        for x, expected in ((token, ["linear_call"]), (prompt, [])):
            with recording() as recorded:
                found = layer(x)
            assert [call.name for call, _ in recorded.calls] == expected
            torch.testing.assert_close(found, nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)


def test_a_forward_of_somebody_else_stays(mamba):
    mixer = mamba.backbone.layers[0].mixer
    mixer.forward = lambda *args, **kwargs: 1 / 0
    assert "1 x Mamba2Mixer, left alone: it has a forward of its own" in repr(patch(mamba))
    with pytest.raises(ZeroDivisionError):
        mamba(IDS)


def of_tomorrow(forward):
    """A module of transformers with this forward."""
    return type("Mixer", (nn.Module,), {"forward": forward, "__module__": "transformers.models.tomorrow"})()


def causal_conv1d_fn(x, weight):
    return x


def test_a_function_with_other_arguments_is_left_alone():
    mixer = of_tomorrow(lambda self, x: causal_conv1d_fn(x, None))
    assert "left alone: causal_conv1d_fn (takes other arguments than Fulmen knows)" in repr(patch(mixer))
    assert mixer(3) == 3


@use_kernel_func_from_hub_with_fallback("scan_of_tomorrow", "package_of_tomorrow")
def scan_of_tomorrow(x):
    return x


def test_mixers_that_fulmen_does_not_know_are_said():
    handle = patch(of_tomorrow(lambda self, x: scan_of_tomorrow(x)))
    assert "1 x Mixer, left alone: scan_of_tomorrow (Fulmen does not know it)" in repr(handle)
    handle = patch(of_tomorrow(lambda self, x, cache: cache.update_recurrent_state(x, 0)))
    assert "1 x Mixer, left alone: its forward keeps a state that Fulmen does not know" in repr(handle)


def test_an_attribute_is_not_a_function_of_the_file():
    """Whatever globals of its name there are."""
    assert "nothing that Fulmen computes" in repr(patch(of_tomorrow(lambda self, x: x.causal_conv1d_fn)))


def test_softmax_attention_is_nothing_that_was_left_alone():
    assert "left alone" not in repr(patch(build("FalconH1")))


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(stepping_aside, "_said", set())


@pytest.mark.usefixtures("nothing_said")
def test_what_fulmen_does_not_take_is_said_once():
    model = build("Mamba2", hidden_act="gelu")
    expected = model(IDS).logits
    patch(model)
    with pytest.warns(UserWarning, match="causal_conv1d_fn stays transformers' own .*activation"):
        assert relative(model(IDS).logits, expected) < 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)


@pytest.mark.usefixtures("nothing_said")
def test_the_same_refusal_of_other_shapes_is_not_said_again():
    def refusing(x):
        raise ValueError(f"x must have two dimensions; got shape {list(x.shape)}")

    function = stepping_aside.or_original(refusing, lambda x: x, packs=True)
    with pytest.warns(UserWarning, match="refusing stays transformers' own"):
        function(torch.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(torch.zeros(2))


@pytest.mark.usefixtures("nothing_said")
def test_a_step_with_gradients_is_transformers_own(mamba):
    expected = mamba(IDS).logits
    patch(mamba)
    cache = mamba(IDS[:, :16]).cache_params
    with torch.enable_grad(), pytest.warns(UserWarning, match="must not require grad"):
        output = mamba(IDS[:, 16:], cache_params=cache, use_cache=True).logits
    assert relative(output, expected[:, 16:]) < 1e-4


def test_a_step_size_for_each_channel_is_refused():
    state, x, B = torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 4), torch.ones(1, 1, 8)
    A = torch.full((2, 1, 1), -1.0).expand(2, 4, 8)
    mamba2_selective_state_update(state, x, torch.ones(1, 2, 1).expand(1, 2, 4), A, B, B)
    with pytest.raises(ValueError, match="dt must be one number for each head"):
        mamba2_selective_state_update(state, x, x, A, B, B)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("fulmen.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'fulmen\[transformers\]'"):
        import fulmen.integrations.transformers  # noqa: F401


REGISTERED = """
import sys, torch, transformers, fulmen
from fulmen.integrations.transformers import register
from tiny_models import build, relative, tokens

CONVOLUTION = {"causal_conv1d", "causal_conv1d_step"}
DELTA = {"delta_rule", "delta_rule_step"} | CONVOLUTION
OPERATORS = {
    "Mamba2": {"linear_attention", "linear_attention_step"} | CONVOLUTION,
    "Mamba": CONVOLUTION,
    "Qwen3_5": DELTA,
    "KimiLinear": DELTA,
}
calls, ids = set(), tokens(2, 17)
def spied(name, operator):
    return lambda *args, **kwargs: (calls.add(name), operator(*args, **kwargs))[1]

for name in set().union(*OPERATORS.values()):
    setattr(fulmen, name, spied(name, getattr(fulmen, name)))
models = {name: build(name) for name in OPERATORS}
before = {name: (m(ids).logits, m.generate(ids, max_new_tokens=4)) for name, m in models.items()}
assert not calls
register()
for name, model in models.items():
    calls.clear()
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    model = type(model).from_pretrained(f"{sys.argv[1]}/{name}", use_kernels=True)
    logits, text = before[name]
    assert relative(model(ids).logits, logits) < 1e-4
    assert torch.equal(model.generate(ids, max_new_tokens=4), text)
    assert calls == OPERATORS[name], (name, calls)
"""


def test_register(tmp_path):
    """In a process of its own: nothing undoes it."""
    pytest.importorskip("kernels")
    code = ["-W", "error::UserWarning:fulmen", "-c", REGISTERED, str(tmp_path)]
    result = subprocess.run([sys.executable, *code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_example(capsys, monkeypatch):
    example = Path(__file__).parents[3] / "examples" / "generate.py"
    sizes = ["--hidden", "64", "--layers", "2", "--prompt", "40", "--tokens", "8"]
    monkeypatch.setattr(sys, "argv", [str(example), *sizes])
    runpy.run_path(str(example), run_name="__main__")
    assert "same text" in capsys.readouterr().out
