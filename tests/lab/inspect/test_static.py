"""Kernels compiled and launches recorded, without a GPU."""

import json
import re
import subprocess
import sys

import pytest
import torch

from fulmen.lab.cli import main
from fulmen.lab.inspect.inspection import DECAYS
from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile"),
    pytest.mark.usefixtures("empty_inspection_cache"),
]
pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("arch", "decay"),
    [("sm_80", "token"), pytest.param("sm_120", "channel+value", marks=pytest.mark.long), ("gfx950", "token")],
)
def test_kernels_fit(arch, decay, tmp_path, monkeypatch):
    """On an architecture of each vendor, and where registers are scarcest."""
    from fulmen.lab.inspect.compilation import resources
    from fulmen.lab.inspect.inspection import record

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    chosen = {labelled.kernel: labelled.launch for labelled in record([arch], [decay], None, False)}
    walks = {"output", "dq", "dk", "dv", "summary from boundaries", "summary, carried"}
    assert walks | {"fold", "recur", "recur, step"} <= set(chosen)
    for kernel in ("dk", "fold", "recur, step"):
        found = resources(chosen[kernel], ARCHITECTURES[arch])
        assert 0 < found.registers <= 512
        assert 0 <= found.shared <= ARCHITECTURES[arch].shared_limit
        assert found.compile_seconds > 0
        assert (found.tensor_core_ops > 0) == (kernel == "dk"), found


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_walks_fit_with_the_most_channels(arch, tmp_path, monkeypatch):
    """Where chunks are longest, and where shared memory is least."""
    from fulmen.lab.inspect.compilation import resources
    from fulmen.lab.inspect.dry_run import dry_run
    from fulmen.lab.operators.linear_attention.workloads import attention
    from fulmen.ops.linear_attention import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with dry_run(ARCHITECTURES[arch]) as (launches, _):
        p = attention(Decays.named("none"), torch.bfloat16, 512, 512)
        triton.forward(p, torch.empty(p.output_shape, dtype=torch.bfloat16), None)
    assert resources(launches[-1], ARCHITECTURES[arch]).shared <= ARCHITECTURES[arch].shared_limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_walks_fit_tensor_memory(dtype, tmp_path, monkeypatch):
    """Of sm_100, for more terms than two of bfloat16. Triton itself compiles what does not fit, to a kernel that does
    nothing."""
    from fulmen.lab.inspect.compilation import resources
    from fulmen.lab.operators.linear_attention.workloads import attention_launched

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    architecture = ARCHITECTURES["sm_100"]

    def of_head_decay():
        launches = attention_launched(architecture, Decays.named("head"), "auto", dtype=dtype)
        return next(x for x in launches[1] if x.arguments["WALK"] == "dq")

    assert resources(of_head_decay(), architecture).tensor_core_ops > 0
    monkeypatch.setattr("fulmen.ops.linear_attention.triton.tiles.fits_tensor_memory", lambda *_: True)
    with pytest.raises(RuntimeError, match=r"walk needs 6.. columns of tensor memory, of 512 that sm_100 has"):
        resources(of_head_decay(), architecture)


def test_launches_that_compile_to_the_same_code_are_compiled_once():
    from fulmen.lab.inspect.compilation import key_of
    from fulmen.lab.inspect.inspection import record

    architecture = ARCHITECTURES["sm_90"]
    outputs = record(["sm_90"], ["head", "learnable head", "token"], "output from boundaries", False)
    keys = {(r.decay, r.D): key_of(r.launch, architecture) for r in outputs}
    assert len(keys) == 6
    assert keys["head", 64] == keys["learnable head", 64]
    assert len(set(keys.values())) == 4


def compiled_at(lengths, call):
    """Of each kernel that the calls launch, the lengths at which it is compiled."""
    from fulmen.lab.inspect.compilation import key_of
    from fulmen.lab.inspect.dry_run import dry_run

    architecture, kernels, found = ARCHITECTURES["sm_90"], {}, set()
    for length in lengths:
        with dry_run(architecture) as (launches, _):
            call(length)
        for launch in launches:
            key = key_of(launch, architecture)
            if key not in found:
                kernels.setdefault(launch.kernel, []).append(length)
            found.add(key)
    return kernels


@pytest.mark.parametrize(("decay", "before_walks"), [("token", {}), ("channel", {"prepare": [1], "merge_blocks": [1]})])
def test_lengths_do_not_make_kernels_of_linear_attention_compile_again(decay, before_walks):
    """A walk with one segment is one kernel, with several two others, and one token a case of its own; at no other
    length is anything compiled."""
    from fulmen.lab.operators.linear_attention.workloads import attention
    from fulmen.ops.linear_attention import triton

    def call(length):
        p = attention(Decays.named(decay), torch.bfloat16, 128, 128, 1, length, 16)
        triton.forward(p, torch.empty(p.output_shape, dtype=torch.bfloat16), None)

    lengths = (1, 2, 15, 16, 128, 1000, 1024, 1040, 4096, 5000, 32768, 100_000)
    kernels = compiled_at(lengths, call)
    assert kernels == before_walks | {"walk": [1, 2, 1000, 1000], "sum_segments": [1000], "fold": [1000]}


def test_decoding_does_not_compile_as_it_goes_on():
    from fulmen.lab.operators.tpa.workloads import _backend, call

    def decode(length):
        p = call(torch.bfloat16, 128, 128, tokens=length, batch=1)
        _backend.forward(p, torch.empty(p.output_shape, dtype=torch.bfloat16))

    assert compiled_at((1, 2, 16, 256, 257, 272, 3843, 3920, 8000), decode) == {"decode": [1, 257], "merge": [257]}


@pytest.mark.long
def test_what_was_kept_is_found_by_any_choice_of_kernels():
    """In processes of their own: Triton remembers what it has seen."""
    program = """
import sys
from fulmen.runtime.architectures import ARCHITECTURES
from fulmen.lab.inspect.compilation import key_of
from fulmen.lab.inspect.inspection import record
chosen = record(["sm_90"], ["token"], sys.argv[1], False)
print({r.D: key_of(r.launch, ARCHITECTURES["sm_90"]) for r in chosen if r.kernel == "fold"})
"""
    found = [subprocess.check_output([sys.executable, "-c", program, kernel]) for kernel in ("", "fold")]
    assert b"128" in found[0]
    assert found[0] == found[1]


@pytest.mark.parametrize("decay", DECAYS)
def test_workspace_at_the_published_size(decay):
    """Beyond inputs and results, at batch 4, 32 heads, 128 channels, 32768 tokens: at most 128 and 256 MiB, and with
    decays per channel what is prepared of q and k, or of do and v: rows, pairs and what chunks leave of the state. For
    the gradient of the other axis' decay, rows are float32."""
    from fulmen.lab.operators.linear_attention.workloads import attention_memory

    forward, backward = attention_memory(ARCHITECTURES["sm_80"], DECAYS[decay], "auto", decay != "head")
    tokens = 4 * 32768 * 32
    rows, totals = 2 * tokens * (128 + 128 + 32), 4 * tokens // 32 * 128
    prepared = {"channel": (rows + totals,) * 2, "channel+value": (rows + 2 * totals, 2 * rows + 2 * totals)}
    of_forward, of_backward = prepared.get(decay, (0, 0))
    assert of_forward <= forward.workspace <= of_forward + (128 << 20)
    assert of_backward <= backward.workspace <= of_backward + (256 << 20)
    assert forward.outputs == 4 * 32768 * 32 * 128 * 2
    assert backward.inputs == forward.inputs + forward.outputs


def test_distances_that_32_bits_do_not_hold():
    """Within a chunk of 128 tokens, and within a state: inputs are copied, and what is updated in place is refused."""
    from fulmen.lab.inspect.dry_run import dry_run
    from fulmen.ops.linear_attention import triton
    from fulmen.ops.linear_attention.problem import Attention, Step

    with dry_run(ARCHITECTURES["sm_80"]) as (launches, _):
        far = torch.empty_strided((1, 200, 2, 64), (1, 1 << 25, 64, 1), dtype=torch.bfloat16)
        state = torch.empty_strided((1, 2, 64, 64), (1, 64, 1 << 26, 1))
        token_decay = torch.empty_strided((1, 200, 2), (1, 1 << 25, 1))
        output = torch.empty(1, 200, 2, 64, dtype=torch.bfloat16)
        triton.forward(Attention(far, far, far, token_decay, None, 1.0, state, None, "loop"), output, None)
        with pytest.raises(ValueError, match=r"cannot reach all of a state with strides \[67108864, 1\]"):
            triton.step(Step(*(far[:, 0],) * 3, state, None, None, 1.0), output[:, 0])
    (launch,) = launches
    assert [launch.arguments[name].token for name in ("x", "y", "z", "decay")] == [128, 128, 128, 2]
    assert {launch.arguments["entering"].row, launch.arguments["entering"].column} == {1, 64}


def test_memory_counts_what_is_alive():
    from fulmen.lab.inspect.dry_run import dry_run

    with dry_run(ARCHITECTURES["sm_80"]) as (_, memory), memory.workspace() as bytes_used:
        kept = torch.empty(1000)
        torch.empty(500)
        torch.empty(500)
        del kept
    assert bytes_used == [6000]


def test_the_command(tmp_path, capsys):
    path = tmp_path / "table.json"
    command = ["inspect", "--arch", "sm_120", "--decay", "none", "--kernel", "recur, step", "--json", str(path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    reports = json.loads(path.read_text())
    assert {(r["arch"], r["decay"], r["role"]) for r in reports} == {("sm_120", "none", "kernel")}
    assert {(r["D"], r["E"]) for r in reports} == {(64, 64), (128, 128)}
    assert {r["shared_limit"] for r in reports} == {101_376}
    keys = "kernel role arch dtype D E decay shared shared_limit registers spills tensor_core_ops compile_seconds"
    assert set(keys.split()) <= set(reports[0])
    assert re.search(r"\d kernels: \d+ spill, 0 need more shared memory than there is", printed)
    assert "| kernel | sm_120 |" in printed


def test_an_unknown_kernel_is_answered_with_those_there_are(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", "--arch", "sm_80", "--decay", "none", "--kernel", "nope"])
    assert re.search("no kernel of these decays has 'nope' in its name; there are .*tpa merge", capsys.readouterr().err)


@pytest.mark.parametrize("arch", [pytest.param("sm_90", marks=pytest.mark.long), "sm_100"])
def test_merging_blocks_is_not_compiled_to_nothing(arch, tmp_path, monkeypatch):
    """As Triton 3.7.1 does on sm_100 where a product of it has 64 rows. The kernels' work is in a branch of them."""
    from fulmen.lab.inspect.compilation import resources
    from fulmen.lab.inspect.dry_run import dry_run
    from fulmen.lab.operators.linear_attention.workloads import attention, gradients
    from fulmen.ops.linear_attention import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with dry_run(ARCHITECTURES[arch]) as (launches, _):
        p = attention(Decays.named("channel"), torch.bfloat16, 128, 128)
        triton.backward(p, torch.empty(p.output_shape, dtype=torch.bfloat16), None, gradients(p))
    merging = {launch.kernel: launch for launch in launches if launch.kernel in ("merge_blocks", "add_merged_pairs")}
    assert len(merging) == 2
    for launch in merging.values():
        assert resources(launch, ARCHITECTURES[arch]).tensor_core_ops > 0
