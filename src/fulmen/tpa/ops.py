"""The custom op ``fulmen::tpa_decode``: schema, result, and the way to a backend. It has no gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fulmen.library import define, imported_when_used
from fulmen.tpa.problem import Decode, decode_of
from fulmen.tpa.validation import check_lengths

# A backend is a module with forward(p: Decode, output), imported when first used.
_MODULES = {
    "native": "fulmen.tpa.native",
    "reference": "fulmen.tpa.reference",
    "torch": "fulmen.tpa.torch_factorised",
    "triton": "fulmen.tpa.triton",
}
_implementation = imported_when_used(_MODULES)


def _result(p: Decode) -> Tensor:
    return p.aq.new_empty(p.output_shape)


def _decode(*args: Any) -> Tensor:
    *call, backend = args
    p = decode_of(*call)
    if p.seqlens is not None and p.seqlens.device.type == "cpu":
        check_lengths(p.seqlens, p.tokens)
    output = _result(p)
    _implementation(backend).forward(p, output)
    return output


def _decode_fake(*args: Any) -> Tensor:
    *call, _ = args
    return _result(decode_of(*call))


define(
    """tpa_decode(Tensor aq, Tensor ak, Tensor av, Tensor bq, Tensor bk, Tensor bv, float? scale, Tensor? seqlens,
    str split, str backend) -> Tensor""",
    _decode,
    _decode_fake,
)
