"""The same values, elsewhere in memory. What lies around them is NaN: to read it is to be found out."""

from __future__ import annotations

from copy import deepcopy
from zlib import crc32

import torch
from torch import Tensor

# "given": as it is. "transposed": the second and third axis are swapped in memory, as of [B, H, N, D]. "inner": the
# last axis is not dense, as of [B, N, D, H]. "sliced": a part of something larger. "gaps": every other element along
# every axis. "expanded": equal ones lie in one place. "mixed": one of these for each tensor.
LAYOUTS = ("given", "transposed", "inner", "sliced", "gaps", "expanded", "mixed")
AXES = {"heads": 2, "tokens": 1}


def viewed(name: str, x: Tensor, layout: str, equal: str = "", updated: bool = False) -> tuple[Tensor, Tensor]:
    """``x`` as a view of another layout, and the memory that it is a view of. A state that is ``updated`` in place must
    be dense along D or E, and no two of its elements may lie in one place."""
    if layout == "mixed":
        layout = LAYOUTS[crc32(f"{name} {list(x.shape)}".encode()) % (len(LAYOUTS) - 1)]
    last = x.ndim - 1
    if layout == "expanded":
        axis = AXES.get(equal, 9)
        if updated or name[0] not in "qkv" or axis >= x.ndim:
            return copied(x)
        base = x.narrow(axis, 0, min(1, x.shape[axis])).clone()
        return base.expand(x.shape), base
    if layout == "transposed" and x.ndim > 2:
        base = x.transpose(last - 1, last) if updated else x.transpose(1, 2)
        base = base.contiguous().clone()
        return (base.transpose(last - 1, last) if updated else base.transpose(1, 2)), base
    if layout == "inner" and x.ndim > 1 and not updated:
        base = x.movedim(-1, 1).contiguous().clone()
        return base.movedim(1, -1), base
    if layout == "sliced":
        base = around(x, [size + 3 for size in x.shape])
        view = base[tuple(slice(1, 1 + size) for size in x.shape)]
    elif layout == "gaps":
        axes = x.ndim - 2 if updated else x.ndim
        base = around(x, [2 * size if i < axes else size for i, size in enumerate(x.shape)])
        view = base[(slice(None, None, 2),) * axes]
    else:
        return copied(x)
    view.copy_(x)
    return view, base


def copied(x: Tensor) -> tuple[Tensor, Tensor]:
    """With its strides."""
    base = deepcopy(x)
    return base, base


def around(x: Tensor, shape: list[int]) -> Tensor:
    """Memory for ``x`` and more, of which nothing may be used."""
    if not x.is_floating_point():
        return x.new_full(shape, -(2**30))
    return x.new_full(shape, torch.nan)


def written_around(view: Tensor, base: Tensor) -> bool:
    """Whether something beside ``view`` was written; ``view`` is lost."""
    if not base.is_floating_point() or base.numel() <= view.numel():
        return False
    view.fill_(torch.nan)
    return not bool(base.isnan().all())
