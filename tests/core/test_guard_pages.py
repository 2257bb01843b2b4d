"""No byte beside a tensor's own rows is read or written, by any operator and build of the CPU core."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fulmen.runtime import core

pytestmark = [
    pytest.mark.skipif(core.core is None, reason=core.why_unavailable),
    pytest.mark.skipif(sys.platform != "linux", reason="protects pages with mprotect"),
    pytest.mark.not_interpreted,
    pytest.mark.one_build,  # it tries all
]
SCRIPT = Path(__file__).with_name("guard_pages.py")


def run(*args):
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=1500)


@pytest.mark.parametrize(
    ("selection", "least"),
    [(["short"], 150), pytest.param([], 1000 * len(core.core.builds if core.core else []), marks=pytest.mark.long)],
)
def test_every_operator(selection, least):
    """And, of all, every build."""
    done = run(*selection)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    assert int(lines[-1].split()[0]) >= least


def test_touching_what_is_forbidden_ends_the_process():
    done = run("touch")
    assert "all rows written 15.0" in done.stdout
    assert done.returncode == -signal.SIGSEGV
