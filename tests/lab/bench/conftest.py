from importlib import import_module
from pathlib import Path

import pytest

from fulmen.lab.bench import suites


@pytest.fixture
def toy(monkeypatch):
    """The module of the toy suite, which is found among the others while a test runs."""
    monkeypatch.setattr(suites, "__path__", [*suites.__path__, str(Path(__file__).with_name("suites"))])
    return import_module("fulmen.lab.bench.suites.toy")
