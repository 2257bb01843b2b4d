import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments, ranks=()):
    command = [sys.executable, *ranks, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory by way of /proc")
def test_two_ranks_train_on_what_does_not_fit_one():
    tokens = ("--tokens", "32768")
    alone = run(*tokens, "--memory", "300")
    assert alone.returncode == 1
    assert "32768 tokens do not fit into 300 MiB" in alone.stdout
    together = run(*tokens, "--memory", "300", ranks=TORCHRUN)
    assert together.returncode == 0, together.stderr
    unlimited = run(*tokens, "--memory", "4000")
    losses = [float(re.search(r"loss ([0-9.]+)", x.stdout).group(1)) for x in (together, unlimited)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
