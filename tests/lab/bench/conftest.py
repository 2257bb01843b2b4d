import time
from importlib import import_module
from pathlib import Path

import pytest

from fulmen.lab.bench import suites


class Clock:
    """Time that only passing it makes pass: what is timed does not depend on what else the machine does."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-6  # no two moments are the same
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made.perf_counter)
    monkeypatch.setattr(time, "sleep", made.sleep)


@pytest.fixture
def toy(monkeypatch):
    """The module of the toy suite, which is found among the others while a test runs."""
    monkeypatch.setattr(suites, "__path__", [*suites.__path__, str(Path(__file__).with_name("suites"))])
    return import_module("fulmen.lab.bench.suites.toy")
