"""The model of a card, on kernels that are compiled here."""

import cost_kernels
import pytest
import torch

from fulmen.runtime.architectures import ARCHITECTURES, interpreted

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="what Triton interprets it does not compile"),
    pytest.mark.usefixtures("empty_inspection_cache"),
]
pytest.importorskip("triton")

PROGRAMS, LENGTH = 512, 4096


def launch_of(arch, call):
    from fulmen.lab.inspect.dry_run import dry_run

    with dry_run(ARCHITECTURES[arch]) as (launches, _):
        call()
    return launches.pop()


def cost(arch, launch):
    from fulmen.lab.inspect.compilation import key_of
    from fulmen.lab.inspect.modelling import cost_of

    return cost_of(key_of(launch, ARCHITECTURES[arch]), arch, launch)


def sum_products(arch, chunk, channels, warps, stages):
    def call():
        x, y = (torch.empty(PROGRAMS, LENGTH, channels, dtype=torch.bfloat16) for _ in range(2))
        result = torch.empty(PROGRAMS, channels, channels)
        cost_kernels.sum_products[(PROGRAMS,)](
            x, y, result, LENGTH, C=chunk, D=channels, num_warps=warps, num_stages=stages
        )

    return launch_of(arch, call)


# By the model that this one was made after, of the same kernels compiled by Triton 3.7.1: milliseconds on the
# multiprocessors, of memory and of the L2 cache, programs at once, waves.
@pytest.mark.parametrize(
    ("arch", "chunk", "channels", "warps", "stages", "times", "at_once", "waves"),
    [
        ("sm_80", 64, 64, 4, 2, (0.169908, 0.314606, 0.125829), 4, 2),
        ("sm_80", 32, 128, 8, 1, (0.795149, 0.638892, 0.251658), 1, pytest.approx(4.7407, rel=1e-4)),
        ("sm_90", 64, 64, 4, 2, (0.042451, 0.191487, 0.097131), 4, 1),
        ("sm_90", 32, 128, 8, 1, (0.678845, 0.388866, 0.765277), 2, 2),
    ],
)
def test_it_agrees_with_what_was_recorded(arch, chunk, channels, warps, stages, times, at_once, waves):
    import triton

    if triton.__version__ != "3.7.1":
        pytest.skip("recorded with Triton 3.7.1")
    found = cost(arch, sum_products(arch, chunk, channels, warps, stages))
    assert (found.multiprocessors, found.memory, found.l2) == pytest.approx(times, rel=0.05)
    assert (found.programs, found.waves) == (at_once, waves)
    assert found.time == pytest.approx(max(times) + 3e-3, rel=0.05)
    assert 0 < found.busy["tensor"] < 1
    assert sum(found.idle.values()) + found.busy["issue"] == pytest.approx(1, abs=0.02)


def test_a_loop_inside_another_counts_as_often_as_it_runs():
    from fulmen.lab.cost.estimate import phases
    from fulmen.lab.cost.sass import Code, Control, Instruction
    from fulmen.lab.cost.work import Trips

    texts = ["MOV", *["FADD"] * 5, *["FMUL"] * 5, "BRA `(.L_inner)", "BRA `(.L_outer)", "EXIT"]
    instructions = tuple(Instruction(text, text.split()[0], Control(1, 7, 7, ())) for text in texts)
    code = Code(instructions, {".L_outer": 1, ".L_inner": 6})
    found = phases(code, (Trips(20, 9, (Trips(3, 4, ()),)),))
    assert found.trips == 20
    assert [i.name for i in found.body].count("FMUL") == 15
    assert [i.name for i in found.body].count("FADD") == 5
    assert [i.name for i in found.ends] == ["MOV", "EXIT"]
    assert found.counted_once == 0
    assert phases(code, (Trips(20, 9, ()),)).counted_once == 1


def test_other_architectures_are_not_modelled():
    assert cost("sm_120", sum_products("sm_120", 64, 64, 4, 2)) == "sm_120 is not modelled"


def test_control_codes():
    """Stall, scoreboards that are set, those that are waited for, and the loop."""
    from fulmen.lab.cost.sass import parse

    listing = """
.L_x_1:
        /*0000*/                   LDG.E.128 R4, [R2.64] ;                    /* 0x0000000402047981 */
                                                                              /* 0x000ea2000c1e1d00 */
        /*0010*/                   NOP ;                                      /* 0x0000000000007918 */
                                                                              /* 0x000fc00000000000 */
        /*0020*/                   NOP ;                                      /* 0x0000000000007918 */
                                                                              /* 0x000fc00000000000 */
        /*0030*/                   FADD R0, R4, R5 ;                          /* 0x0000000504007221 */
                                                                              /* 0x004fc80000000000 */
        /*0040*/              @P0 BRA `(.L_x_1) ;                             /* 0xfffffff000000947 */
                                                                              /* 0x000fea000383ffff */
        /*0050*/                   EXIT ;                                     /* 0x000000000000794d */
                                                                              /* 0x000fea0003800000 */
"""
    code = parse(listing)
    load, add = code.instructions[0], code.instructions[3]
    assert load.opcode == "LDG.E.128"
    assert load.control.stall == 1
    assert load.control.result == 2
    assert add.control.waits == (2,)
    assert add.control.stall == 4
    assert [(loop.first, loop.last) for loop in code.loops] == [(0, 4)]
    assert code.end == 6


def test_tokens_of_launches_that_walk_some_of_the_segments():
    """The gradient of a decay starts again every 2048 tokens, and its sums have a column for each tile of a head."""
    from fulmen.lab.cost.work import tokens_of
    from fulmen.lab.operators.linear_attention.workloads import attention_launched
    from fulmen.ops.chunks.decay_form import Decays

    _, backward = attention_launched(ARCHITECTURES["sm_80"], Decays.named("token"), "loop")
    walks = [launch for launch in backward if launch.kernel == "walk"]
    assert [walk.arguments["walked"] for walk in walks] == [1] * 33
    assert {tokens_of(walk.arguments) for walk in walks} == {4 * 32768 * 32}
