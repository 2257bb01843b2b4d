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
    assert capsys.readouterr().out.startswith("Simulated, not measured; bytes by formula: Layer(batch=1, heads=4")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_what_is_counted_is_what_the_formula_says(capsys):
    sizes = ["--heads", "3", "--key-size", "4", "--value-size", "8", "--decay", "4"]
    assert main(["scaling", *sizes, "--count"]) == 0
    header, _, *rows = [line for line in capsys.readouterr().out.splitlines() if "|" in line][-5:]
    for world, row in zip((2, 3, 4), rows, strict=True):
        found = dict(zip(header.split(" | "), row.split(" | "), strict=True))
        assert found["ranks"] == str(world)
        assert found["agreement, counted"] == str(32 * (world - 1))
        assert found["forward, counted"] == found["forward, formula"] == f"{4 * 3 * (4 * 8 + 4) * (world - 1):,}"
        assert found["backward, counted"] == found["backward, formula"] == f"{4 * 3 * 4 * 8 * (world - 1):,}"
        assert found["ring, formula"] == f"{4096 // world * 3 * (4 + 8) * 4 * (world - 1):,}"
