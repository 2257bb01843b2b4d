"""The suites: one module for each published report."""

from __future__ import annotations

from fulmen.lab.bench.suite import Suite
from fulmen.lab.bench.suites.flao import FLAO
from fulmen.lab.bench.suites.la3 import LA3
from fulmen.lab.bench.suites.lasd import LASD
from fulmen.lab.bench.suites.state import STATE
from fulmen.lab.bench.suites.tpa_decode import TPA_DECODE

SUITES: dict[str, Suite] = {suite.name: suite for suite in (STATE, LASD, LA3, TPA_DECODE, FLAO)}
