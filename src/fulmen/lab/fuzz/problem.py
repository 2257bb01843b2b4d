"""What is computed, and how: a problem has one exact answer, which many settings must give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Problem:
    """
    Attributes:
        operator: the public function.
        case: that of the operator in :mod:`fulmen.lab.operators`.
        chunk_size: of ``chunk_states``.
        equal: "" or the axis, "heads" or "tokens", along which inputs are equal, so that they can be expanded views.
        other_dtype: of states, β, and the weights of a convolution; None: as the case has them.
        without: "" or the result, "output" or "state", whose gradient is left out.
        scales: of the heads of v and of states, in turn: heads of different magnitude.
    """

    operator: str
    case: Any
    chunk_size: int = 16
    equal: str = ""
    other_dtype: torch.dtype | None = None
    without: str = ""
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Setting:
    """
    Attributes:
        isa: the build of the CPU core; "": the one in use.
        layout: how tensors lie in memory (:data:`fulmen.lab.fuzz.views.LAYOUTS`).
        schedule: or the split of ``tpa_decode``, or what ``output_gated_attention`` saves, joined by "+".
        gradients: "all", "inputs" (not of decays, which a backward can do without) or "none".
    """

    backend: str
    isa: str = ""
    threads: int = 1
    layout: str = "given"
    schedule: str = "auto"
    gradients: str = "all"


def snippet(problem: Problem, setting: Setting) -> str:
    """Python that computes it again and prints what is wrong."""
    interpreter = ["import os", 'os.environ["TRITON_INTERPRET"] = "1"'] if setting.backend == "triton" else []
    lines = [
        *interpreter,
        f"import {torch.__name__}",
        "from fulmen.lab.fuzz import Problem, Setting, wrong",
        f"from {type(problem.case).__module__} import Case",
        f"print(wrong({written(problem)}, {written(setting)}))",
    ]
    return "\n".join(lines)


def written(x: Any) -> str:
    """The expression that makes it, without what is as by default."""
    arguments = [f"{name}={written(value)}" for name, value, default in parts(x) if value != default]
    return f"{type(x).__name__}({', '.join(arguments)})" if has_parts(x) else repr(x)


def has_parts(x: Any) -> bool:
    return is_dataclass(x) or hasattr(x, "_fields")


def parts(x: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of each field of a dataclass or a named tuple."""
    if is_dataclass(x):
        yield from ((f.name, getattr(x, f.name), None if f.default is MISSING else f.default) for f in fields(x))
    elif hasattr(x, "_fields"):
        yield from ((name, getattr(x, name), x._field_defaults.get(name)) for name in x._fields)


def changed(x: Any, name: str, value: Any) -> Any:
    return x._replace(**{name: value}) if hasattr(x, "_replace") else replace(x, **{name: value})
