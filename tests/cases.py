"""The cases of `fulmen verify`, as the tests use them: on the device where a backend runs, with an assertion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import fulmen
from fulmen.lab.operators.linear_attention import cases
from fulmen.lab.operators.linear_attention.cases import ALL_DECAYS, DECAYS, Case, differentiate, exact
from fulmen.lab.tolerances import ATTENTION, SUBTRACT, TOLERANCE, Bounds, deviations, relative_error
from fulmen.ops.linear_attention.validation import SCHEDULES
from fulmen.runtime.architectures import interpreted

__all__ = [
    "ALL_DECAYS", "BACKENDS", "DECAYS", "SCHEDULES", "TOLERANCE", "Case", "Results", "assert_close", "differentiate",
    "exact", "inputs", "relative_error", "run", "tensors", "threads_set_to",
]  # fmt: skip


def device_of(backend: str) -> str:
    """Where tests run a backend: Triton kernels on a GPU, or in the interpreter."""
    return "cuda" if backend == "triton" and not interpreted() else "cpu"


BACKENDS = [name for name, b in fulmen.backends().items() if not b.refuses(device_of(name), torch.float32)]


@contextmanager
def threads_set_to(count: int) -> Iterator[None]:
    """As many as the core may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensors(case: Case) -> dict[str, Tensor]:
    """On the default device, which the fixture ``device`` sets."""
    return {name: x.to(torch.get_default_device()) for name, x in cases.tensors(case).items()}


def inputs(case: Case) -> dict[str, Tensor]:
    return cases.inputs(case, str(torch.get_default_device()))


def run(case: Case, **options: object) -> Results:
    device = str(torch.get_default_device())
    return Results(cases.run(case, device, **options), str(options.get("backend", "")), partial(cases.yardstick, case))


class Results(dict[str, Tensor]):
    """Results that know which backend they are of, and what they are compared with if they are bfloat16."""

    def __init__(
        self,
        results: dict[str, Tensor],
        backend: str,
        yardstick: Callable[[], dict[str, Tensor]],
        bounds: Bounds = ATTENTION,
    ) -> None:
        super().__init__(results)
        self.backend, self.yardstick, self.bounds = backend, yardstick, bounds


def assert_close(results: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """Each result, by name, within the tolerance of its dtype."""
    backend, yardstick = getattr(results, "backend", SUBTRACT[0]), getattr(results, "yardstick", None)
    problems = deviations(results, expected, backend, yardstick, getattr(results, "bounds", ATTENTION))
    assert not problems, f"{what} {'; '.join(problems)}"
