"""Bytes that the kernels request: counted from recorded launches, and by the interpreter, load by load."""

import json
import os
import subprocess
import sys

import pytest
import torch

from fulmen.ops.chunks.decay_form import Decays
from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytest.importorskip("triton")

# Prints the bytes that some calls of each operator request: by the formulas, or as interpreted.
COUNT = """
import json, sys, torch
from fulmen.runtime.architectures import ARCHITECTURES, interpreted
from fulmen.lab.operators.causal_conv1d import workloads as workloads_conv
from fulmen.lab.operators.delta_rule import workloads as workloads_delta
from fulmen.lab.operators.output_gate import workloads as workloads_gate
from fulmen.lab.operators.tpa import workloads as workloads_tpa
from fulmen.lab.operators.linear_attention.workloads import attention, gradients, _backend
from fulmen.ops.chunks.decay_form import Decays
from fulmen.ops.causal_conv1d.problem import Step
from fulmen.ops.output_gate.problem import Gated, Kept

size = dict(key_size=16, value_size=40, batch=1, length=80, heads=1)
counts = {}

def calls(run):
    decays = {"head": "loop", "token": "recompute", "channel": "loop", "channel+value": "recompute"}
    for decay, schedule in decays.items():
        p = attention(Decays.named(decay), torch.bfloat16, **size)._replace(schedule=schedule)
        p = p._replace(log_decay=p.log_decay.zero_())
        output, grads = torch.zeros(p.output_shape, dtype=torch.bfloat16), gradients(p)
        counts[f"{decay} {schedule} forward"] = run(lambda: _backend.forward(p, output, None))
        counts[f"{decay} {schedule} backward"] = run(lambda: _backend.backward(p, output, None, grads))
    p = workloads_gate.call(torch.bfloat16, 144, 40, batch=1, length=100, heads=1)
    output, grads = torch.zeros_like(p.gate), Gated(*map(torch.zeros_like, p))
    for kept in (Kept(None, None), Kept(torch.zeros(p.kv_shape), torch.zeros(p.gate.shape))):
        kind = "without" if kept.kv is None else "with"
        counts[f"gate {kind} cache, forward"] = run(lambda: workloads_gate._backend.forward(p, output, kept))
        counts[f"gate {kind} cache, backward"] = run(lambda: workloads_gate._backend.backward(p, kept, output, grads))
    p = workloads_tpa.call(torch.bfloat16, 16, 40, key_rank=2, tokens=300, batch=1, heads=20, rank=3)
    output = torch.zeros(p.output_shape, dtype=torch.bfloat16)
    for split in ("batch", "head", "sequence"):
        counts[f"tpa {split}"] = run(lambda: workloads_tpa._backend.forward(p._replace(split=split), output))

    for decay in ("head", "channel"):
        p = workloads_delta.call(Decays.named(decay), torch.bfloat16, 16, 40, batch=1, length=70, heads=1)
        p = p._replace(log_decay=p.log_decay.zero_())
        output, grads = torch.zeros(p.output_shape, dtype=torch.bfloat16), workloads_delta.gradients(p)
        counts[f"delta {decay} forward"] = run(lambda: workloads_delta._backend.forward(p, output, None))
        counts[f"delta {decay} backward"] = run(lambda: workloads_delta._backend.backward(p, output, None, grads))

    p = workloads_conv.call(torch.bfloat16, 70, batch=1, length=300)
    output, grads = torch.zeros_like(p.x), workloads_conv.gradients(p)
    counts["conv forward"] = run(lambda: workloads_conv._backend.forward(p, output, p.initial_state))
    counts["conv backward"] = run(lambda: workloads_conv._backend.backward(p, p.x, p.initial_state, grads))
    step = Step(p.x[:, 0], p.initial_state, p.weight, p.bias, "silu")
    counts["conv step"] = run(lambda: workloads_conv._backend.step(step, output[:, 0]))

if interpreted():
    from triton.runtime.interpreter import InterpreterBuilder as builder
    total = 0
    def counted(operation):
        def run(self, pointers, *args):
            global total
            mask = args[0] if operation is builder_load else args[1]
            total += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return operation(self, pointers, *args)
        return run
    builder_load = builder.create_masked_load
    builder.create_masked_load, builder.create_masked_store = map(counted, (builder_load, builder.create_masked_store))
    def run(call):
        global total
        total = 0
        call()
        return total
    calls(run)
else:
    from fulmen.lab.inspect.dry_run import dry_run
    from fulmen.lab.inspect.traffic import requested_bytes
    with dry_run(ARCHITECTURES["sm_80"]) as (launches, _):
        def run(call):
            launches.clear()
            call()
            return requested_bytes(launches)
        calls(run)
print(json.dumps(counts))
"""


def count(interpret):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    result = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.long
@pytest.mark.skipif(interpreted(), reason="it starts the interpreter itself")
def test_the_formulas_count_what_is_loaded_and_stored():
    formulas, interpreted = count(False), count(True)
    for call, bytes_ in interpreted.items():
        assert formulas[call] == pytest.approx(bytes_, rel=0.01), call


@pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not record")
def test_the_default_forward_requests_little_more_than_the_minimum():
    """Over reading q, k, v and writing the output once, at batch 4, 32 heads, 128 channels, 32768 tokens."""
    from fulmen.lab.operators.linear_attention.workloads import attention_traffic

    minimum = 4 * (4 * 32768 * 32 * 128 * 2)
    ratios = {
        schedule: attention_traffic(ARCHITECTURES["sm_80"], Decays.named("head"), schedule, learnable=False)[0]
        / minimum
        for schedule in ("auto", "parallel")
    }
    assert ratios["auto"] <= 1.6
    assert ratios["parallel"] == pytest.approx(4.25, abs=0.01)


@pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not record")
@pytest.mark.parametrize(("heads", "kernels"), [(32, ["walk"]), (1, ["walk", "sum_segments", "fold"])])
def test_chunk_states_are_read_once_where_heads_fill_the_card(heads, kernels):
    from fulmen.lab.inspect.dry_run import dry_run
    from fulmen.lab.operators.linear_attention.workloads import _backend, _states

    with dry_run(ARCHITECTURES["sm_80"]) as (launches, _):
        p = _states(Decays.named("channel"), "auto", 4, 1024, heads, 128, torch.bfloat16)
        _backend.states_forward(p, torch.empty(p.states_shape))
    assert [launch.kernel for launch in launches] == kernels


@pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not record")
@pytest.mark.parametrize(
    ("batch", "architecture", "partitioned"), [(2, "sm_80", True), (2, "sm_90", False), (1, "sm_90", True)]
)
def test_a_card_with_a_program_on_every_multiprocessor_is_not_partitioned_for_a_second(
    batch, architecture, partitioned
):
    """128 programs are one for almost each of an H100's 132 multiprocessors, and more than one for an A100's 108."""
    from fulmen.lab.operators.linear_attention.workloads import attention_launched

    launches, _ = attention_launched(ARCHITECTURES[architecture], Decays.named("head"), "auto", False, batch, 8192)
    assert ("fold" in [launch.kernel for launch in launches]) == partitioned
