"""The suite of sequence parallelism: columns run in processes of their own, and are checked before they are timed."""

import pytest
import torch

from fulmen.lab.bench import suites
from fulmen.lab.bench.correctness import CorrectnessCheck
from fulmen.lab.bench.suites import sp

SUITE = suites.find("sp")


@pytest.fixture(scope="module", autouse=True)
def crew():
    """What the columns have begun ends with this module: pytest's own processes do not run what is left for exit."""
    yield
    if sp._crew.cache_info().currsize:
        sp._crew().close()
        sp._crew.cache_clear()


@pytest.mark.parametrize("section", SUITE.sections)
def test_columns_agree_with_the_specification(section):
    check = CorrectnessCheck(torch.float32, "cpu")
    sizes = SUITE.presets["quick"].sizes[0]
    for column in SUITE.sections[section]:
        assert check.verdict(SUITE, column, sizes, "fwd").problem == ""


def break_exchange(group, name):
    """On a rank: what comes from the others is lost, forward or backward; no name mends it again."""
    from fulmen.distributed import fold, recurrence

    for part in ("entering_state", "leaving_gradient"):
        whole = getattr(fold, part)
        setattr(recurrence, part, (lambda *args, whole=whole: whole(*args) * 0) if part == name else whole)


@pytest.mark.parametrize("scaling", ["strong", "weak"])
@pytest.mark.parametrize(("phase", "part"), [("forward", "entering_state"), ("training", "leaving_gradient")])
def test_the_check_sees_what_comes_from_other_ranks(scaling, phase, part):
    column, sizes = SUITE.column("2 ranks", f"{scaling} {phase} token"), SUITE.presets["quick"].sizes[0]
    sp._crew().run(2, break_exchange, part)
    try:
        assert CorrectnessCheck(torch.float32, "cpu").verdict(SUITE, column, sizes, "fwd").problem.startswith("wrong")
    finally:
        sp._crew().run(2, break_exchange, "")


def test_what_a_rank_receives_is_compared_with_the_formula():
    q, decay = torch.zeros(1, 10, 4, 64), torch.zeros(1, 10, 4)
    state, gradient = 4 * 4 * (64 * 64 + 1), 4 * 4 * 64 * 64
    received = {"the states of linear_attention": state, "the gradients of linear_attention": gradient}
    sp._check_received(received, 2, (q, q, q, decay))
    for what in received:
        with pytest.raises(RuntimeError, match="as the formula has it"):
            sp._check_received(received | {what: 1}, 2, (q, q, q, decay))
    assert f"receives {state:,} bytes forward (token) and {gradient:,} backward" in " ".join(SUITE.text.complexity)


def test_a_call_of_another_section_is_not_kept():
    """Its tensors would stay on the ranks; and none is run in place of another."""
    crew, shard = sp._crew(), (torch.zeros(1, 4, 1, 2),) * 3 + (torch.zeros(1, 4, 1),)
    for section in ("one", "two"):
        crew.run(1, sp._begin, (section, "1 rank"), sp._operator, [shard], False)
    assert crew.run(1, sp._go, ("two", "1 rank")) == [None]
    assert crew.run(1, sp._go, ("one", "1 rank"))[0].kind == "KeyError"
