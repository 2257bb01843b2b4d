"""The Triton kernels in Triton's interpreter; see tests/linear_attention/test_triton.py."""

import pytest
import torch
from gate_cases import SAVES, Case, assert_close, differentiate, exact, leaves, run

import fulmen
from fulmen.runtime.architectures import interpreted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not interpreted(), reason="Triton's interpreter must be chosen before triton is imported"),
]


@pytest.mark.parametrize("save", SAVES, ids=lambda save: "+".join(save) or "nothing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_choice_and_dtype(save, dtype):
    case = Case(batch=1, queries=67, keys=70, heads=2, key_size=20, value_size=9, dtype=dtype)
    assert_close(run(case, backend="triton", save=save), exact(case))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (0, 3), (3, 0), (130, 20)])
def test_lengths(queries, keys):
    case = Case(batch=1, queries=queries, keys=keys, heads=1)
    assert_close(run(case, backend="triton"), exact(case))


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 130), (130, 1), (70, 70)])
def test_sizes_of_more_than_one_tile(key_size, value_size):
    case = Case(batch=1, queries=20, keys=20, heads=1, key_size=key_size, value_size=value_size)
    assert_close(run(case, backend="triton", save=()), exact(case))


def test_several_segments(monkeypatch):
    """One head does not fill a card: its tokens have segments, unless bits must not depend on the batch."""
    from fulmen.ops.output_gate import triton

    monkeypatch.setattr(triton, "SHORTEST_SEGMENT", 50)
    case = Case(batch=1, queries=160, keys=170, heads=1, key_size=8, value_size=8)
    assert_close(run(case, backend="triton"), exact(case))
    torch.use_deterministic_algorithms(True)
    try:
        assert_close(run(case, backend="triton"), exact(case))
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_outside_of_the_tokens_is_never_read():
    """The tensors are views into larger ones full of NaN."""
    case = Case(batch=1, queries=67, keys=67, heads=2)
    inputs = {name: amid_nan(x.detach()).requires_grad_() for name, x in leaves(case).items()}
    output = fulmen.output_gated_attention(**inputs, backend="triton")
    assert_close(differentiate(case, inputs, output), exact(case))


def amid_nan(x):
    batch, length, heads, size = x.shape
    around = torch.full((batch, length + 64, heads + 1, size + 7), torch.nan, dtype=x.dtype)
    inside = around[:, :length, :heads, :size]
    inside.copy_(x)
    return inside
