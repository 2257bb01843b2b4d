"""The custom op: torch.compile, opcheck, autocast, layouts of results, and the memory that is kept."""

import pytest
import torch
from gate_cases import OPS, SAVES, Case, assert_close, differentiate, exact, leaves, run, tensors

import fulmen
from cases import BACKENDS
from fulmen.ops.output_gate import torch_matmul

pytestmark = pytest.mark.one_build

BACKEND = pytest.mark.parametrize("backend", BACKENDS)
OP = pytest.mark.parametrize("backend", OPS)
SMALL = Case(queries=5, keys=7, key_size=4, value_size=3, heads=2)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@OP
@pytest.mark.parametrize("save", SAVES)
def test_opcheck(backend, save):
    args = (*leaves(SMALL).values(), "kv" in save, "qkv" in save, backend)
    torch.library.opcheck(torch.ops.fulmen.output_gated_attention.default, args)


@OP
def test_opcheck_of_transposed_inputs(backend):
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves(SMALL).values()]
    args = (*(x.requires_grad_() for x in views), True, True, backend)
    torch.library.opcheck(torch.ops.fulmen.output_gated_attention.default, args)


@BACKEND
@pytest.mark.parametrize("save", SAVES)
def test_compiled_without_graph_breaks(backend, save):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(inputs):
        return fulmen.output_gated_attention(**inputs, save=save, backend=backend)

    case = Case()
    inputs = leaves(case)
    compiled = differentiate(case, inputs, call(inputs))
    for name, x in run(case, save=save, backend=backend).items():
        assert torch.equal(compiled[name], x), name


@pytest.mark.parametrize("save", SAVES)
def test_the_hand_written_gradient_is_transparent_to_the_compiler(save):
    """torch.compile sees matmuls, not an opaque op."""
    case = Case(queries=16, keys=16)
    graphs = []

    def remember(graph, inputs):
        graphs.append(graph)
        return graph

    call = torch.compile(torch_matmul.attend, fullgraph=True, backend=remember)
    inputs = {name: x.transpose(1, 2) for name, x in leaves(case).items()}
    output = call(*inputs.values(), save).transpose(1, 2)
    assert len(graphs) == 1
    assert "torch.ops.fulmen" not in graphs[0].print_readable(print_output=False)
    back = differentiate(case, inputs, output)
    assert_close({n: x if n == "output" else x.transpose(1, 2) for n, x in back.items()}, exact(case))


def test_a_compiled_function_takes_changing_lengths_without_recompiling_each():
    compiled = torch.compile(
        lambda x: fulmen.output_gated_attention(x, x, x, x), fullgraph=True, dynamic=True, backend="eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (5, 70, 131):
            x = torch.randn(1, length, 2, 8)
            assert torch.equal(compiled(x), fulmen.output_gated_attention(x, x, x, x))


@BACKEND
def test_autocast(backend):
    inputs = leaves(Case())
    with torch.autocast("cpu", torch.bfloat16):
        output = fulmen.output_gated_attention(**inputs, backend=backend)
    assert output.dtype == torch.bfloat16
    rounded = {name: x.bfloat16() for name, x in inputs.items()}
    assert torch.equal(output, fulmen.output_gated_attention(**rounded, backend=backend))
    output.sum().backward()
    assert inputs["q"].grad.dtype == torch.float32


@OP
def test_no_double_backward(backend):
    inputs = leaves(SMALL)
    output = fulmen.output_gated_attention(**inputs, backend=backend)
    (grad,) = torch.autograd.grad(output.sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward: the gradient of output_gated_attention"):
        grad.sum().backward()


@OP
@pytest.mark.parametrize("transposed", [False, True])
def test_results_have_the_layout_of_their_inputs(backend, transposed):
    """A gradient in another layout would be copied when it is accumulated."""
    case = Case()
    inputs = {n: x.detach().transpose(1, 2).contiguous() if transposed else x for n, x in leaves(case).items()}
    views = {n: x.transpose(1, 2) if transposed else x for n, x in inputs.items()}
    results = differentiate(case, v := {n: x.requires_grad_() for n, x in views.items()}, gated(v, backend))
    assert results["output"].stride() == views["gate"].stride()
    for name, x in views.items():
        assert results[f"d{name}"].stride() == x.stride()


def gated(inputs, backend):
    return fulmen.output_gated_attention(**inputs, backend=backend)


@OP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_each_choice_keeps(backend, dtype):
    """Bytes that autograd holds beyond the inputs: kv is float32 whatever these are."""
    case = Case(dtype=dtype)
    kv = 4 * case.batch * case.heads * case.key_size * case.value_size
    qkv = dtype.itemsize * tensors(case)["gate"].numel()
    for save, expected in zip(SAVES, (0, kv, kv + qkv), strict=True):
        inputs = leaves(case)
        addresses = {x.data_ptr() for x in inputs.values()}
        kept = {}

        def pack(x, kept=kept, addresses=addresses):
            if x.data_ptr() not in addresses:
                kept[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output = fulmen.output_gated_attention(**inputs, save=save, backend=backend)
        assert output.requires_grad
        assert sum(kept.values()) == expected, save


@OP
def test_nothing_is_kept_without_a_gradient(backend, monkeypatch):
    module = fulmen.ops.output_gate.custom_op._backend(backend)
    seen, forward = [], module.forward
    monkeypatch.setattr(module, "forward", lambda p, output, kept: (seen.append(kept), forward(p, output, kept)))
    inputs, call = leaves(SMALL), fulmen.output_gated_attention.__wrapped__  # a replay would not come by
    with torch.no_grad():
        call(**inputs, backend=backend)
    call(**{n: x.detach() for n, x in inputs.items()}, backend=backend)
    assert len(seen) == 2
    assert all(kept.kv is None and kept.qkv is None for kept in seen)
