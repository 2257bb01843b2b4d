"""What only the CPU core has: builds, threads, bits that do not depend on company, its workspace."""

from functools import partial

import pytest
import torch

import fulmen
from cases import Results, assert_close, threads_set_to
from fulmen.lab.operators.delta_rule.cases import DECAYS, Case, exact, run, tensors, yardstick
from fulmen.lab.tolerances import DELTA_RULE
from fulmen.ops.delta_rule.native import workspace_bytes
from fulmen.ops.delta_rule.problem import DeltaRule
from fulmen.runtime import core
from heads import one_by_one, with_own_queries_and_keys

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
BUILDS = core.core.builds if core.core else []
# Several segments of the backward, slices of the forward; heads share q and k, or all but one of them v.
SHARED = Case(length=300, key_size=20, value_size=70, heads=(1, 1, 2))
GROUPS = Case(batch=1, length=150, key_size=8, value_size=24, heads=(6, 3, 2))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_every_build_with_poisoned_workspace(build, decays, dtype):
    case = SHARED._replace(decays=decays, length=150, dtype=dtype)
    with core.core.using(build):
        assert core.core.isa == build
        for schedule in ("auto", "recurrent"):
            found = run(case, tensors(case), "native", schedule)
            results = Results(found, "native", partial(yardstick, case), DELTA_RULE)
            assert_close(results, exact(case), f"{build} {schedule}")


@pytest.mark.parametrize("case", [SHARED, GROUPS, SHARED._replace(packed=(100, 0, 17), decays="head")])
@pytest.mark.usefixtures("poisoned_workspace")
def test_bits_do_not_depend_on_threads(threads, case):
    found = run(case, tensors(case), "native")
    torch.set_num_threads(1)
    for name, x in run(case, tensors(case), "native").items():
        assert torch.equal(found[name], x), name
    assert_close(found, exact(case))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", DECAYS)
def test_heads_that_are_walked_together_get_the_bits_of_heads_alone(build, decays, dtype):
    """12 heads of which 6 share q and k, or 2 both; 8 with more than one panel of values; and all with their own."""
    for heads, value_size in (((2, 2, 12), 20), ((3, 2, 12), 20), ((1, 1, 8), 70)):
        case = Case(decays=decays, packed=(70, 0, 3), heads=heads, key_size=12, value_size=value_size, dtype=dtype)
        given = {n: x for n, x in tensors(case).items() if not n.startswith("grad_")}
        own = with_own_queries_and_keys(given, heads[2])
        options = {"cu_seqlens": torch.tensor([0, 70, 70, 73]), "normalize_qk": True, "return_state": True}
        call = partial(fulmen.delta_rule, **options)
        with core.core.using(build):
            alone = one_by_one(call, own, heads[2])
            for together in (call(**given), call(**own)):
                assert all(map(torch.equal, together, alone)), heads


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(
    "case",
    [
        SHARED._replace(batch=1),
        Case(packed=(0, 70, 3, 0, 40), heads=(1, 1, 2), key_size=20, value_size=7, initial=False),
        Case(batch=1, length=100, keys="parallel", betas="near two", normalizes=False),
        Case(batch=1, length=100, heads=(1, 1, 1), values="forget"),
    ],
    ids=["slices", "packed", "parallel keys", "forget"],
)
@pytest.mark.usefixtures("poisoned_workspace")
def test_segments(build, dtype, decays, case):
    """Also where a sequence has fewer chunks than there are segments."""
    case = case._replace(decays=decays, dtype=dtype)
    with core.core.using(build), threads_set_to(8):
        found = run(case, tensors(case), "native", "parallel")
    assert_close(Results(found, "native", partial(yardstick, case), DELTA_RULE), exact(case), build)


def test_one_head_is_partitioned_where_three_threads_share_a_slice_of_it():
    """64 value channels are two slices; calls that are to be deterministic are not partitioned."""
    case = Case(batch=1, length=1025, heads=(1, 1, 1), value_size=64, decays="none", initial=False)
    given = {n: x for n, x in tensors(case).items() if not n.startswith("grad_")}
    call = partial(fulmen.delta_rule, **given, normalize_qk=True, backend="native")
    whole = call(schedule="loop")
    with threads_set_to(5):
        assert torch.equal(call(), whole)
    with threads_set_to(6):
        partitioned = call()
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.equal(call(), whole)
        finally:
            torch.use_deterministic_algorithms(False)
    assert not torch.equal(partitioned, whole)
    assert_close({"output": partitioned}, {"output": exact(case)["output"]})


def test_a_packed_sequence_does_not_depend_on_its_neighbours():
    case = Case(packed=(33, 150, 40), decays="channel")
    given, found = tensors(case), run(case, tensors(case), "native")
    tokens, alone = slice(33, 183), Case(batch=1, length=150)
    part = {n: x[1:2] if n in ("initial_state", "grad_state") else x[:, tokens] for n, x in given.items()}
    for name, x in run(alone, part, "native").items():
        whole = found[name]
        assert torch.equal(x, whole[1:2] if name in ("state", "dinitial_state") else whole[:, tokens]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", ["token", "channel"])
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_a_token_of_nans_reaches_its_own_head_and_chunk_alone(of, decays, dtype):
    given = {name: x.clone() for name, x in tensors(Case(length=64, decays=decays, dtype=dtype)).items()}
    given[of][0, 40, 1] = torch.nan
    call = [given[name] for name in ("q", "k", "v", "beta")]
    output = fulmen.delta_rule(*call, log_decay=given["log_decay"], normalize_qk=True, backend="native")
    lost = output.isnan().any(-1)
    assert lost[0, 40:, 1].any()
    lost[0, 32:, 1] = False
    assert not lost.any()


def test_a_log_decay_above_zero_is_noticed(monkeypatch):
    warned = []
    monkeypatch.setattr(core, "warn_once", warned.append)
    x = tensors(Case(length=3))
    call = [x[name] for name in ("q", "k", "v", "beta")]
    fulmen.delta_rule(*call, log_decay=x["log_decay"], backend="native")
    assert not warned
    fulmen.delta_rule(*call, log_decay=-x["log_decay"], backend="native")
    token, state = [y[:, 0] for y in call], x["initial_state"].clone()
    fulmen.delta_rule_step(*token, state, log_decay=-x["log_decay"][:, 0], backend="native")
    assert len(warned) == 2


def test_workspace():
    """Of a forward it does not depend on the tokens; of a backward it grows as their square root."""

    def per_thread(length, backward, heads=(32, 32, 32)):
        q, k, v = (torch.empty(1, 1, 1, 128).expand(1, length, h, 128) for h in heads)
        beta = torch.empty(1).expand(1, length, 32)
        p = DeltaRule(q, k, v, beta, beta, True, 1.0, None, None, "auto")
        return workspace_bytes(p, backward) / torch.get_num_threads()

    assert per_thread(131072, False) == per_thread(2048, False) < 1 << 20
    assert per_thread(32768, True) < 5 << 20
    assert per_thread(131072, True) < 10 << 20
    assert per_thread(32768, True, (16, 16, 32)) < 8 << 20
