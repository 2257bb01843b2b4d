import time

import torch

from fulmen.bench.measure import interleaved, peak_bytes


def order_of_calls(seconds, repeats):
    """For calls that take these seconds; the first of each is the warm-up."""
    order = []

    def clock(call):
        call()
        return seconds[order[-1]]

    calls = {name: lambda name=name: order.append(name) for name in seconds}
    interleaved(calls, seconds=0.0, repeats=repeats, clock=clock)
    assert order[: len(seconds)] == list(seconds)
    return order[len(seconds) :]


def test_calls_take_turns():
    assert order_of_calls({"a": 1.0, "b": 1.0}, repeats=3) == ["a", "b"] * 3


def test_short_calls_have_more_turns():
    found = order_of_calls({"long": 0.9, "half": 0.4, "short": 0.001}, repeats=1)
    assert found == ["long", "half", "short", "half", "short", "short", "short"]


def test_the_median_is_the_time_of_a_call():
    timing = interleaved({"sleep": lambda: time.sleep(0.01)}, seconds=0.0, repeats=5)["sleep"]
    assert 0.01 <= timing.p20 <= timing.median <= timing.p80 < 1.0


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
