"""Threads, forks and the end of the interpreter: no hang, no crash, the same results. Each in a process of its own,
which a hang or a crash ends."""

import subprocess
import sys

import pytest

from fulmen.runtime import core

pytestmark = [
    pytest.mark.skipif(core.core is None, reason=core.why_unavailable),
    pytest.mark.skipif(sys.platform == "win32", reason="forks"),
    pytest.mark.not_interpreted,
]

# Every operator on shared inputs, forward and, where there is one, backward; steps have a state of their own.
CALLS = """
import sys, threading, torch, fulmen

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 150, 4, 24).unbind()
decay, beta = -torch.rand(2, 150, 4), torch.rand(2, 150, 4)
state, weight = torch.randn(2, 4, 24, 24), torch.randn(24, 4)
factors = torch.randn(2, 1, 4, 3), torch.randn(2, 150, 4), torch.randn(2, 150, 4)
factors += torch.randn(2, 1, 3, 24), torch.randn(2, 150, 24), torch.randn(2, 150, 24)

def differentiated(operator, *inputs, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = operator(*leaves, backend="native", **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]

def stepped(operator, *inputs, **options):
    own = state.clone()
    return [operator(*(x[:, 0] for x in inputs), own, backend="native", **options), own]

CALLS = [
    lambda: differentiated(fulmen.linear_attention, q, k, v, log_decay=decay),
    lambda: differentiated(fulmen.chunk_states, k, v, log_decay=decay, chunk_size=32),
    lambda: differentiated(fulmen.delta_rule, q, k, v, beta, log_decay=decay, normalize_qk=True),
    lambda: differentiated(fulmen.causal_conv1d, q[:, :, 0], weight, activation="silu"),
    lambda: differentiated(fulmen.output_gated_attention, q, k, v, v),
    lambda: stepped(fulmen.linear_attention_step, q, k, v),
    lambda: stepped(fulmen.delta_rule_step, q, k, v, beta),
    lambda: [fulmen.tpa_decode(*factors, backend="native")],
]

def results():
    return [x for call in CALLS for x in call()]

def same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
"""


def run(code, seconds=120):
    done = subprocess.run([sys.executable, "-c", CALLS + code], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done


def test_many_threads_on_shared_inputs():
    """Each thread has a number of OpenMP threads of its own, and changes it; heads are many enough to give one to each,
    so that results are the same bits."""
    run("""
torch.set_num_threads(1)
expected, failures = results(), []

def work(i):
    try:
        for turn in range(2):
            torch.set_num_threads(1 + (i + turn) % 3)
            if not same(results(), expected):
                failures.append(f"thread {i}, turn {turn}")
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
""")


def test_data_loaders_fork_after_use():
    run("""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        torch.set_num_threads(2)
        return torch.stack([x.double().sum() for x in results()])

torch.set_num_threads(2)
expected = Data()[0]
loader = torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=1, multiprocessing_context="fork", timeout=60)
for epoch in range(2):
    for found in loader:
        assert torch.equal(found[0], expected)
    assert torch.equal(Data()[0], expected)  # and the parent goes on with its threads
""")


def test_the_interpreter_ends_while_a_thread_runs():
    """A thread that it waits for. One that it does not wait for, Python ends wherever it is, which torch's
    own C++ does not survive."""
    run("""
torch.set_num_threads(2)
running = threading.Event()

def work():
    for turn in range(3):
        results()
        running.set()

threading.Thread(target=work).start()
running.wait(60)
""")
