"""The custom op: opcheck, torch.compile, torch.export, autocast, no gradient."""

import pytest
import torch

import fulmen
from cases import BACKENDS
from fulmen.ops.tpa.problem import decode_of
from fulmen.ops.tpa.reference import naive
from fulmen.ops.tpa.torch_factorised import factorised
from tpa_cases import Case, assert_exact, exact, factors, options, run

pytestmark = pytest.mark.one_build

BACKEND = pytest.mark.parametrize("backend", BACKENDS)
RAGGED = Case(tokens=9, key_size=4, value_size=3, key_rank=2, lengths=(9, 4))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@BACKEND
@pytest.mark.parametrize("case", [RAGGED, RAGGED.of(key_rank=None, lengths=None)])
def test_opcheck(backend, case):
    args = (*factors(case).values(), case.scale, options(case)["seqlens"], "auto", backend)
    torch.library.opcheck(torch.ops.fulmen.tpa_decode.default, args)


@BACKEND
@pytest.mark.parametrize("case", [RAGGED, RAGGED.of(key_rank=None, lengths=None)])
def test_compiled_without_graph_breaks(backend, case):
    compiled = torch.compile(fulmen.tpa_decode, fullgraph=True, backend="aot_eager")
    output = compiled(**factors(case), **options(case), backend=backend)
    assert torch.equal(output, run(case, backend=backend))


def test_compiled_by_inductor_with_operations_around():
    case = Case(lengths=(70, 3))

    @torch.compile(fullgraph=True)
    def call(aq, **rest):
        return fulmen.tpa_decode(aq * 2, **rest).relu()

    given = factors(case) | options(case)
    aq = given.pop("aq")
    assert torch.equal(call(aq, **given), fulmen.tpa_decode(aq * 2, **given).relu())


def test_growing_lengths_compile_once():
    compiled = torch.compile(fulmen.tpa_decode, fullgraph=True, dynamic=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 70, 131):
            given = factors(Case(tokens=tokens))
            assert torch.equal(compiled(**given), fulmen.tpa_decode(**given))


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, aq, ak, av, bq, bk, bv):
            return fulmen.tpa_decode(aq, ak, av, bq, bk, bv)

    tokens = torch.export.Dim("tokens", max=4096)
    shapes = {name: {1: tokens} if name[1] in "kv" else None for name in factors(Case())}
    program = torch.export.export(Layer(), tuple(factors(Case()).values()), dynamic_shapes=shapes)
    longer = factors(Case(tokens=131)).values()
    assert torch.equal(program.module()(*longer), Layer()(*longer))


@pytest.mark.parametrize(
    ("form", "case"), [(factorised, Case(key_rank=2, value_rank=2, lengths=(70, 3))), (naive, Case())]
)
def test_the_torch_forms_compile_as_they_are(form, case):
    p = decode_of(**factors(case), **options(case))
    assert_exact(torch.compile(form, fullgraph=True)(p), case)


@BACKEND
def test_autocast_casts_the_factors(backend):
    case = Case(lengths=(70, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run(case, backend=backend)
    rounded = {name: x.bfloat16() for name, x in factors(case).items()}
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, fulmen.tpa_decode(**rounded, **options(case), backend=backend))


@BACKEND
def test_a_gradient_is_refused_unless_it_is_off(backend):
    given = factors(Case())
    given = given | {"bv": given["bv"].clone().requires_grad_()}
    with pytest.raises(ValueError, match="bv must not require grad: tpa_decode has no gradient"):
        fulmen.tpa_decode(**given, backend=backend)
    with torch.no_grad():
        assert not fulmen.tpa_decode(**given, backend=backend).requires_grad
    with torch.inference_mode():
        assert fulmen.tpa_decode(**given, backend=backend).shape == exact(Case()).shape
