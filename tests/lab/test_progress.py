"""The line of progress, as a terminal gets it."""

import io
import json
import sys
import time

import pytest

from fulmen.lab.progress import Steps, clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_the_step_and_how_far_it_is(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Steps(2) as steps:
        steps.begin("the first")
        steps.begin("the second")
    shown = sys.stderr.getvalue().split("\r\x1b[2K")
    assert shown[1].endswith("1/2 the first")
    assert "[############............]" in shown[2]
    assert "left) 2/2 the second" in shown[2]
    assert shown[3] == ""  # nothing is left behind


def test_long_lines_are_cut_to_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    with Steps(1) as steps:
        steps.begin("x" * 100)
    assert max(map(len, sys.stderr.getvalue().split("\r\x1b[2K"))) == 39


def test_nobody_watches(monkeypatch):
    """The first step at once, others not before some seconds have gone."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    with Steps(2) as steps:
        steps.begin("a step")
        steps.begin("the next")
    assert sys.stderr.getvalue() == "0:00 1/2 a step\n"


def test_programs_get_a_line_for_each_step_that_is_done(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Steps(2, "json") as steps:
        steps.begin("a step")
        steps.begin("the next")
    assert [json.loads(line)["step"] for line in sys.stderr.getvalue().splitlines()] == ["a step", "the next"]


def test_a_step_that_failed_is_not_reported_as_done(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    steps = Steps(1, "json")
    steps.begin("a step")
    with pytest.raises(KeyboardInterrupt), steps:
        raise KeyboardInterrupt
    assert sys.stderr.getvalue() == ""


def test_clock():
    assert [clock(s) for s in (0.4, 61, 3600)] == ["0:00", "1:01", "60:00"]
