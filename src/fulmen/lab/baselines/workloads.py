"""What the two forms of Lightning Attention-2 launch: the baselines LP and LC of the lasd report."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fulmen.lab.baselines.lightning2_triton import loop_walk, parallel_walk
from fulmen.lab.inspect.dry_run import Launch
from fulmen.lab.inspect.inspection import Shape, Workload

_KERNELS = {"block_states_kernel": "block states", "reduce_kernel": "reduce", "block_kernel": "blocks"}


def lightning2(launches: list[Launch], shape: Shape) -> Iterator[tuple[str, Launch]]:
    q, k = (torch.empty(4, 32, 32768, shape.D, dtype=shape.dtype) for _ in range(2))
    v, do = (torch.empty(4, 32, 32768, shape.E, dtype=shape.dtype) for _ in range(2))
    decay = torch.empty(32)
    walks = {"output": (q, k, v, False), "dq": (do, v, k, False), "dk": (v, do, q, True), "dv": (k, q, do, True)}
    for result, (x, y, z, backward) in walks.items():
        loop_walk(x, y, z, decay, backward)
        yield f"LC {result}", launches.pop()
        parallel_walk(x, y, z, decay, backward)
        for launch in launches:
            yield f"LP {result}, {_KERNELS[launch.kernel]}", launch
        launches.clear()


WORKLOADS = (Workload("lightning2", "baseline", ("head",), lightning2),)
