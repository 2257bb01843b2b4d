import pytest

from fulmen.lab.cli import main
from fulmen.lab.scaling import RANKS, TOKENS, Layer, Machine, simulated, table


def test_what_is_received_does_not_depend_on_the_length():
    layer = Layer(batch=1, heads=4, key_size=64, value_size=64, decay=1)
    assert layer.forward(2) == 4 * 4 * (64 * 64 + 1)
    assert layer.forward(9) == 8 * layer.forward(2)
    assert layer.ring(2000, 4) == 2 * layer.ring(1000, 4)


def test_a_simulation_covers_all_ranks_and_tokens_and_one_rank_is_the_local_operator():
    machine, layer = Machine(), Layer()
    rows = simulated(layer, machine)
    assert {(row["tokens"], row["ranks"]) for row in rows} == {(n, w) for n in TOKENS for w in RANKS}
    assert machine.ours(layer, 10**6, 1) == machine.all_to_all(layer, 10**6, 1)
    assert machine.ours(layer, 10**8, 2) < machine.ours(layer, 10**8, 1)
    assert machine.all_to_all(layer, 10**6, 2 * layer.heads) is None
    assert len(table(rows).splitlines()) == len(rows) + 2


def test_the_command_says_that_it_simulates_and_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["scaling", "--heads", "4", "--plot", str(tmp_path / "plot.png")]) == 0
    assert capsys.readouterr().out.startswith("Simulated, not measured: Layer(batch=1, heads=4")
    assert (tmp_path / "plot.png").stat().st_size > 1000
