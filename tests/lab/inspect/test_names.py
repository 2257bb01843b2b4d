"""The names that a profiler shows."""

import re
from importlib import import_module
from types import SimpleNamespace

import pytest

from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile")
pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("label", "decay", "arch", "name"),
    [
        ("recur, step", "token", "sm_80", "fulmen_linear_attention_recur_token_decay"),
        ("dq", "learnable head", "gfx942", "fulmen_linear_attention_dq_head_decay_and_gradient"),
        ("tpa merge", "none", "sm_90", "fulmen_tpa_merge"),
        ("gate dkv", "none", "sm_80", "fulmen_output_gate_dkv"),
        ("conv step", "none", "sm_80", "fulmen_causal_conv1d_step_silu"),
    ],
)
def test_compiled_code_carries_the_name(label, decay, arch, name, tmp_path, monkeypatch):
    from fulmen.lab.inspect.compilation import compiled
    from fulmen.lab.inspect.inspection import record

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch = next(r.launch for r in record([arch], [decay], label, False) if r.kernel == label)
    kernel = compiled(launch, ARCHITECTURES[arch])
    assert kernel.metadata.name == name
    code = kernel.asm["ptx" if ARCHITECTURES[arch].backend == "cuda" else "amdgcn"]
    assert re.search(rf"\b{name}\b", code)


def name_of(launch):
    """Without compiling: Triton hands over the constants that are arguments of their own."""
    function = getattr(import_module(launch.module), launch.kernel)
    constants = {function.arg_names[path[0]]: value for path, value in launch.constants.items() if len(path) == 1}
    return function.repr(SimpleNamespace(constants=constants, signature=launch.signature))


def test_every_name_is_an_identifier_and_says_the_walk_and_the_decay():
    from fulmen.lab.inspect.inspection import DECAYS, record

    names = {}
    for r in record(["sm_80"], list(DECAYS), None, False):
        names.setdefault(name_of(r.launch), set()).add((r.decay, r.kernel))
    assert all(re.fullmatch(r"fulmen(_[a-z0-9]+)+", name) for name in names)
    assert names["fulmen_linear_attention_output_no_decay"] == {
        ("none", "output"), ("none", "output from boundaries"), ("none", "output, packed")
    }  # fmt: skip
    assert ("channel+value", "dq") in names["fulmen_linear_attention_dq_channel_value_decay_and_gradient"]
    assert ("head", "dq") in names["fulmen_linear_attention_dq_head_decay"]
    assert ("channel", "prepare") in names["fulmen_linear_attention_prepare"]
    assert ("channel", "output") in names["fulmen_linear_attention_output_channel_decay"]
    assert ("channel", "dv") in names["fulmen_linear_attention_dv_channel_decay"]
    assert names["fulmen_delta_rule_output_channel_decay"] == {
        ("channel", "delta output"), ("channel", "delta output, packed")
    }  # fmt: skip
    assert ("token", "delta differentiate, backward") in names["fulmen_delta_rule_dqk_token_decay_and_gradient"]
    assert names["fulmen_tpa_decode_slice"] == {("none", "tpa sequence"), ("none", "tpa sequence, rank 2")}
    assert names["fulmen_output_gate_dgate"] == {("none", "gate dgate")}
