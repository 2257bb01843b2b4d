"""torch.vmap of an op: the dimension that is mapped over becomes part of the batch, and one call computes all of it.

Some calls stay a loop over samples: where each has its own of what a batch shares (a decay per head, the weight of a
convolution) or its own gradient of that, where sequences are packed, for which B must be 1, and where a state that is
updated in place cannot be viewed as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Argument(NamedTuple):
    name: str
    value: Any  # a tensor that is mapped over has that dimension first
    is_mapped: bool
    is_shared: bool  # a tensor without a batch
    is_updated: bool

    def sample(self, i: int) -> Any:
        return self.value[i] if self.is_mapped else self.value

    def folded(self, samples: int) -> Any:
        if self.is_shared or not isinstance(self.value, Tensor):
            return self.value
        return (self.value if self.is_mapped else self.value.expand(samples, *self.value.shape)).flatten(0, 1)

    def folds_in_place(self) -> bool:
        samples, batch = self.value.shape[:2]
        return samples == 1 or batch == 1 or self.value.stride(0) == batch * self.value.stride(1)


def batching_rule(op: Any, shared: Mapping[str, int], gradients: Sequence[str]) -> Callable[..., Any]:
    """The rule of ``op`` that torch.library.register_vmap takes.

    Args:
        op: whose tensors ``[B, ...]`` have the batch first.
        shared: its tensors that may be without a batch, and how many dimensions they have then.
        gradients: the arguments whose gradients are the op's results, as many as it has flags ``wanted``.
    """
    schema = [(x.name, x.alias_info is not None and x.alias_info.is_write) for x in op._schema.arguments]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        call = []
        for (name, is_updated), x, dim in zip(schema, args, in_dims, strict=True):
            is_mapped = isinstance(x, Tensor) and dim is not None
            if is_updated and not is_mapped:
                raise ValueError(f"{name} must be mapped over by vmap as other arguments are: it is updated in place")
            is_shared = isinstance(x, Tensor) and x.ndim - is_mapped == shared.get(name)
            call.append(_Argument(name, x.movedim(dim, 0) if is_mapped else x, is_mapped, is_shared, is_updated))
        if not _is_one_call(call, gradients):
            return _stacked([op(*(x.sample(i) for x in call)) for i in range(info.batch_size)])
        return _unfolded(op(*(x.folded(info.batch_size) for x in call)), info.batch_size)

    return rule


def _is_one_call(call: list[_Argument], gradients: Sequence[str]) -> bool:
    given = {x.name: x.value for x in call}
    wanted = {name for name, is_wanted in zip(gradients, given.get("wanted", ()), strict=True) if is_wanted}
    return (
        given.get("cu_seqlens") is None
        and not any(x.is_shared and (x.is_mapped or x.name in wanted) for x in call)
        and all(x.folds_in_place() for x in call if x.is_updated)
    )


def _stacked(samples: list[Any]) -> tuple[Any, Any]:
    """Results and their mapped dimensions, as torch takes them."""
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    return tuple(map(torch.stack, zip(*samples, strict=True))), (0,) * len(samples[0])


def _unfolded(results: Any, samples: int) -> tuple[Any, Any]:
    """The same of one call; a result that nobody requested is empty, and has no batch."""
    if isinstance(results, Tensor):
        return results.unflatten(0, (samples, results.shape[0] // samples)), 0
    dims = tuple(None if x.shape == (0,) else 0 for x in results)
    return tuple(x if d is None else _unfolded(x, samples)[0] for x, d in zip(results, dims, strict=True)), dims
