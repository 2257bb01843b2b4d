"""The cases of `fulmen verify`, as the tests use them: on the device where a backend runs, with an assertion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    "exact", "inputs", "off_by_differences", "relative_error", "run", "tensors", "threads_set_to",
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
    device, backend = str(torch.get_default_device()), str(options.get("backend", ""))
    subtracts = backend == "triton" and case.decays == "head" and case.dtype == torch.float32

    def nearby() -> list[dict[str, Tensor]]:
        return off_by_differences(tensors(case), exact(case)) if subtracts else []

    return Results(cases.run(case, device, **options), backend, partial(cases.yardstick, case), nearby=nearby)


def off_by_differences(given: dict[str, Tensor], expected: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Exact, but for the gradient of a decay that channels share: the Triton kernels subtract in float32 what a token
    gave from what it got (docs/gpu.md, section 2), so that 1e-7 of Σ |x dx| over q, k and v may be lost."""
    gradient = expected["dlog_decay"]
    per_token = gradient.ndim == 3
    sums = {name: (given[name].double() * expected[f"d{name}"]).abs().sum(3) for name in "qkv" if name in given}
    each = (x.repeat_interleave(gradient.shape[-1] // x.shape[2], 2) for x in sums.values())
    off = 1e-7 * sum(x if per_token else x.sum((0, 1)) for x in each)
    return [expected | {"dlog_decay": gradient + off.copysign(gradient)}]


class Results(dict[str, Tensor]):
    """Results that know which backend they are of, and what they are compared with if they are bfloat16."""

    def __init__(
        self,
        results: dict[str, Tensor],
        backend: str,
        yardstick: Callable[[], dict[str, Tensor]],
        bounds: Bounds = ATTENTION,
        nearby: Callable[[], Sequence[dict[str, Tensor]]] = tuple,
    ) -> None:
        super().__init__(results)
        self.backend, self.yardstick, self.bounds, self.nearby = backend, yardstick, bounds, nearby


def assert_close(results: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """Each result, by name, within the tolerance of its dtype."""
    backend, yardstick = getattr(results, "backend", SUBTRACT[0]), getattr(results, "yardstick", None)
    bounds, nearby = getattr(results, "bounds", ATTENTION), getattr(results, "nearby", tuple)
    problems = deviations(results, expected, backend, yardstick, bounds, nearby=nearby)
    assert not problems, f"{what} {'; '.join(problems)}"
