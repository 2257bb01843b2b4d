import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments, ranks=()):
    command = [sys.executable, *ranks, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory by way of /proc")


@pytest.mark.long
@LINUX
def test_two_ranks_train_on_what_does_not_fit_one():
    tokens = ("--tokens", "8192")
    alone = run(*tokens, "--memory", "75")
    assert alone.returncode == 1
    assert "8192 tokens do not fit into 75 MiB" in alone.stdout
    together = run(*tokens, "--memory", "75", ranks=TORCHRUN)
    assert together.returncode == 0, together.stderr
    unlimited = run(*tokens, "--memory", "4000")
    losses = [re.search(r"loss ([0-9.]+), and ([0-9.]+) after", x.stdout).groups() for x in (together, unlimited)]
    (before, after), expected = ([float(x) for x in pair] for pair in losses)
    assert (before, after) == pytest.approx(tuple(expected), rel=1e-5)
    assert after < 0.99 * before  # which took the gradients of both ranks


def free_port():
    """Below those that the system gives to connections, which might take it before it is listened to."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@LINUX
def test_a_rank_that_lost_the_other_does_not_blame_its_tokens():
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--tokens", "8192", "--memory", memory],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | meeting | {"RANK": rank},
        )
        for rank, memory in (("0", "1000"), ("1", "5"))
    ]
    (said, failed), (other, _) = (rank.communicate(timeout=300) for rank in ranks)
    assert "rank 1: 4096 tokens do not fit into 5 MiB" in other
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "do not fit" not in said
    assert "RuntimeError: rank 0 of 2 lost the others" in failed
