"""Both forms of Lightning Attention-2 against the float64 recurrence.

In a process with TRITON_INTERPRET=1 the same tests run the Triton kernels (`make test` does, by their marker).
"""

import pytest
import torch

from cases import TOLERANCE, Case, exact, relative_error, tensors
from fulmen.lab.baselines.lightning2 import lightning2_chunk_loop, lightning2_parallel

pytestmark = [pytest.mark.either, pytest.mark.parametrize("form", [lightning2_parallel, lightning2_chunk_loop])]


def run(case, form):
    given = tensors(case)
    leaves = {name: given[name].transpose(1, 2).contiguous().requires_grad_() for name in "qkv"}
    output = form(*leaves.values(), given["log_decay"])
    output.backward(given["grad_output"].transpose(1, 2))
    results = {"output": output.detach()} | {f"d{name}": x.grad for name, x in leaves.items()}
    return {name: x.transpose(1, 2) for name, x in results.items()}


@pytest.mark.parametrize(
    ("length", "key_size", "value_size", "dtype"),
    [
        (1, 16, 16, torch.float32),
        (70, 20, 9, torch.bfloat16),
        (70, 20, 9, torch.float16),
        (330, 16, 40, torch.float32),
    ],
)
def test_outputs_and_gradients(form, length, key_size, value_size, dtype):
    case = Case(batch=1, length=length, key_size=key_size, value_size=value_size, scale=1.0, initial=False, dtype=dtype)
    expected = exact(case, without="grad_state")
    for name, got in run(case, form).items():
        # The published algorithm rounds scores and states to 16 bits on the way.
        allowed = TOLERANCE[dtype] * (1 if dtype == torch.float32 else 3)
        assert got.dtype == dtype
        assert relative_error(got, expected[name]) <= allowed, name


@pytest.mark.parametrize("values", ["zero", "strong", "forget"])
def test_extreme_decays(form, values):
    case = Case(batch=1, length=130, heads=(3, 3, 3), values=values, scale=1.0, initial=False)
    expected = exact(case, without="grad_state")
    for name, got in run(case, form).items():
        assert relative_error(got, expected[name]) <= TOLERANCE[torch.float32], name
