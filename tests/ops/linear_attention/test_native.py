"""What only the CPU core has: ISA builds, threads, workspace, forks."""

import multiprocessing
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch

import fulmen
from cases import (
    ALL_DECAYS,
    DECAYS,
    Case,
    Results,
    assert_close,
    differentiate,
    exact,
    inputs,
    run,
    tensors,
    threads_set_to,
)
from fulmen.lab.fuzz import Problem, Setting, wrong
from fulmen.lab.operators.linear_attention.cases import yardstick
from fulmen.lab.tolerances import TOLERANCE, TOLERANCE_PER_HEAD
from fulmen.ops.linear_attention.native import workspace_bytes
from fulmen.ops.linear_attention.problem import Attention
from fulmen.runtime import core
from fulmen.runtime.core_structs import CODES
from heads import one_by_one, with_own_queries_and_keys

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)
BUILDS = core.core.builds if core.core else []


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("decays", ALL_DECAYS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_every_build_with_poisoned_workspace(build, decays):
    case = Case(decays=decays, length=130, key_size=60, value_size=33, heads=(1, 2, 2), scale=0.5)
    with core.core.using(build):
        assert core.core.isa == build
        for schedule in ("auto", "recurrent", "parallel"):
            assert_close(run(case, backend="native", schedule=schedule), exact(case), f"{build} {schedule}")


def check_without_decay_gradients(case):
    leaves = {name: x.detach() if "decay" in name else x for name, x in inputs(case).items()}
    cu_seqlens = None if case.bounds is None else torch.tensor(case.bounds)
    output, state = fulmen.linear_attention(
        **leaves, scale=case.scale, cu_seqlens=cu_seqlens, return_state=True, backend="native"
    )
    learned = {name: x for name, x in leaves.items() if x.requires_grad}
    results = Results(differentiate(case, learned, output, state), "native", partial(yardstick, case))
    assert_close(results, {name: exact(case)[name] for name in results})


BFLOAT16 = Case(length=130, key_size=60, value_size=33, scale=0.3, dtype=torch.bfloat16)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "case",
    [
        BFLOAT16,
        BFLOAT16.of(heads=(4, 2, 1), scale=1.0),
        BFLOAT16.of(packed=(0, 33, 150, 1), initial=False),
        BFLOAT16.of(length=20, key_size=5, value_size=1),
        BFLOAT16.of(values="forget"),
    ],
    ids=["ragged", "shared heads", "packed", "small", "forget"],
)
@pytest.mark.parametrize("decays", ["none", "head", "token", "channel"])
@pytest.mark.usefixtures("poisoned_workspace")
def test_bfloat16_where_no_decay_is_learned(build, case, decays):
    """There a backward may multiply in pairs, as a forward always may."""
    with core.core.using(build):
        check_without_decay_gradients(case.of(decays=decays))


@pytest.mark.parametrize("build", BUILDS)
def test_a_gradient_that_is_absent_counts_as_zeros_whatever_its_dtype(build, monkeypatch):
    """The core reads no dtype of a tensor that is not there."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 40, 2, 20).bfloat16().requires_grad_() for _ in range(3)]
    with core.core.using(build):
        _, state = fulmen.linear_attention(*leaves, return_state=True, backend="native")
        expected = torch.autograd.grad(state.sum(), leaves[1:], retain_graph=True)
        words = core.TENSOR.words(data=0, dtype=CODES["BFLOAT16"], stride_batch=0, stride_token=0, stride_head=0)
        monkeypatch.setattr(core, "NO_TENSOR", words)
        for x, y in zip(torch.autograd.grad(state.sum(), leaves[1:]), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_a_chunk_size_beyond_counting_is_refused():
    k = torch.randn(1, 2, 1, 16)
    with pytest.raises(RuntimeError, match="a size is out of range"):
        torch.ops.fulmen.chunk_states(k, k, None, None, None, 2**63 - 1, "auto", "native")


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("decays", ["head", "channel"])
def test_bfloat16_in_segments_and_slices(build, decays):
    """One head on three threads: segments of N in the first case, slices of E in the second."""
    with core.core.using(build), threads_set_to(3):
        for case in (
            BFLOAT16.of(decays=decays, batch=1, heads=(1, 1, 1), length=1100, key_size=24, value_size=40),
            BFLOAT16.of(decays=decays, batch=1, heads=(1, 1, 1), length=300, key_size=16, value_size=96),
        ):
            check_without_decay_gradients(case)


@pytest.mark.parametrize("build", BUILDS)
def test_a_state_of_one_value_channel_keeps_its_digits(build):
    """What a decay weighs are the values: rounded in pairs, so few of them were off by 2.3e-3 of the state's norm."""
    case = Case(batch=1, heads=(1, 1, 1), key_size=64, value_size=1, packed=(9, 25), dtype=torch.bfloat16, seed=2)
    assert not wrong(Problem("linear_attention", case), Setting("native", isa=build))


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_thread_counts(threads, decays):
    """Few heads (E is sliced), one head and many tokens (N is partitioned), and more heads than threads."""
    for case in (
        Case(decays=decays, batch=1, heads=(1, 1, 1), length=2100, key_size=8, value_size=8),
        Case(
            decays=decays, batch=1, heads=(1, 1, 1), length=1100, key_size=24, value_size=40, initial=False, scale=0.5
        ),
        Case(decays=decays, batch=1, heads=(1, 1, 1), length=300, key_size=16, value_size=96),
        Case(decays=decays, batch=2, heads=(2, 2, 2), length=300),
    ):
        assert_close(run(case, backend="native"), exact(case))


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_segments_of_packed_sequences(decays):
    """With more threads than heads, also where a sequence is too short for as many segments as there are."""
    with threads_set_to(8):
        case = Case(decays=decays, packed=(700, 3, 0, 400), heads=(1, 1, 1), key_size=32, value_size=32)
        assert_close(run(case, backend="native"), exact(case))


def test_segments_give_the_same_bits_every_time():
    """All but the last segment of the short sequence are empty, and start where that one starts."""
    with threads_set_to(8):
        case = Case(decays="none", packed=(1021, 3), heads=(1, 1, 1), key_size=256, value_size=256)
        first = run(case, backend="native")
        for _ in range(30):
            for name, x in run(case, backend="native").items():
                assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_shared_heads_on_any_number_of_threads(decays):
    """Groups of heads on one thread each (2 and 6 heads) and on several (12, or too few groups); the same bits."""
    before = torch.get_num_threads()
    try:
        for heads in ((12, 6, 6), (4, 6, 12), (12, 1, 1), (1, 1, 12)):
            case = Case(decays=decays, packed=(300, 0, 3, 70), heads=heads)
            torch.set_num_threads(1)
            first = run(case, backend="native")
            assert_close(first, exact(case), str(heads))
            for threads in (2, 3):
                torch.set_num_threads(threads)
                for name, x in run(case, backend="native").items():
                    assert torch.equal(x, first[name]), (heads, threads, name)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", ALL_DECAYS)
@pytest.mark.usefixtures("poisoned_workspace")
def test_heads_that_are_walked_together_get_the_bits_of_heads_alone(build, decays, dtype):
    """12 heads of which 6 share q and k, or 2 both; 8 with more than one panel of values; and all with their own."""
    for heads, value_size in (((2, 2, 12), 20), ((3, 2, 12), 20), ((1, 1, 8), 70)):
        case = Case(decays=decays, packed=(70, 0, 3), heads=heads, key_size=12, value_size=value_size, dtype=dtype)
        given = {n: x for n, x in tensors(case).items() if not n.startswith("grad_")}
        own = with_own_queries_and_keys(given, heads[2])
        call = partial(fulmen.linear_attention, cu_seqlens=torch.tensor(case.bounds), return_state=True)
        with core.core.using(build):
            alone = one_by_one(call, own, heads[2])
            for together in (call(**given), call(**own)):
                assert all(map(torch.equal, together, alone)), heads


@pytest.mark.parametrize("chunk_size", [24, 290])  # several in a segment, and one that is longer
def test_chunk_states_of_shared_heads(chunk_size):
    """The gradients are the sums of those that repeated heads get, in the order of heads; those of decays the same."""
    torch.manual_seed(0)
    k, v, decay = torch.randn(2, 300, 2, 12), torch.randn(2, 300, 6, 9), -torch.rand(6)

    def gradients(k, v):
        leaves = [x.clone().requires_grad_() for x in (k, v, decay)]
        states = fulmen.chunk_states(*leaves[:2], log_decay=leaves[2], chunk_size=chunk_size, backend="native")
        return torch.autograd.grad(states.square().sum(), leaves)

    dk, dv, ddecay = gradients(k, v)
    dk_repeated, dv_repeated, ddecay_repeated = gradients(k.repeat_interleave(3, 2), v)
    first, second, third = dk_repeated.unflatten(2, (2, 3)).unbind(3)
    assert torch.equal(dk, first + second + third)
    assert torch.equal(dv, dv_repeated)
    assert torch.equal(ddecay, ddecay_repeated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", DECAYS)
def test_bits_do_not_depend_on_threads_unless_tokens_are_partitioned(decays, dtype):
    case = Case(decays=decays, batch=1, heads=(1, 1, 1), length=2100, key_size=16, value_size=48, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(case, backend="native"))
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        for name, x in other.items():
            assert torch.equal(x, results[0][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decays", DECAYS)
def test_a_sample_does_not_depend_on_the_batch_around_it(decays, dtype):
    case = Case(decays=decays, batch=3, length=100, dtype=dtype)
    whole, given = run(case, backend="native"), tensors(case)
    alone = {n: x if x.ndim == 1 else x[1:2] for n, x in given.items() if not n.startswith("grad_")}
    output, state = fulmen.linear_attention(**alone, return_state=True, backend="native")
    assert torch.equal(output, whole["output"][1:2])
    assert torch.equal(state, whole["state"][1:2])


@pytest.mark.parametrize("shared", [2, 1])
def test_the_gradients_of_a_packed_sequence_do_not_depend_on_its_neighbours(shared):
    torch.manual_seed(0)
    bounds = [0, 2000, 2030, 6000]
    q, k, v = (torch.randn(1, bounds[-1], heads, 16) for heads in (2, shared, shared))
    decay, grad = -0.05 * torch.rand(1, bounds[-1], 2), torch.randn(1, bounds[-1], 2, 16)

    def gradients(tokens, cu_seqlens):
        leaves = [x[:, tokens].clone().requires_grad_() for x in (q, k, v, decay)]
        output = fulmen.linear_attention(*leaves[:3], log_decay=leaves[3], cu_seqlens=cu_seqlens, backend="native")
        return torch.autograd.grad(output, leaves, grad[:, tokens])

    packed = gradients(slice(None), torch.tensor(bounds))
    for start, stop in pairwise(bounds):
        for x, alone in zip(packed, gradients(slice(start, stop), None), strict=True):
            assert torch.equal(x[:, start:stop], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_constant_decay_over_many_tokens(dtype):
    """One number for 16384 tokens, from weak to strong decay; a strong one forgets before errors add up."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 16384, 4, 16).to(dtype) for _ in range(4))
    decay = torch.tensor([-3.0, -0.5, -0.05, -1e-3])

    def gradient(to, backend):
        leaf = decay.to(to).requires_grad_()
        inputs = [x if to == torch.float32 else x.to(to) for x in (q, k, v, grad)]
        output = fulmen.linear_attention(*inputs[:3], log_decay=leaf, backend=backend)
        return torch.autograd.grad(output, leaf, inputs[3])[0].double()

    want = gradient(torch.float64, "torch")
    error = (gradient(torch.float32, "native") - want).abs() / want.abs()
    assert error.max() <= TOLERANCE_PER_HEAD
    assert error[0] <= TOLERANCE[torch.float32] / 10


def test_two_python_threads_at_once():
    cases = [Case(decays=decays, length=300, key_size=32, value_size=32) for decays in ("token", "channel")]
    expected = [run(case, backend="native") for case in cases]
    failures = []

    def work(i):
        for _ in range(10):
            results = run(cases[i], backend="native")
            if not all(torch.equal(x, expected[i][name]) for name, x in results.items()):
                failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def _in_child(case, queue):
    torch.set_num_threads(2)
    queue.put({name: x.tolist() for name, x in run(case, backend="native").items()})


def test_a_forked_child_works_alone():
    """OpenMP's threads do not survive a fork; a child that wants two would wait for them for ever."""
    case = Case(decays="token", length=200)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = run(case, backend="native")  # the parent's threads are running now
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(case, queue))
        child.start()
        results = queue.get(timeout=60)
        child.join(timeout=60)
    finally:
        torch.set_num_threads(before)
    assert child.exitcode == 0
    for name, x in expected.items():
        assert torch.equal(torch.tensor(results[name]).to(x.dtype), x), name


def workspace_per_thread(length, backward, heads=(16, 16, 16), batch=1, packed=None):
    q, k, v, each = (torch.empty(128).expand(batch, length, h, 128) for h in (*heads, max(heads)))
    cu_seqlens = None if packed is None else torch.arange(packed + 1) * (length // packed)
    p = Attention(q, k, v, each, each, 1.0, None, cu_seqlens, "auto")
    return workspace_bytes(p, backward) / torch.get_num_threads()


@pytest.mark.one_build
def test_workspace_does_not_grow_with_the_sequence():
    assert workspace_per_thread(131072, False) == workspace_per_thread(8192, False) < 2 << 20
    assert workspace_per_thread(32768, True) < 16 << 20


@pytest.mark.one_build
@pytest.mark.parametrize("heads", [(16, 16, 16), (16, 4, 4), (16, 1, 1), (1, 1, 16), (4, 6, 12)])
def test_workspace_does_not_grow_with_the_number_of_sequences(threads, heads):
    """Heads that share inputs are in memory together, but not those of all sequences."""
    for sequences in ({"length": 32768}, {"length": 32768, "packed": 1024}, {"length": 512, "batch": 64}):
        assert workspace_per_thread(backward=True, heads=heads, **sequences) < 18 << 20, sequences


@pytest.mark.one_build
@pytest.mark.parametrize("named", [*BUILDS, "avx9000"])
def test_fulmen_isa_chooses_the_build(named, tmp_path, monkeypatch):
    """Which a library reads when it is loaded: here a copy of the one that is loaded already."""
    monkeypatch.setenv("FULMEN_CORE", str(shutil.copy(core.core.library._name, tmp_path / "another.so")))
    monkeypatch.setenv("FULMEN_ISA", named)
    with nullcontext() if named in BUILDS else pytest.warns(UserWarning, match="FULMEN_ISA=avx9000 is not among"):
        chosen = core._load().isa
    assert chosen == (named if named in BUILDS else BUILDS[0])


@pytest.fixture(scope="module")
def new_process():
    """Which OpenMP libraries a process has loaded after a call; and which backends it chooses, with which warnings and
    for which reason, where it finds no core."""
    code = """
import sys, warnings, torch, fulmen
q = torch.randn(2, 64, 4, 16)
fulmen.linear_attention(q, q, q, backend="native")
print(*{line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line})
import fulmen.runtime.core
fulmen.runtime.core.core, fulmen.runtime.core.why_unavailable = None, "no C++ compiler was found"
del sys.modules["fulmen.runtime.backends"]
import fulmen.runtime.backends as backends
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    names = [backends.choose("auto", torch.device("cpu"), torch.float32) for _ in range(2)]
print(names, [str(w.message) for w in caught], backends.backends()["native"].reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.one_build
def test_one_openmp_for_torch_and_the_core(new_process):
    """Two copies would have two pools of threads, and torch.set_num_threads would count for one of them."""
    assert len(new_process[0].split()) == (1 if core.core.openmp else 0)


@pytest.mark.one_build
def test_without_a_core_the_torch_backend_serves_and_says_so(new_process):
    """As after an install without a compiler: everything works, and one warning says why it is slower."""
    assert new_process[1] == (
        "['torch', 'torch'] ['the torch backend serves cpu tensors, several times slower: "
        "no C++ compiler was found'] no C++ compiler was found"
    )
