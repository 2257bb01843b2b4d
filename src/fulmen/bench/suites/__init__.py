"""The suites: one module for each published report."""

from __future__ import annotations

from fulmen.bench.suite import Suite
from fulmen.bench.suites.flao import FLAO
from fulmen.bench.suites.la3 import LA3
from fulmen.bench.suites.lasd import LASD
from fulmen.bench.suites.state import STATE
from fulmen.bench.suites.tpa_decode import TPA_DECODE

SUITES: dict[str, Suite] = {suite.name: suite for suite in (STATE, LASD, LA3, TPA_DECODE, FLAO)}
