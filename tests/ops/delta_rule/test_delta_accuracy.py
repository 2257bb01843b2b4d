"""Every backend against the float64 recurrence: output, final state and all gradients."""

from functools import partial

import pytest
import torch

import fulmen
from cases import BACKENDS, Results, assert_close
from fulmen.lab.fuzz import Problem, Setting, wrong
from fulmen.lab.operators.delta_rule.cases import DECAYS, Case, exact, options, run, tensors, yardstick
from fulmen.lab.tolerances import DELTA_RULE, TOLERANCE, relative_error
from fulmen.lab.yardstick import rounded_products
from fulmen.ops.chunks.decay_form import tokens_of
from fulmen.ops.chunks.validation import SCHEDULES
from fulmen.ops.delta_rule.custom_op import OPERATOR

BACKEND = pytest.mark.parametrize("backend", [name for name in BACKENDS if name in OPERATOR.backends])


def check(case, backend, schedule="auto", without=()):
    results = run(case, tensors(case), backend, schedule, without)
    assert_close(Results(results, backend, partial(yardstick, case, without), DELTA_RULE), exact(case, without))


@BACKEND
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(
    "case",
    [
        Case(length=1),
        Case(length=64, normalizes=False),
        Case(length=130, key_size=7, value_size=33, heads=(1, 2, 4), initial=False),
        Case(length=40, key_size=60, value_size=5, heads=(4, 2, 1), scale=0.7),
        Case(packed=(0, 37, 0, 1, 16, 0), heads=(1, 1, 2)),
        Case(length=0, key_size=7, value_size=5),
        Case(batch=0),
    ],
    ids=["one token", "64", "shared values", "shared keys", "packed", "no tokens", "no samples"],
)
def test_calls(backend, case, decays):
    check(case._replace(decays=decays), backend)


@BACKEND
@pytest.mark.parametrize("decays", ["head", "token", "channel"])
@pytest.mark.parametrize("values", ["strong", "far", "forget"])
def test_extreme_decays(backend, decays, values):
    check(Case(decays=decays, values=values), backend)


@BACKEND
@pytest.mark.parametrize("decays", ["none", "channel"])
@pytest.mark.parametrize(
    "case",
    [Case(keys="parallel", betas="near two", normalizes=False), Case(keys="repeated"), Case(betas="zero")],
    ids=["parallel", "repeated", "beta 0"],
)
def test_keys_and_betas_that_are_hard_on_the_numbers(backend, decays, case):
    """Among 64 keys with cosines of 0.9999, a product form of the inverse has lost all digits."""
    check(case._replace(decays=decays, length=100), backend)


@pytest.mark.parametrize("decays", ["head", "token"])
@pytest.mark.parametrize("seed", range(2))
def test_the_torch_backend_keeps_the_digits_of_reflections_that_repeat(decays, seed):
    """Three keys in turns with β near 2 and no decay: a chunk's inverse magnifies what is off in its overlaps."""
    case = Case(batch=1, length=128, heads=(1, 1, 1), key_size=2, value_size=2, decays=decays, values="zero", seed=seed)
    check(case._replace(keys="repeated", betas="near two", normalizes=False), "torch")


def test_the_torch_backend_keeps_the_digits_of_what_little_is_left_of_a_gradient():
    """Tokens that correct both channels of a state leave little of its gradient."""
    case = Case(batch=1, length=128, heads=(1, 1, 1), key_size=2, value_size=2, decays="channel", values="zero", seed=1)
    check(case._replace(keys="repeated"), "torch")


def test_the_torch_backend_keeps_the_digits_of_a_decay_of_one_channel():
    """What it gets by way of q and of k, from the pairs of a chunk, cancels."""
    case = Case(batch=1, length=131, heads=(1, 1, 1), key_size=1, value_size=100, decays="channel", values="zero")
    case = case._replace(betas="near two", normalizes=False, scale=1.0, seed=478)
    assert wrong(Problem("delta_rule", case, equal="tokens", without="state"), Setting("torch")) == []


@pytest.mark.one_build
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(length=33, value_size=1, decays="head", values="far", seed=2), {}),
        (Case(length=16, value_size=31, decays="none", seed=1), {"equal": "tokens", "without": "output"}),
    ],
    ids=["no decay", "equal tokens"],
)
def test_the_native_backend_keeps_the_digits_of_reflections(case, options):
    """With β near 2 a chunk writes differences of larger numbers. Where products are not fused with their sums, an
    inverse that multiplies lost too many of their digits."""
    case = case._replace(batch=1, heads=(2, 6, 1), key_size=1, betas="near two")
    assert wrong(Problem("delta_rule", case, **options), Setting("native", isa="baseline")) == []


def test_the_native_backend_keeps_the_digits_of_a_decay_of_one_channel():
    """The pairs of a chunk are a hundred times as large as their sum."""
    case = Case(length=6, heads=(1, 1, 1), key_size=1, value_size=17, decays="token", values="tiny", scale=1.0, seed=61)
    problem = Problem("delta_rule", case._replace(keys="parallel"), other_dtype=torch.bfloat16)
    assert wrong(problem, Setting("native")) == []


@pytest.mark.parametrize("keys", ["parallel", "repeated"])
def test_the_torch_backend_keeps_the_digits_of_float64(keys):
    """There is no wider type for the inverse."""
    case = Case(batch=1, length=200, heads=(1, 1, 1), key_size=2, value_size=2, keys=keys, betas="near two")
    check(case._replace(decays="none", normalizes=False, dtype=torch.float64), "torch")


@BACKEND
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decays", ["token", "channel"])
def test_dtypes(backend, decays, dtype):
    check(Case(decays=decays, dtype=dtype, heads=(1, 1, 2)), backend)


@BACKEND
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(
    "case",
    [
        Case(length=200, key_size=32, value_size=32),
        Case(length=130, key_size=20, value_size=33, heads=(1, 2, 4), normalizes=False, scale=0.3, initial=False),
        Case(packed=(0, 37, 0, 1, 16, 0), values="far"),
        Case(length=100, keys="parallel", betas="near two", normalizes=False),
    ],
)
def test_bfloat16(backend, decays, case):
    check(case._replace(decays=decays, dtype=torch.bfloat16), backend)


@BACKEND
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(backend, schedule):
    for decays in ("head", "channel"):
        check(Case(decays=decays, length=70), backend, schedule)


@BACKEND
@pytest.mark.parametrize("without", ["output", "state"])
def test_gradients_of_one_result_alone(backend, without):
    check(Case(decays="channel"), backend, without=(without,))


@BACKEND
def test_beta_and_decay_of_other_dtypes(backend):
    case = Case(decays="channel", dtype=torch.bfloat16)
    given = tensors(case)
    for dtype in (torch.float64, torch.float16):
        x = given | {"beta": given["beta"].to(dtype), "log_decay": given["log_decay"].to(dtype)}
        got = run(case, x, backend)
        want = run(case, {name: y.double() for name, y in x.items()}, "reference")
        assert got["dbeta"].dtype == got["dlog_decay"].dtype == dtype
        of_factors = partial(rounded_products()(run), case, x, "torch")
        of_bfloat16 = {name: got[name] for name in ("output", "dbeta")}
        assert_close(Results(of_bfloat16, backend, of_factors, DELTA_RULE), {name: want[name] for name in of_bfloat16})
        # The arithmetic is float32 even where beta and the decay are not. Triton's has two terms of a bfloat16 factor.
        for name in ("dlog_decay",) if backend == "triton" else ("dbeta", "dlog_decay"):
            assert relative_error(got[name], want[name]) <= max(TOLERANCE[got[name].dtype], TOLERANCE[torch.float32])


@BACKEND
def test_views(backend):
    """Strides as they are given: heads before tokens, channels that are not dense, a transposed state."""
    case = Case(decays="channel")
    given = tensors(case)
    views = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in given.items() if x.ndim == 4}
    views["v"] = given["v"].repeat_interleave(2, -1)[..., ::2]
    views["beta"] = given["beta"].repeat_interleave(3, -1)[..., ::3]
    views["initial_state"] = given["initial_state"].mT.contiguous().mT
    views["grad_output"] = given["grad_output"][:, :1, :1, :1].expand_as(given["grad_output"])
    exact_inputs = {name: x.double().contiguous() for name, x in (given | views).items()}
    assert_close(run(case, given | views, backend), run(case, exact_inputs, "reference"))


@BACKEND
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("case", [Case(heads=(1, 2, 4)), Case(key_size=19, value_size=35, normalizes=False)])
def test_steps_equal_the_whole(backend, decays, case):
    case = case._replace(decays=decays, length=4)
    given, arguments = tensors(case), options(case)
    del arguments["cu_seqlens"]
    rows, columns = given["initial_state"].clone(), given["initial_state"].mT.contiguous().mT
    for t in range(case.length):
        token = {n: tokens_of(given[n], t) for n in ("q", "k", "v", "beta", "log_decay") if n in given}
        output = fulmen.delta_rule_step(**token, state=rows, **arguments, backend=backend)
        transposed = fulmen.delta_rule_step(**token, state=columns, **arguments, backend=backend)
        for found in (output, transposed):
            assert relative_error(found, exact(case)["output"][:, t]) <= TOLERANCE[torch.float32]
    for state in (rows, columns):
        assert relative_error(state, exact(case)["state"]) <= TOLERANCE[torch.float32]


@BACKEND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_of_16_bits_is_rounded_once(backend, dtype):
    given = tensors(Case(length=1))
    token = {name: given[name][:, 0] for name in ("q", "k", "v", "beta", "log_decay")}
    narrow = given["initial_state"].to(dtype)
    wide = narrow.float()
    outputs = [fulmen.delta_rule_step(**token, state=state, backend=backend) for state in (narrow, wide)]
    assert torch.equal(*outputs)
    assert torch.equal(narrow, wide.to(dtype))


def test_the_gradient_of_the_reference_is_that_of_its_recurrence():
    """Which autograd differentiates, here without the reference's own backward."""
    from fulmen.ops.delta_rule.problem import DeltaRule
    from fulmen.ops.delta_rule.reference import operands, read_out, states_of

    for decays in DECAYS:
        case = Case(decays=decays, length=20, heads=(1, 2, 4), dtype=torch.float64)
        leaves = {n: x.clone().requires_grad_() for n, x in tensors(case).items() if not n.startswith("grad")}
        q, k, v, beta, initial = (leaves[name] for name in ("q", "k", "v", "beta", "initial_state"))
        x = operands(DeltaRule(q, k, v, beta, leaves.get("log_decay"), True, 0.25, initial, None, "auto"))
        states = states_of(x, initial)
        results = read_out(x.q, states, 0.25), states[-1]
        cotangents = tensors(case)["grad_output"], tensors(case)["grad_state"]
        expected = torch.autograd.grad(results, list(leaves.values()), cotangents)
        found = exact(case._replace(scale=0.25))
        for name, want in zip(leaves, expected, strict=True):
            assert relative_error(found[f"d{name}"], want) <= TOLERANCE[torch.float64], name


def test_the_reference_computes_in_the_dtype_of_the_state_and_rounds_once():
    """Results of bfloat16 are those of float32, rounded; a beta of float64 does not widen what it meets."""
    case = Case(decays="channel", length=9, heads=(1, 2, 4), dtype=torch.bfloat16, scale=0.3)
    given = tensors(case)
    single = {name: x.float() for name, x in given.items()}
    expected = run(case, single, "reference")
    for inputs in (given, single | {"beta": single["beta"].double()}):
        for name, x in run(case, inputs, "reference").items():
            assert torch.equal(x, expected[name].to(x.dtype)), name
