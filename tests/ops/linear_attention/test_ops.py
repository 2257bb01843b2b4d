"""The custom ops: torch.compile, torch.export, opcheck, autocast, and what they refuse."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import fulmen
from cases import ALL_DECAYS, BACKENDS, Case, differentiate, inputs, run, tensors
from fulmen.lab.tolerances import TOLERANCE, relative_error

pytestmark = pytest.mark.one_build

BACKEND = pytest.mark.parametrize("backend", BACKENDS)
FORM = pytest.mark.parametrize("decays", ["none", "head", "token", "channel+value"])
ARGUMENTS = pytest.mark.parametrize("decays", ["none", "channel+value"])  # the fewest tensors, and the most


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled earlier: torch keeps the gradient's graph on disk, and does not see when its op has changed."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def attention_args(case, backend, grad=True):
    given = {n: x.clone().requires_grad_(grad) for n, x in tensors(case).items() if not n.startswith("grad_")}
    cu_seqlens = None if case.bounds is None else torch.tensor(case.bounds)
    tail = (
        given.get("log_decay"),
        given.get("log_decay_v"),
        0.5,
        given.get("initial_state"),
        cu_seqlens,
        "auto",
        True,
        backend,
    )
    return (given["q"], given["k"], given["v"], *tail)


@BACKEND
@ARGUMENTS
@pytest.mark.parametrize("packed", [None, (3, 0, 4)])
def test_opcheck_of_linear_attention(backend, decays, packed):
    case = Case(decays=decays, length=7, key_size=4, value_size=3, heads=(1, 2, 2), packed=packed)
    torch.library.opcheck(torch.ops.fulmen.linear_attention.default, attention_args(case, backend))


@BACKEND
@ARGUMENTS
def test_opcheck_of_chunk_states(backend, decays):
    given = inputs(Case(decays=decays, length=7, key_size=4, value_size=3))
    args = (
        given["k"],
        given["v"],
        given.get("log_decay"),
        given.get("log_decay_v"),
        given["initial_state"],
        4,
        "auto",
        backend,
    )
    torch.library.opcheck(torch.ops.fulmen.chunk_states.default, args)


@BACKEND
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck_of_the_step(backend, transposed):
    q, k, v, state = torch.randn(2, 1, 4), torch.randn(2, 2, 4), torch.randn(2, 2, 3), torch.randn(2, 2, 4, 3)
    if transposed:
        state = state.mT.contiguous().mT
    args = (q, k, v, state, -torch.rand(2, 2), None, 1.0, backend)
    torch.library.opcheck(torch.ops.fulmen.linear_attention_step.default, args)


@BACKEND
@pytest.mark.parametrize("decays", ALL_DECAYS)
def test_compiled_without_graph_breaks(backend, decays):
    """Forward and backward of the compiled function are those of the eager one, bit for bit."""
    case = Case(decays=decays, length=70, heads=(1, 2, 2))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(leaves):
        return fulmen.linear_attention(**leaves, scale=0.5, return_state=True, backend=backend)

    leaves = inputs(case)
    compiled = differentiate(case, leaves, *call(leaves))
    eager = run(case.of(scale=0.5), backend=backend)
    for name, x in compiled.items():
        assert torch.equal(x, eager[name]), name


def test_compiled_by_inductor_with_packed_sequences_and_operations_around():
    case = Case(decays="token", packed=(5, 0, 60))
    cu_seqlens = torch.tensor(case.bounds)

    @torch.compile(fullgraph=True)
    def call(q, k, v, x):
        return fulmen.linear_attention(q * 2, k + 1, v, log_decay=-x.abs(), cu_seqlens=cu_seqlens).relu().sum()

    given = tensors(case)
    args = [given[name].clone().requires_grad_() for name in ("q", "k", "v", "log_decay")]
    call(*args).backward()
    q, k, v, x = again = [given[name].clone().requires_grad_() for name in ("q", "k", "v", "log_decay")]
    fulmen.linear_attention(q * 2, k + 1, v, log_decay=-x.abs(), cu_seqlens=cu_seqlens).relu().sum().backward()
    for compiled, eager in zip(args, again, strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad)


def test_a_compiled_function_takes_changing_lengths_without_recompiling_each():
    compiled = torch.compile(lambda q: fulmen.linear_attention(q, q, q), fullgraph=True, dynamic=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (5, 70, 131):
            q = torch.randn(1, length, 2, 8)
            assert torch.equal(compiled(q), fulmen.linear_attention(q, q, q))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_step_takes_changing_batches(dynamic):
    compiled = torch.compile(fulmen.linear_attention_step, fullgraph=True, dynamic=dynamic, backend="eager")
    for batch in (2, 3, 5):
        q, k, v = torch.randn(batch, 2, 8), torch.randn(batch, 2, 8), torch.randn(batch, 2, 4)
        states = [torch.ones(batch, 2, 4, 8).mT for _ in range(2)]
        assert torch.equal(compiled(q, k, v, states[0]), fulmen.linear_attention_step(q, k, v, states[1]))
        assert torch.equal(*states)


@BACKEND
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_an_initial_state_of_any_dtype(backend, dtype):
    given = tensors(Case(decays="token"))
    state = given["initial_state"].to(dtype).requires_grad_()
    single = state.detach().float().requires_grad_()
    calls = [
        fulmen.linear_attention(*(given[n] for n in "qkv"), initial_state=x, return_state=True, backend=backend)
        for x in (state, single)
    ]
    assert all(x.dtype == torch.float32 for x in calls[0])
    assert all(map(torch.equal, *calls))
    grads = [
        torch.autograd.grad(sum(x.sum() for x in call), s)[0] for call, s in zip(calls, (state, single), strict=True)
    ]
    assert torch.equal(grads[0], grads[1].to(dtype))
    chunks = [fulmen.chunk_states(given["k"], given["v"], initial_state=x, backend=backend) for x in (state, single)]
    assert torch.equal(*chunks)


@BACKEND
@pytest.mark.parametrize("transposed", [False, True])
def test_a_compiled_step_updates_the_state_without_copying_it(backend, transposed):
    def step(q, k, v, state):
        return fulmen.linear_attention_step(q, k, v, state, backend=backend)

    q, k, v, state = torch.randn(1, 2, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 4), torch.randn(1, 2, 8, 4)
    if transposed:
        state = state.mT.contiguous().mT
    expected_state = state.clone()
    expected = step(q, k, v, expected_state)
    output, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), q, k, v, state)
    assert torch.equal(output, expected)
    assert torch.equal(state, expected_state)
    body = code[code.index("def call") : code.index("def get_args")]
    assert "linear_attention_step" in body
    assert "copy" not in body
    assert "empty_strided" not in body


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, log_decay):
            return fulmen.linear_attention(q, k, v, log_decay=log_decay)

    case = Case(decays="head")
    args = tuple(tensors(case)[name] for name in ("q", "k", "v", "log_decay"))
    tokens = torch.export.Dim("tokens", max=4096)
    shapes = {name: {1: tokens} for name in "qkv"} | {"log_decay": None}
    program = torch.export.export(Layer(), args, dynamic_shapes=shapes)
    longer = tensors(case.of(length=131))
    longer_args = tuple(longer[name] for name in ("q", "k", "v", "log_decay"))
    assert torch.equal(program.module()(*longer_args), Layer()(*longer_args))


@BACKEND
def test_autocast_casts_q_k_and_v_and_nothing_else(backend):
    case = Case(decays="token", length=70)
    given = inputs(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = fulmen.linear_attention(**given, return_state=True, backend=backend)
        loss = output.float().sum() + state.sum()
        loss.backward()  # under autocast too: gradients must not be rounded by it
        states = fulmen.chunk_states(given["k"], given["v"], log_decay=given["log_decay"], backend=backend)
    assert output.dtype == torch.bfloat16
    assert state.dtype == states.dtype == torch.float32
    assert {name: x.grad.dtype for name, x in given.items()} == dict.fromkeys(given, torch.float32)

    rounded = {n: x.detach().bfloat16() if n in "qkv" else x.detach() for n, x in given.items()}
    leaves = {n: x.requires_grad_() for n, x in rounded.items()}
    plain_output, plain_state = fulmen.linear_attention(**leaves, return_state=True, backend=backend)
    (plain_output.float().sum() + plain_state.sum()).backward()
    assert torch.equal(output, plain_output)
    assert torch.equal(state, plain_state)
    for name, x in given.items():
        assert torch.equal(x.grad, leaves[name].grad.float()), name


@BACKEND
def test_double_backward_is_refused(backend):
    given = inputs(Case(decays="head"))
    output = fulmen.linear_attention(**given, backend=backend)
    (grad,) = torch.autograd.grad(output.sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.sum().backward()
    states = fulmen.chunk_states(given["k"], given["v"], backend=backend)
    (grad,) = torch.autograd.grad(states.sum(), given["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.sum().backward()


@BACKEND
def test_inference_mode_and_results_of_their_own(backend):
    case = Case(length=0)
    given = {n: x for n, x in tensors(case).items() if not n.startswith("grad_")}
    with torch.inference_mode():
        _, state = fulmen.linear_attention(**given, return_state=True, backend=backend)
    assert torch.equal(state, given["initial_state"])
    assert state.data_ptr() != given["initial_state"].data_ptr()


INPUTS = ("q", "k", "v", "log_decay", "log_decay_v", "initial_state")
SUBSETS = [
    *((name,) for name in INPUTS),
    ("q", "initial_state"),
    ("k", "log_decay"),
    ("v", "log_decay_v"),
    ("k", "v"),
    (),
]


def as_among_all(gradient, among_all, backend):
    """With the same bits, but for the Triton kernels: where a decay's gradient is requested too, they add the pair of a
    token with itself last."""
    if backend == "triton":
        return relative_error(gradient, among_all.double()) <= TOLERANCE[torch.float32]
    return torch.equal(gradient, among_all)


@BACKEND
@FORM
def test_only_the_requested_gradients(backend, decays):
    """The others are empty, and these are what they would be among all."""
    case = Case(decays=decays, length=70, heads=(2, 1, 2))
    *call, _, _ = attention_args(case, backend, grad=False)
    grads = tensors(case)["grad_output"], tensors(case)["grad_state"]
    given = [x is not None for x in (*call[:5], call[6])]
    states = torch.ops.fulmen.chunk_states(*call[1:5], call[6], 32, "auto", backend)
    calls = {
        "linear_attention": (torch.ops.fulmen.linear_attention_backward, (*grads, *call), given),
        "chunk_states": (
            torch.ops.fulmen.chunk_states_backward,
            (states, states, *call[1:5], call[6], 32, "auto"),
            [False, *given[1:]],
        ),
    }
    for name, (backward, args, possible) in calls.items():
        full = backward(*args, possible, backend)
        for subset in SUBSETS:
            wanted = [x in subset and there for x, there in zip(INPUTS, possible, strict=True)]
            for x, wants, grad, among_all in zip(INPUTS, wanted, backward(*args, wanted, backend), full, strict=True):
                right = as_among_all(grad, among_all, backend) if wants else grad.numel() == 0
                assert right, (name, subset, x)


@pytest.mark.parametrize(("backend", "compiled"), [*((name, False) for name in BACKENDS), ("torch", True)])
def test_inputs_that_need_no_gradient_get_none(backend, compiled):
    def call(leaves):
        return fulmen.linear_attention(**leaves, return_state=True, backend=backend)

    case = Case(decays="channel+value")
    full = run(case, backend=backend)
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    for name in INPUTS:
        given = {n: x.detach() for n, x in inputs(case).items()}
        given[name].requires_grad_()
        results = differentiate(case, {name: given[name]}, *function(given))
        assert as_among_all(results[f"d{name}"], full[f"d{name}"], backend), name
        assert all(x.grad is None for x in given.values())


def test_forward_mode_derivatives_are_refused():
    """torch would return a tangent of zero."""
    q = torch.randn(1, 8, 2, 4)
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: fulmen.linear_attention(x, q, q).sum(), (q,), (q,))
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.jvp(
            lambda x: fulmen.linear_attention(q, q, q, log_decay=x).sum(), (-torch.ones(2),), (torch.ones(2),)
        )
    # Other tensors may have tangents.
    _, tangent = torch.func.jvp(lambda x: (fulmen.linear_attention(q, q, q) * x).sum(), (q,), (q,))
    assert tangent.isfinite()


def test_meta_tensors_have_shapes():
    q = torch.empty(2, 8, 3, 4, device="meta")
    assert fulmen.linear_attention(q, q, q[..., :2]).shape == (2, 8, 3, 2)
