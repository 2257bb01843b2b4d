"""The custom op ``fulmen::tpa_decode``: schema, result, and the way to a backend. It has no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fulmen.ops.tpa.problem import Decode, DecodeBackend, decode_of
from fulmen.ops.tpa.validation import check_lengths
from fulmen.runtime.library import define
from fulmen.runtime.operators import Operator

OPERATOR = Operator(
    name="tpa",
    protocol=DecodeBackend,
    backends={
        "native": "fulmen.ops.tpa.native",
        "reference": "fulmen.ops.tpa.reference",
        "torch": "fulmen.ops.tpa.torch_factorised",
        "triton": "fulmen.ops.tpa.triton",
    },
    workloads="fulmen.lab.operators.tpa.workloads",
    checks="fulmen.lab.operators.tpa.checks",
    limits="fulmen.lab.operators.tpa.limits",
)
_backend: Callable[[str], DecodeBackend] = OPERATOR.backend


def _result(p: Decode) -> Tensor:
    return p.aq.new_empty(p.output_shape)


def _decode(*args: Any) -> Tensor:
    *call, backend = args
    p = decode_of(*call)
    if p.seqlens is not None and p.seqlens.device.type == "cpu" and backend != "native":  # whose core checks them
        check_lengths(p.seqlens, p.tokens)
    output = _result(p)
    _backend(backend).forward(p, output)
    return output


def _decode_fake(*args: Any) -> Tensor:
    *call, _ = args
    return _result(decode_of(*call))


tpa_decode = define(
    """tpa_decode(Tensor aq, Tensor ak, Tensor av, Tensor bq, Tensor bk, Tensor bv, float? scale, Tensor? seqlens,
    str split, str backend) -> Tensor""",
    _decode,
    _decode_fake,
)
