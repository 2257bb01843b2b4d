import platform
import subprocess
import sys
import time

import pytest
import torch

from fulmen.lab.bench.measure import in_turns, interleaved, peak_bytes


def test_calls_take_turns():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    interleaved(calls, seconds=0.0, repeats=3)
    assert order == ["a", "b"] * 4  # one warm-up round, three measured


@pytest.mark.usefixtures("clock")
def test_the_median_is_the_time_of_a_call():
    timing = interleaved({"sleep": lambda: time.sleep(0.01)}, seconds=0.0, repeats=5)["sleep"]
    assert timing == pytest.approx((0.01,) * 3, rel=1e-3)


def test_a_call_is_timed_until_it_returns():
    timing = interleaved({"sleep": lambda: time.sleep(0.01)}, seconds=0.0)["sleep"]
    assert 0.01 <= timing.p20 <= timing.median <= timing.p80


@pytest.mark.parametrize(
    ("times", "median", "p20", "p80"),
    [([3.0], 3.0, 3.0, 3.0), ([4.0, 1.0], 1.0, 1.0, 4.0), ([4.0, 1.0, 2.0], 2.0, 1.0, 4.0), (range(10), 4, 2, 7)],
)
def test_every_figure_is_the_time_of_a_call(times, median, p20, p80):
    taken = iter(times)
    timing = in_turns({"a": lambda: None}, seconds=0.0, repeats=len(times), clock=lambda call: next(taken))["a"]
    assert timing == (median, p20, p80)


def test_peak_bytes_counts_what_is_alive_at_once():
    def call():
        first = torch.empty(1 << 20)
        del first
        second, third = torch.empty(1 << 20), torch.empty(1 << 19)
        return second + third.sum()

    mebibyte = 1 << 20
    assert 10 * mebibyte <= peak_bytes(call) < 11 * mebibyte


def test_peak_bytes_sees_inside_the_ops():
    import fulmen

    q = torch.randn(1, 512, 2, 64)
    output = q.numel() * 4
    peak = peak_bytes(lambda: fulmen.linear_attention(q, q, q, backend="torch"))
    assert peak > 2 * output


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_that_is_kept_costs_no_page_faults():
    """In a process of its own: nothing takes it back."""
    script = """
import resource, torch
from fulmen.lab.bench.measure import keep_freed_memory, keeps_freed_memory

def faults_of_64_mebibytes():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults_of_64_mebibytes()
returned, kept_before = faults_of_64_mebibytes(), keeps_freed_memory()
keep_freed_memory()
faults_of_64_mebibytes()
print(returned, faults_of_64_mebibytes(), kept_before, keeps_freed_memory())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    returned, kept, *told = done.stdout.split()
    assert int(kept) < 16 < int(returned)
    assert told == ["False", "True"]
