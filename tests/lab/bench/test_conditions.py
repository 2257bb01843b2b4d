"""What a run says of the machine it was made on."""

import subprocess
import sys
import time

import pytest

from fulmen.lab.bench import conditions
from fulmen.lab.bench.conditions import Conditions, Watch


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Conditions(), []),
        (Conditions(before=0.1, during=0.2, crowded=0.2, stolen=0.01), []),
        (Conditions(before=3.0, during=3.0, crowded=-4.0), []),  # with cores to spare
        (Conditions(before=0.1, during=1.2, crowded=1.2), ["other work, 1.2 while it ran"]),
        (Conditions(stolen=0.1), ["10% of the CPU time"]),
        (Conditions(slowed=1.1), []),
        (Conditions(slowed=1.9), ["cores 1.9 times slower at times"]),
    ],
)
def test_a_warning_says_what_disturbed(found, words):
    assert bool(found.warning) == bool(words)
    assert all(word in found.warning for word in words)


def test_the_worst_of_two_sittings():
    assert Conditions(1.0, None, 0.5).worst(Conditions(0.5, 2.0, 0.1)) == Conditions(1.0, 2.0, 0.5)


def test_a_machine_that_is_slower_at_times_is_seen(monkeypatch):
    monkeypatch.setattr(conditions, "MOMENT", 0.0)
    pulses = iter([1e-4] * 10 + [1.9e-4] * 10)
    monkeypatch.setattr(conditions, "_pulse", lambda: next(pulses))
    watch = Watch()
    assert watch.conditions().slowed is None  # one look tells nothing
    assert [watch.conditions().slowed for _ in range(9)] == [1.0] * 9
    assert [watch.conditions().slowed for _ in range(10)][-1] == 1.9


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells of processes")
def test_own_work_is_not_that_of_others(monkeypatch):
    """Nor is that of processes which the run has started and which still run."""
    monkeypatch.setattr(conditions, "MOMENT", 0.0)
    watch, before, spent = Watch(), conditions._own_ticks(), time.process_time()

    def of_child():
        """In seconds: a tick is 10 ms."""
        return (conditions._own_ticks() - before) / 100 - (time.process_time() - spent)

    child = subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 60: pass"])
    while child.poll() is None and of_child() < 0.5:
        time.sleep(0.05)
    assert child.poll() is None
    child.kill()
    child.wait()
    assert of_child() > 0.4  # it has ended now, and still counts
    assert watch.conditions().stolen is not None
