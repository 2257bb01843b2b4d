"""The states at the boundaries of chunks, and their gradients."""

import sys

import pytest
import torch

import fulmen
from cases import ALL_DECAYS, BACKENDS, SCHEDULES, TOLERANCE, Case, Results, assert_close, inputs, relative_error
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.chunks.sequences import share_heads
from fulmen.ops.linear_attention.reference import states_of, token_decay

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def leaves_of(case):
    leaves = inputs(case)
    del leaves["q"]
    return leaves


def with_gradients(states, leaves):
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(states.shape, generator=generator, device="cpu").to(states)
    grads = torch.autograd.grad(states, list(leaves.values()), cotangent, allow_unused=True)
    gradients = {
        f"d{name}": torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return {"states": states.detach()} | gradients


def run(case, chunk_size=128, backend="auto", **options):
    def compute(backend):
        leaves = leaves_of(case)
        return with_gradients(fulmen.chunk_states(**leaves, chunk_size=chunk_size, backend=backend, **options), leaves)

    return Results(compute(backend), backend, rounded_products()(lambda: compute("torch")))


def exact(case, chunk_size=128):
    leaves = {name: x.detach().double().requires_grad_() for name, x in leaves_of(case).items()}
    heads = max(case.heads)
    k, v = share_heads(leaves["k"], heads), share_heads(leaves["v"], heads)
    start = leaves["initial_state"] if case.initial else k.new_zeros(case.batch, heads, case.key_size, case.value_size)
    every = states_of(k, v, token_decay(leaves.get("log_decay"), k), token_decay(leaves.get("log_decay_v"), v), start)
    boundaries = [every[t] for t in range(0, case.length, chunk_size)] + [every[case.length]]
    return with_gradients(torch.stack(boundaries, 2), leaves)


@pytest.mark.parametrize(
    ("length", "chunk_size"),
    [(1, 128), (128, 128), (130, 128), (257, 64), (50, 7), (5, 1), (20, 999), (300, 24)],
)
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_lengths_and_chunk_sizes(backend, decays, length, chunk_size):
    case = Case(decays=decays, length=length, heads=(2, 1, 2), key_size=12, value_size=9)
    assert_close(run(case, chunk_size=chunk_size, backend=backend), exact(case, chunk_size))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_schedules_and_dtypes(backend, schedule, dtype):
    case = Case(decays="channel+value", length=70, dtype=dtype, initial=False)
    assert_close(run(case, chunk_size=16, schedule=schedule, backend=backend), exact(case, 16))


@pytest.mark.parametrize("values", ["zero", "tiny", "strong", "mixed", "forget"])
@pytest.mark.parametrize("decays", ["head", "token", "channel+value"])
def test_extreme_decays(backend, decays, values):
    case = Case(decays=decays, values=values, length=70)
    assert_close(run(case, chunk_size=32, backend=backend), exact(case, 32))


def test_no_tokens(backend):
    case = Case(decays="token", length=0)
    assert_close(run(case, backend=backend), exact(case))
    state = torch.randn(1, 2, 3, 4)
    k, v = torch.randn(1, 0, 2, 3), torch.randn(1, 0, 2, 4)
    states = fulmen.chunk_states(k, v, initial_state=state, backend=backend)
    assert torch.equal(states[:, :, 0], state)
    assert states.data_ptr() != state.data_ptr()


def test_the_decay_may_have_more_heads_than_k_and_v(backend):
    torch.manual_seed(0)
    k, v, decay = torch.randn(1, 20, 1, 3), torch.randn(1, 20, 2, 4), -torch.rand(1, 20, 4, 3)
    states = fulmen.chunk_states(k, v, log_decay=decay, chunk_size=8, backend=backend)
    shared = [share_heads(x, 4).double() for x in (k, v)]
    expected = fulmen.chunk_states(*shared, log_decay=decay.double(), chunk_size=8, backend="reference")
    assert states.shape == (1, 4, 4, 3, 4)
    assert relative_error(states, expected) <= TOLERANCE[torch.float32]


def test_they_are_the_states_of_linear_attention(backend):
    case = Case(decays="channel", length=100)
    leaves = inputs(case)
    states = fulmen.chunk_states(**leaves_of(case), chunk_size=40, backend=backend)
    for chunk, stop in enumerate((0, 40, 80, 100)):
        part = {name: x if name == "initial_state" else x[:, :stop] for name, x in leaves.items()}
        state = fulmen.linear_attention(**part, return_state=True, backend=backend)[1]
        assert relative_error(states[:, :, chunk], state.double()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("chunk_size", [sys.maxsize, 2**70])
def test_a_chunk_longer_than_all_tokens(backend, chunk_size):
    case = Case(decays="channel", length=20)
    assert_close(run(case, chunk_size=chunk_size, backend=backend), exact(case, 20))


def test_export_with_any_number_of_tokens(backend):
    class States(torch.nn.Module):
        def forward(self, k):
            return fulmen.chunk_states(k, k, chunk_size=32, backend=backend)

    k = torch.randn(1, 100, 2, 3)
    tokens = torch.export.Dim("tokens", max=4096)
    exported = torch.export.export(States(), (k,), dynamic_shapes=({1: tokens},)).module()
    for n in (20, 100, 300):
        k = torch.randn(1, n, 2, 3)
        assert torch.equal(exported(k), fulmen.chunk_states(k, k, chunk_size=32, backend=backend))
