"""Ranks that die, or do not come: the others end with an error that says so, within the group's timeout."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fulmen.distributed as fd
from fulmen.lab.crew import Crew


def call(group):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 12, 2, 8).requires_grad_()
    return fd.linear_attention(q, k, v, group=group)


def dies(group, who, when):
    """Of a rank, before its call or before its backward."""
    begins = when == "forward"
    if begins and dist.get_rank(group) == who:
        os._exit(1)
    output = call(group)
    if dist.get_rank(group) == who:
        os._exit(1)
    output.sum().backward()


@pytest.mark.parametrize(("when", "who"), [("forward", 1), ("backward", 0), ("backward", 2)])
def test_a_rank_that_dies_ends_the_others(when, who):
    """Also the last rank, which needs nothing of the others in the backward, and a first one, which nothing enters."""
    crew = Crew(3, timeout=60.0)
    try:
        crew.run(3, call)  # all have begun
        start = time.monotonic()
        found = crew.run(3, dies, who, when)
        assert time.monotonic() - start < 60  # the group's timeout
        for rank in {0, 1, 2} - {who}:
            assert found[rank].kind == "RuntimeError"
            assert f"rank {rank} of 3 lost the others while exchanging" in found[rank].message
            assert "linear_attention" in found[rank].message
    finally:
        crew.close()


def does_not_come(group, seconds, when, ended):
    """The second rank lives on, and never makes the call, or its backward."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))  # of all processes
    call(group)  # all have begun
    output = call(group) if when == "backward" else None
    rank = dist.get_rank(group)
    if rank == 1:
        while not ended[[0, 2, 3]].all():
            time.sleep(0.01)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank \d of 4 lost the others while exchanging"):
        call(group) if output is None else output.sum().backward()
    ended[rank] = True
    return time.monotonic() - start


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_does_not_come_ends_the_others_at_the_timeout(crew, when):
    ended = torch.zeros(4, dtype=torch.bool).share_memory_()
    for rank, waited in enumerate(crew.run(4, does_not_come, 3, when, ended)):
        assert rank == 1 or 0 < waited < 60, waited


def interrupt(group):
    """As Ctrl-C does to every process of a terminal."""
    os.kill(os.getpid(), signal.SIGINT)
    return True


def test_an_interrupt_is_for_who_began_the_ranks(crew):
    assert crew.run(2, interrupt) == [True, True]
