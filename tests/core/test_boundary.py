"""What passes between Python and the core: structs, memory, what a call reports."""

import subprocess
import sys
import threading
import warnings

import pytest
import torch

import fulmen
from fulmen.ops.linear_attention import native
from fulmen.ops.linear_attention.problem import Attention, Step
from fulmen.runtime import core
from fulmen.runtime.core_structs import CODES
from fulmen.runtime.warning import warn_once

pytestmark = pytest.mark.skipif(core.core is None, reason=core.why_unavailable)


def attention(*, batch=1, length=32, heads=2, size=16, log_decay=None, **given):
    q = torch.randn(batch, length, heads, size)
    given = {"log_decay_v": None, "initial_state": None, "cu_seqlens": None, "schedule": "auto"} | given
    names = ("initial_state", "cu_seqlens", "schedule")
    p = Attention(q, q, q, log_decay, given["log_decay_v"], 1.0, *(given[name] for name in names))
    return p, torch.empty_like(q)


@pytest.fixture
def given_header(monkeypatch):
    """Sets words of the header that calls are made with."""

    def change(**words):
        header = core.HEADER
        names = list(header.fields)
        original = core.header

        def changed(call):
            given = dict(zip(names, original(call), strict=True)) | words
            return header.words(**given)

        monkeypatch.setattr(core, "header", changed)

    return change


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"version": CODES["VERSION"] - 1}, "another version"),
        ({"bytes": 8}, "another size"),
        ({"threads": 0}, "threads is below 1"),
    ],
)
def test_another_struct_is_refused_and_nothing_is_written(given_header, words, reason):
    p, output = attention()
    output.fill_(7)
    state = torch.full((1, 2, 16, 16), 7.0)
    given_header(**words)
    with pytest.raises(RuntimeError, match=reason):
        native.forward(p, output, state)
    with pytest.raises(RuntimeError, match=reason):
        native.step(Step(*(x[:, 0] for x in p[:3]), state, None, None, 1.0), output[:, 0])
    assert (output == 7).all()
    assert (state == 7).all()


def test_a_call_without_memory_for_its_workspace_raises_and_writes_nothing(given_header):
    p, output = attention()
    output.fill_(7)
    given_header(workspace=0, workspace_bytes=0, allocate=0)
    with pytest.raises(RuntimeError, match="no memory"):
        native.forward(p, output, None)
    assert (output == 7).all()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_of_the_allocation_reaches_the_caller(monkeypatch, error):
    p, output = attention()
    expected = output.clone()
    native.forward(p, expected, None)

    def fails(*size, **options):
        raise error("no more")

    with monkeypatch.context() as patch:
        patch.setattr(core._Memory, "KEPT_BYTES", 0)
        patch.setattr(torch, "empty", fails)
        with pytest.raises(error, match="no more"):
            native.forward(p, output, None)
    native.forward(p, output, None)
    assert torch.equal(output, expected)


def test_small_calls_allocate_nothing_and_others_what_they_need(monkeypatch):
    allocated = []
    empty = torch.empty

    def watched(*size, **options):
        allocated.append(size[0])
        return empty(*size, **options)

    small, output = attention(size=64, length=16, heads=4)
    large, large_output = attention(size=512, length=64)
    native.forward(small, output, None)  # the thread's first call makes its memory
    monkeypatch.setattr(torch, "empty", watched)
    native.forward(small, output, None)
    assert allocated == []
    native.forward(large, large_output, None)
    assert allocated == [native.workspace_bytes(large) + core._Memory.ALIGNMENT]
    assert core._memory.allocated == []


def test_threads_have_memory_of_their_own():
    p, _ = attention(size=64, length=64, heads=4)
    expected = torch.empty_like(p.q)
    native.forward(p, expected, None)
    wrong = []

    def work():
        for _ in range(20):
            output = torch.empty_like(p.q)
            native.forward(p, output, None)
            if not torch.equal(output, expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


GROWING = {
    "head": torch.tensor([-0.5, 0.1]),
    "token": torch.full((1, 32, 2), -0.1).index_fill_(1, torch.tensor([30]), 1e-3),
    "channel": torch.full((1, 32, 2, 16), -0.1).index_fill_(1, torch.tensor([17]), 0.9),
}
QUIET = {
    "0 and -inf": torch.tensor([0.0, -torch.inf]),
    "negative 0": torch.tensor([-0.0, -1e-30]),
    "NaN": torch.full((1, 32, 2), torch.nan),
    "channels": torch.zeros(1, 32, 2, 16),
}


def warnings_of(call):
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            call()
    return [w for w in caught if "log_decay" in str(w.message)]


@pytest.mark.parametrize("schedule", ["loop", "parallel", "recurrent"])
@pytest.mark.parametrize("form", GROWING)
def test_a_positive_log_decay_is_said_once(form, schedule):
    p, output = attention(log_decay=GROWING[form], schedule=schedule)
    caught = warnings_of(lambda: native.forward(p, output, None))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "natural logarithm" in str(caught[0].message)


@pytest.mark.parametrize("schedule", ["loop", "parallel", "recurrent"])
@pytest.mark.parametrize("form", QUIET)
def test_log_decays_of_0_minus_infinity_and_nan_say_nothing(form, schedule):
    p, output = attention(log_decay=QUIET[form], schedule=schedule)
    assert not warnings_of(lambda: native.forward(p, output, None))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 1100])
def test_a_positive_log_decay_of_the_last_token_and_channel_is_noticed(length):
    log_decay_v = torch.zeros(1, length, 2, 16)
    log_decay_v[0, -1, -1, -1] = 1e-6
    p, output = attention(length=length, log_decay_v=log_decay_v)
    assert len(warnings_of(lambda: native.forward(p, output, None))) == 1


@pytest.mark.parametrize("schedule", ["loop", "parallel"])
def test_chunk_states_and_the_step_notice_too(schedule):
    k, decay = torch.randn(1, 40, 2, 16), torch.tensor([0.0, 0.2])
    states = native.States(k, k, decay, None, None, 12, schedule)
    result = torch.empty(states.states_shape)
    assert len(warnings_of(lambda: native.states_forward(states, result))) == 1
    step = Step(k[:, 0], k[:, 0], k[:, 0], torch.zeros(1, 2, 16, 16), decay, None, 1.0)
    assert len(warnings_of(lambda: native.step(step, torch.empty(1, 2, 16)))) == 1


@pytest.mark.parametrize("way", ["long", "replayed"])
def test_a_state_counts_as_changed_where_the_warning_is_an_error(way):
    """It has been written by then, and autograd must know."""
    q, state = torch.rand(1, 2, 16), torch.zeros(1, 2, 16, 16)
    step = fulmen.linear_attention_step if way == "replayed" else fulmen.linear_attention_step.__wrapped__
    step(q, q.clone(), q.clone(), state, log_decay=torch.tensor([-0.1, -0.1]))
    warn_once.cache_clear()
    before, version = state.clone(), state._version
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="natural logarithm"):
            step(q, q.clone(), q.clone(), state, log_decay=torch.tensor([0.1, 0.1]))
    assert not torch.equal(state, before)
    assert state._version > version


def test_the_interpreter_waits_for_calls_of_daemon_threads():
    """And once it has, none begins: what a call reads and writes would be freed under it."""
    code = """
import atexit, threading, time

@atexit.register  # before fulmen is imported, and so called after what it registers
def report():
    time.sleep(0.2)
    print(calls, flush=True)

import torch, fulmen
from fulmen.runtime import core
calls, begun, status = 0, threading.Event(), core.core._status

def slow(*args):
    global calls
    calls += 1
    begun.set()
    time.sleep(0.1)
    result = status(*args)
    calls -= 1
    return result

def loop():
    while True:
        fulmen.linear_attention(q, q, q, backend="native")

core.core._status = slow
q = torch.rand(1, 4, 1, 8)
threading.Thread(target=loop, daemon=True).start()
begun.wait()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0"


def test_a_compiled_call_warns_too():
    """And does not break the graph."""
    warn_once.cache_clear()
    q = torch.randn(1, 16, 2, 16)
    compiled = torch.compile(
        lambda q, a: fulmen.linear_attention(q, q, q, log_decay=a), fullgraph=True, backend="eager"
    )
    with pytest.warns(UserWarning, match="natural logarithm"):
        compiled(q, torch.tensor([0.5, 0.5]))
