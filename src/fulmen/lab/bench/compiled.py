"""Columns that are compiled, and can prove it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fulmen.runtime.torch_private import compiled_by_inductor


class Compiled:
    """``function`` under torch.compile, with a count of the calls that the compiled graph really served.

    torch falls back to eager silently, for instance when a function was compiled for eight shapes already; so the graph
    itself counts its runs. The length is left symbolic where that is possible: one compilation serves every length.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.calls = self.runs = 0

    def __call__(self, *tensors: Tensor) -> Tensor:
        self.calls += 1
        return self._compiled(*tensors)

    @cached_property
    def _compiled(self) -> Callable[..., Tensor]:
        # Not before it is needed: torch.compile takes a second to import.
        return torch.compile(self.function, fullgraph=True, backend=self._backend)

    @property
    def eager_calls(self) -> int:
        return self.calls - self.runs

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        inner = compiled_by_inductor(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return inner(*args)

        return run
