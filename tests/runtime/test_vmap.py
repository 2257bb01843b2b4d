"""torch.vmap: what a Python loop computes, without torch's warning that it loops, and in one call where that can be."""

import pytest
import torch
from torch.func import grad, vmap

import fulmen
from cases import BACKENDS
from fulmen.runtime.operators import operators

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.filterwarnings("error")]
SAMPLES, B, N, H, D, E = 3, 2, 5, 2, 4, 3


def attention(q, k, v, log_decay=None, state=None, **options):
    return fulmen.linear_attention(q, k, v, log_decay=log_decay, initial_state=state, return_state=True, **options)


def delta(q, k, v, beta, log_decay=None, state=None, **options):
    return fulmen.delta_rule(
        q, k, v, beta, log_decay=log_decay, normalize_qk=True, initial_state=state, return_state=True, **options
    )


def states(k, v, log_decay=None, log_decay_v=None, state=None, **options):
    return fulmen.chunk_states(
        k, v, log_decay=log_decay, log_decay_v=log_decay_v, initial_state=state, chunk_size=2, **options
    )


def convolution(x, weight, bias=None, state=None, **options):
    return fulmen.causal_conv1d(
        x, weight, bias, activation="silu", initial_state=state, return_state=state is not None, **options
    )


def packed(q, k, v, **options):
    return attention(q, k, v, cu_seqlens=torch.tensor([0, 2, N]), **options)


def step(q, k, v, state, log_decay=None, **options):
    return fulmen.linear_attention_step(q, k, v, state, log_decay=log_decay, **options), state


def delta_step(q, k, v, beta, state, log_decay=None, **options):
    return fulmen.delta_rule_step(q, k, v, beta, state, log_decay=log_decay, **options), state


def convolution_step(x, state, weight, bias=None, **options):
    return fulmen.causal_conv1d_step(x, state, weight, bias, **options), state


QKV = [(B, N, H, D), (B, N, H, D), (B, N, H, E)]
ONE_TOKEN = [(B, H, D), (B, H, D), (B, H, E)]
PACKED = [(1, N, H, D), (1, N, H, D), (1, N, H, E)]
X, WEIGHT, BIAS = (B, N, H), (H, 3), (H,)
STATE = (B, H, D, E)
OF_NO_BATCH = ((H,), WEIGHT)
# The function, the shapes of its arguments, which are mapped over, and whether that is one call of the operator.
DIFFERENTIABLE = {
    "none": (attention, QKV, (0, 0, 0), True),
    "k and v shared by samples": (attention, QKV, (0, None, None), True),
    "by token": (attention, [*QKV, (B, N, H), STATE], (2, 1, 4, 3, 0), True),
    "by channel, one for all": (attention, [*QKV, (B, N, H, D)], (0, 0, 0, None), True),
    "per head, one for all": (attention, [*QKV, (H,)], (0, 0, 0, None), True),
    "per head, each its own": (attention, [*QKV, (H,)], (0, 0, 0, 0), False),
    "packed": (packed, PACKED, (0, 0, 1), False),
    "delta rule": (delta, [*QKV, (B, N, H), (B, N, H), STATE], (0, 0, 0, 0, 1, None), True),
    "delta rule, per head": (delta, [*QKV, (B, N, H), (H,)], (0, 0, 0, 0, 0), False),
    "states": (states, [QKV[0], QKV[2], (B, N, H, D), (B, N, H, E), STATE], (0, 1, 0, 0, 0), True),
    "convolution": (convolution, [X, WEIGHT, BIAS, (B, H, 2)], (0, None, None, 0), True),
    "convolution, transposed": (convolution, [X, WEIGHT], (3, None), True),
    "convolution, a bias each": (convolution, [X, WEIGHT, BIAS], (0, None, 0), False),
    "output gate": (fulmen.output_gated_attention, [*QKV, (B, N, H, E)], (0, 0, None, 1), True),
}
STEPS = {
    "step": (step, [*ONE_TOKEN, STATE, (B, H)], (0, 0, 1, 0, None), True),
    "step, per head": (step, [*ONE_TOKEN, STATE, (H,)], (0, None, 0, 0, None), True),
    "step, a decay each": (step, [*ONE_TOKEN, STATE, (H,)], (0, 0, 0, 0, 0), False),
    "step, states apart": (step, [*ONE_TOKEN, STATE], (0, 0, 0, 1), False),
    "delta step": (delta_step, [*ONE_TOKEN, (B, H), STATE, (B, H, D)], (0, 0, 0, 0, 0, 0), True),
    "convolution step": (convolution_step, [(B, H), (B, H, 3), WEIGHT], (0, 0, None), True),
}


@pytest.fixture
def tensors(case):
    """The case's arguments, mapped dimensions among them. Numbers below 0 do for decays."""
    torch.manual_seed(0)
    _, shapes, in_dims, _ = case
    sizes = [list(shape) for shape in shapes]
    for size, dim in zip(sizes, in_dims, strict=True):
        if dim is not None:
            size.insert(dim, SAMPLES)
    return [-torch.rand(size) for size in sizes]


@pytest.fixture
def calls(monkeypatch, backend):
    """Of functions of the backend."""
    counted = []

    def counting(name, run):
        return lambda *args: counted.append(name) or run(*args)

    for module in (operator.backend(backend) for operator in operators() if backend in operator.backends):
        for name in ("forward", "backward", "step", "states_forward", "states_backward"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counted


def sample(tensors, in_dims, i):
    return [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims, strict=True)]


def assert_same(found, expected):
    """To the last places: calls of other sizes may be scheduled differently."""
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def is_plain_torch(case, backend):
    return case[0] is fulmen.output_gated_attention and backend == "reference"


@pytest.mark.parametrize("case", (DIFFERENTIABLE | STEPS).values(), ids=DIFFERENTIABLE | STEPS)
def test_a_loop(case, backend, tensors, calls):
    function, _, in_dims, in_one = case
    # Steps update states in place: the loop gets its own, in the same places.
    copies = [x.clone() for x in tensors]
    expected = [function(*sample(copies, in_dims, i), backend=backend) for i in range(SAMPLES)]
    calls.clear()
    found = vmap(lambda *x: function(*x, backend=backend), in_dims)(*tensors)
    if not is_plain_torch(case, backend):
        assert len(calls) == (1 if in_one else SAMPLES)
    for i, want in enumerate(expected):
        assert_same(found[i] if isinstance(found, torch.Tensor) else tuple(x[i] for x in found), want)


@pytest.mark.parametrize("of", ["what is mapped", "all"])
@pytest.mark.parametrize("case", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradients_per_sample(case, backend, of, tensors, calls):
    function, shapes, in_dims, in_one = case
    wanted = tuple(i for i, dim in enumerate(in_dims) if of == "all" or dim is not None)
    in_one &= not any(shapes[i] in OF_NO_BATCH for i in wanted)

    def loss(*x):
        results = function(*x, backend=backend)
        return sum(y.square().sum() for y in (results if isinstance(results, tuple) else (results,)))

    found = vmap(grad(loss, wanted), in_dims)(*tensors)
    counted = calls.count("backward") + calls.count("states_backward")
    if not is_plain_torch(case, backend):
        assert counted == (1 if in_one else SAMPLES)
    for i in range(SAMPLES):
        assert_same(tuple(x[i] for x in found), grad(loss, wanted)(*sample(tensors, in_dims, i)))


@pytest.mark.parametrize("case", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_the_gradient_of_all_samples(case, backend, tensors):
    function, _, in_dims, _ = case

    def loss(results):
        return sum(y.square().sum() for y in (results if isinstance(results, tuple) else (results,)))

    def of_map(*x):
        return loss(vmap(lambda *y: function(*y, backend=backend), in_dims)(*x))

    def of_loop(*x):
        return sum(loss(function(*sample(x, in_dims, i), backend=backend)) for i in range(SAMPLES))

    every = tuple(range(len(tensors)))
    assert_same(grad(of_map, every)(*tensors), grad(of_loop, every)(*tensors))


def test_maps_of_maps(backend):
    torch.manual_seed(0)
    q, v, log_decay = torch.randn(2, 3, *QKV[0]), torch.randn(3, *QKV[2]), -torch.rand(2, H)

    def function(q, v, log_decay):
        return fulmen.linear_attention(q, q, v, log_decay=log_decay, backend=backend)

    found = vmap(vmap(function, (0, 0, None)), (0, None, 0))(q, v, log_decay)
    for i in range(2):
        for j in range(3):
            assert_same(found[i, j], function(q[i, j], v[j], log_decay[i]))


def test_a_state_for_all_samples_cannot_be_updated(backend):
    q = torch.randn(SAMPLES, B, H, D)
    state = torch.zeros(B, H, D, D)
    with pytest.raises(ValueError, match="state must be mapped over by vmap"):
        vmap(lambda q: fulmen.linear_attention_step(q, q, q, state, backend=backend))(q)
    assert not state.any()


def test_decode(backend):
    torch.manual_seed(0)
    shapes = [(B, 1, H, 2), (B, N, H, 1), (B, N, H, 1), (B, 1, 2, D), (B, N, 1, D), (B, N, 1, D)]
    factors = [torch.randn(SAMPLES, *shape) for shape in shapes]
    lengths = torch.tensor([[1, 5], [2, 3], [4, 4]])

    def function(*x):
        *factors, lengths = x
        return fulmen.tpa_decode(*factors, seqlens=lengths, backend=backend)

    found = vmap(function)(*factors, lengths)
    for i in range(SAMPLES):
        assert_same(found[i], function(*(x[i] for x in factors), lengths[i]))
