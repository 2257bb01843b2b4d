"""Running plans: what is checked, measured, left out and written down."""

import gc
import time
import weakref

import pytest
import torch

from fulmen.lab.bench import length, runner, suites
from fulmen.lab.bench.compiled import Compiled
from fulmen.lab.bench.correctness import LENGTH
from fulmen.lab.bench.plan import PACES, Options, Pace
from fulmen.lab.bench.prepared import Prepared
from fulmen.lab.bench.results import Cell, load
from fulmen.lab.bench.runner import new_results, run


@pytest.fixture(autouse=True)
def quick_pace(monkeypatch):
    monkeypatch.setitem(PACES, "quick", Pace(0.0, 3, 2, None))


@pytest.fixture
def measure(toy, clock, monkeypatch, tmp_path):
    """Runs the toy suite with the given columns; the results, by mode and metric."""

    def measure(*columns, **options):
        monkeypatch.setattr(toy, "SUITE", toy.suite(*columns))
        asked = toy.options(**options)
        results = new_results(asked)
        run(asked, results, tmp_path / "results.json")
        assert load(tmp_path / "results.json") == results
        return {(table.mode, table.metric): table for table in results.tables}

    return measure


def test_every_cell_of_real_suites_has_a_value_or_says_why(tmp_path):
    asked = Options(("state", "lasd", "la3"), "cpu", "fp32", batch=1, heads=2, dim=16, lengths=(8, 33))
    results = new_results(asked)
    run(asked, results, tmp_path / "results.json")
    assert results.finished is not None
    assert len(results.tables) == 2 + 4 + 4
    for table in results.tables:
        assert {(cell.n, cell.column) for cell in table.cells} == {(n, c) for n in (8, 33) for c in table.columns}
        for cell in table.cells:
            if reason := suites.find(table.suite).column(cell.column).why_not("cpu"):
                assert cell.value is None
                assert cell.skipped == reason
                continue
            assert cell.skipped is None, f"{table.title} {cell}"
            assert table.metric == "memory" or table.errors[cell.column] < 1e-5
            if table.metric == "speed":
                assert 0 < cell.value <= cell.p20 <= cell.p80
                assert cell.first_call > 0
            else:
                assert cell.value == pytest.approx(cell.inputs + cell.outputs + cell.workspace, abs=1e-5)
                assert cell.workspace >= 0
    assert {"timing", "checks", "memory", "first calls", "harness", "total"} <= set(results.seconds)


def test_memory_is_split_into_inputs_outputs_and_workspace(toy, measure):
    def wasteful(x):
        copy = x.repeat(5, 1, 1, 1)
        return 2 * copy[:1]

    tables = measure(toy.column("plain"), toy.column("wasteful", wasteful), batch=1, heads=2, dim=1024, lengths=(64,))
    size = 64 * 2 * 1024 * 4 / 2**20
    forward, backward = tables["fwd", "memory"], tables["bwd", "memory"]
    plain, wasteful = forward.cell(64, "plain"), forward.cell(64, "wasteful")
    assert (plain.inputs, plain.outputs) == (size, size)
    assert plain.workspace == pytest.approx(0.0, abs=0.01)
    assert wasteful.workspace == pytest.approx(5 * size, abs=0.01)
    # Given: x and the output's gradient; kept: the output; made: the gradient of x.
    plain = backward.cell(64, "plain")
    assert (plain.inputs, plain.outputs) == (2 * size, size)
    assert plain.workspace == pytest.approx(size, abs=0.01)


def test_a_wrong_column_is_not_timed(toy, measure):
    calls = []

    def wrong(x):
        calls.append(x.shape)
        return 2.1 * x

    tables = measure(toy.column("right"), toy.column("wrong", wrong))
    for table in tables.values():
        assert table.cell(8, "right").value is not None
        assert table.cell(8, "wrong").value is None
        assert "off by 5.0e-02 from the float64 reference" in table.cell(8, "wrong").skipped
    assert len(set(calls)) == 1  # those of the check


def test_a_wrong_gradient_is_not_timed(toy, measure):
    tables = measure(toy.column("right"), toy.column("wrong", toy.WrongGradient.apply))
    assert tables["fwd", "speed"].cell(8, "wrong").value is not None
    assert "off by 5.0e-01" in tables["bwd", "speed"].cell(8, "wrong").skipped


def test_a_failure_is_a_reason(toy, measure):
    def fails(x):
        raise RuntimeError("out of luck\nat length")

    table = measure(toy.column("right"), toy.column("fails", fails))["fwd", "speed"]
    assert table.cell(8, "fails").skipped == "failed: RuntimeError: out of luck"
    assert table.cell(8, "right").value is not None


def test_cells_over_the_budget_are_left_out(toy, measure):
    columns = toy.column("fast"), toy.column("slow", toy.slow)
    table = measure(*columns, lengths=(10, 500), budget=3.0, metrics=("speed",))["fwd", "speed"]
    assert table.cell(10, "slow").value >= 10
    assert "over the time budget" in table.cell(500, "slow").skipped
    assert table.cell(500, "fast").value is not None


def test_a_first_call_that_takes_too_long_is_the_only_one(toy, measure):
    table = measure(toy.column("fast"), toy.column("slow", toy.slow), lengths=(900,), budget=2.0)["fwd", "speed"]
    assert "over the time budget: the first call took 0.9 s" in table.cell(900, "slow").skipped


def test_nothing_is_begun_once_the_budget_is_spent(toy, measure):
    calls = []

    def counted(x):
        calls.append(x.shape)
        time.sleep(0.3)
        return 2 * x

    columns = [toy.column(str(i), lambda x, i=i: counted(x)) for i in range(8)]
    tables = measure(*columns, lengths=(10, 20, 30, 40), budget=0.5, metrics=("speed",))
    assert len(calls) < 6
    assert tables["bwd", "speed"].cell(40, "7").skipped == "over the time budget: nothing is left of it"


def test_a_first_call_that_took_too_long_tells_of_longer_ones(toy, measure):
    calls = []

    def slow(x):
        calls.append(x.shape[1])
        return toy.slow(x)

    options = {"lengths": (300, 600, 1200), "budget": 3.0, "metrics": ("speed",), "modes": ("fwd",)}
    table = measure(toy.column("fast"), toy.column("slow", slow), **options)["fwd", "speed"]
    assert "over the time budget: the first call took 0." in table.cell(300, "slow").skipped
    assert "over the time budget" in table.cell(1200, "slow").skipped
    assert 1200 not in calls


def test_a_cell_is_of_its_fastest_sitting(toy, measure):
    """A machine that is slow for a while makes no slow cell."""
    calls = {8: 0, 16: 0, LENGTH: 0}

    def disturbed(x):
        calls[x.shape[1]] += 1
        time.sleep(0.05 if calls[x.shape[1]] <= 4 else 0.01)  # a warm-up and three repeats, at each length
        return 2 * x

    table = measure(toy.column("a", disturbed), metrics=("speed",), modes=("fwd",))["fwd", "speed"]
    for n in (8, 16):
        cell = table.cell(n, "a")
        slow, fast = cell.sittings
        assert slow >= 50 > fast
        assert (cell.value, cell.p20, cell.p80) == (fast, fast, slow)


def test_a_cell_that_no_other_sitting_confirms_is_noisy():
    def cell(*sittings):
        made = Cell(8, "a")
        for median in sittings:
            made.sit(median)
        return made

    assert not Cell(8, "a", 5.0).noisy  # memory
    assert cell(10.0).noisy
    assert cell(10.0, 11.5).noisy
    assert not cell(20.0, 10.9, 10.0, 30.0).noisy
    assert not cell(10.0, 10.2).settled
    assert cell(10.0, 15.0, 10.2).settled
    assert not cell(10.0, 15.0, 10.5).settled


def test_a_cell_says_how_far_its_sittings_are_spread():
    cell = Cell(8, "a")
    for median in (5.0, 3.0, 1.0, 4.0, 2.0):
        cell.sit(median)
    assert (cell.value, cell.p20, cell.p80) == (1.0, 2.0, 4.0)


def test_a_settled_cell_makes_room_for_others(toy, measure, monkeypatch):
    """Sittings go on for cells alone whose fastest no other has confirmed."""
    monkeypatch.setitem(PACES, "quick", Pace(0.0, 1, 6, None))
    taken = []

    def clock(call):
        call()
        return taken[-1]

    def timed(seconds):
        """``seconds`` are those of every call, from the first."""
        lengths = []

        def function(x):
            lengths.append(x.shape[1])
            taken.append(seconds(lengths.count(x.shape[1])))
            return 2 * x

        return function

    monkeypatch.setattr(runner, "seconds_of", clock)
    columns = toy.column("steady", timed(lambda call: 1.0)), toy.column("restless", timed(lambda call: 0.8**call))
    table = measure(*columns, lengths=(8, 16), metrics=("speed",), modes=("fwd",))["fwd", "speed"]
    for n in (8, 16):
        assert len(table.cell(n, "steady").sittings) == 3
        assert len(table.cell(n, "restless").sittings) == 6
        assert table.cell(n, "restless").noisy


def test_the_sittings_of_a_cell_are_apart(toy, measure):
    lengths = []

    def seen(x):
        lengths.append(x.shape[1])
        return 2 * x

    measure(toy.column("a", seen), metrics=("speed",), modes=("fwd",))
    timed = [n for n in lengths if n != LENGTH]
    assert timed == [8] * 4 + [16] * 4 + [8] * 4 + [16] * 4


def test_a_column_that_fails_in_a_later_sitting_says_so(toy, measure):
    calls = []

    def fails(x):
        calls.append(x.shape[1])
        if calls.count(16) > 6:  # a warm-up and three repeats, and twice to weigh it
            raise RuntimeError("out of luck")
        return 2 * x

    tables = measure(toy.column("right"), toy.column("fails", fails), modes=("fwd",))
    for table in tables.values():
        assert table.cell(8, "fails").value is not None
        assert table.cell(16, "fails").skipped == "failed: RuntimeError: out of luck"
        assert table.cell(16, "right").value is not None


def test_later_sittings_leave_out_what_there_is_no_time_for(toy, measure, monkeypatch):
    monkeypatch.setitem(PACES, "quick", Pace(0.0, 3, 20, None))
    table = measure(toy.column("slow", toy.slow), lengths=(100,), budget=2.0, metrics=("speed",), modes=("fwd",))
    cell = table["fwd", "speed"].cell(100, "slow")
    assert cell.value >= 100
    assert 1 <= len(cell.sittings) < 20


def test_later_sittings_get_what_their_lengths_need(toy, measure, monkeypatch):
    """A long length needs most of the time, and gets it; of columns that do not fit, none is left out every time."""
    monkeypatch.setitem(PACES, "quick", Pace(0.0, 3, 3, None))
    lengths = (1, 2, 3, 4, 5, 6, 7, 150)
    columns = toy.column("a", toy.slow), toy.column("b", lambda x: toy.slow(x))
    table = measure(*columns, lengths=lengths, budget=5.5, metrics=("speed",), modes=("fwd",))["fwd", "speed"]
    assert all(len(table.cell(150, column).sittings) >= 2 for column in "ab")


def test_what_was_prepared_is_given_back(toy, measure):
    alive = weakref.WeakSet()

    class Model(torch.nn.Module):
        pass

    def prepare(x):
        model = Model()
        alive.add(model)
        return lambda: 2 * x if model else x

    measure(toy.column("plain"), toy.column("model", Prepared(prepare)), metrics=("speed",))
    gc.collect()
    assert not alive


def test_the_sittings_of_a_run_are_told_together(toy, measure, tmp_path):
    measure(toy.column("a", toy.slow))
    path = tmp_path / "results.json"
    results = load(path)
    results.tables[0].cell(8, "a").sittings.pop()  # so that something is left to do
    results.conditions.stolen, before = 0.5, results.seconds["total"]
    run(toy.options(), results, path)
    assert "50% of the CPU time taken by other virtual machines" in results.conditions.warning
    assert results.seconds["total"] > before
    assert results.seconds["timing"] <= results.seconds["total"]


def test_cells_that_do_not_fit_into_memory_are_left_out(toy, measure, monkeypatch):
    monkeypatch.setattr(length, "available_bytes", lambda device: 10 * 64 * 2 * 4 * 4)

    def large(x):
        return x.repeat(20, 1, 1, 1)[:1] * 2

    tables = measure(toy.column("small"), toy.column("large", large), lengths=(64,))
    assert tables["fwd", "memory"].cell(64, "small").value is not None
    assert "of memory" in tables["fwd", "memory"].cell(64, "large").skipped


def test_freed_memory_is_given_back_where_it_is_short(toy, measure, monkeypatch):
    """And else it is kept: a page that is taken again costs time of the call that takes it."""
    free, released = [10 * 64 * 2 * 4 * 4], []
    monkeypatch.setattr(length, "available_bytes", lambda device: free[0])

    def release():
        released.append(True)
        free[0] *= 100

    monkeypatch.setattr(length, "release_freed_memory", release)

    def large(x):
        return x.repeat(20, 1, 1, 1)[:1] * 2

    options = {"lengths": (64,), "metrics": ("speed",), "modes": ("fwd",)}
    assert measure(toy.column("small"), **options)["fwd", "speed"].cell(64, "small").value
    assert not released
    assert measure(toy.column("large", large), **options)["fwd", "speed"].cell(64, "large").value
    assert released == [True]


@pytest.mark.parametrize("freed_memory", ["kept", "returned"])
def test_freed_memory_is_kept_unless_a_run_returns_it(toy, measure, monkeypatch, freed_memory):
    kept = []
    monkeypatch.setattr(runner, "keep_freed_memory", lambda: kept.append(True))
    measure(toy.column("small"), lengths=(64,), metrics=("speed",), freed_memory=freed_memory)
    assert kept == [True] * (freed_memory == "kept")


@torch._dynamo.config.patch(recompile_limit=2)
def test_compiled_columns_are_compiled_in_every_cell(toy, measure):
    lengths = (8, 9, 10, 11)  # more than torch compiles a function for
    compiled = Compiled(toy.double)
    tables = measure(toy.column("eager"), toy.column("compiled", compiled), lengths=lengths, metrics=("speed",))
    for table in tables.values():
        assert [table.cell(n, "compiled").skipped for n in lengths] == [None] * len(lengths)
    assert compiled.runs == compiled.calls > len(lengths)


def test_a_compiled_column_that_runs_eagerly_is_caught(toy, measure):
    with torch.compiler.set_stance("force_eager"):
        tables = measure(toy.column("eager"), toy.column("compiled", Compiled(toy.double)))
    assert "ran eagerly" in tables["fwd", "speed"].cell(8, "compiled").skipped
    assert tables["fwd", "memory"].cell(8, "compiled").value is None


def test_a_run_goes_on_where_it_was(toy, measure, monkeypatch, tmp_path):
    measure(toy.column("a"), toy.column("b"))
    path = tmp_path / "results.json"
    begun = load(path)
    kept = [cell for table in begun.tables for cell in table.cells if cell.n == 8]
    for table in begun.tables:
        table.cells = [cell for cell in table.cells if cell.n == 8]
    begun.finished = None
    begun.save(path)

    results = load(path)
    assert Options.of_json(results.options) == toy.options()
    run(toy.options(), results, path)
    assert [cell for table in results.tables for cell in table.cells if cell.n == 8] == kept
    assert all(table.lengths == [8, 16] for table in results.tables)
    assert results.finished is not None


def test_a_run_goes_on_in_the_sitting_it_was_in(toy, measure, tmp_path):
    calls = []

    def slower(x):
        calls.append(x)
        time.sleep(len(calls) / 1e3)
        return 2 * x

    measure(toy.column("a", slower), metrics=("speed",))
    path = tmp_path / "results.json"
    results = load(path)
    cell = results.tables[0].cell(8, "a")
    first = cell.sittings.pop()
    run(toy.options(metrics=("speed",)), results, path)
    cells = [cell for table in load(path).tables for cell in table.cells]
    assert [len(cell.sittings) for cell in cells] == [2] * 4
    assert results.tables[0].cell(8, "a").sittings[0] != first
