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
