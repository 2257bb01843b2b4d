"""How far a result may be from the float64 specification: stated once, for the tests and for `fulmen verify`."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest error allowed, relative to the largest magnitude of the exact tensor. For 16-bit types it is half a unit
# in the last place of a result, no more; for float32 it is what e^-90 costs (its exponent is known to 90 · 6e-8).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Backends that carry what crosses a chunk from boundary to boundary subtract once for each chunk, and get looser limits
# for the gradient of a decay in float32: for [H], one number for all tokens of all samples whose terms are of either
# sign, and where the decay leaves less than SMALLEST of its terms, which are of order 1 before it weighs them. Of [H]
# each head is measured by itself, where its terms do not cancel to less than SMALLEST_HEAD of the largest head's.
SUBTRACT = ("native", "triton")
TOLERANCE_PER_HEAD = 1e-4
SMALLEST_DECAY_GRADIENT = 1e-2
SMALLEST_HEAD = 0.1


def relative_error(got: Tensor, want: Tensor, smallest: float = 1e-30) -> float:
    """The largest error over the largest magnitude, or over ``smallest`` where that is larger. Below 1e-30 (what is
    left of a state after e^-90 a few times over) float32 runs out of digits. NaN if there is one anywhere."""
    if got.shape != want.shape:
        raise ValueError(f"the result has shape {list(got.shape)}, expected {list(want.shape)}")
    if want.numel() == 0:
        return 0.0
    got, want = got.cpu().double(), want.cpu()
    return (got - want).abs().max().item() / max(want.abs().max().item(), smallest)


def deviations(results: dict[str, Tensor], expected: dict[str, Tensor], backend: str) -> list[str]:
    """What is wrong with the results of ``backend``, by name: one sentence each, empty if all are close enough."""
    found = []
    for name, want in expected.items():
        got = results[name]
        if got.shape != want.shape:
            found.append(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
        elif not torch.isfinite(got).all():
            found.append(f"{name} is not finite")
        else:
            error, tolerance = relative_error(got, want), TOLERANCE[got.dtype]
            if name.startswith("dlog_decay") and got.dtype == torch.float32 and backend in SUBTRACT:
                smallest = SMALLEST_DECAY_GRADIENT
                error = relative_error(got, want, smallest)
                if want.ndim == 1:
                    smallest = max(smallest, SMALLEST_HEAD * want.abs().max().item())
                    error = max(relative_error(*head, smallest) for head in zip(got, want, strict=True))
                    tolerance = TOLERANCE_PER_HEAD
            if not error <= tolerance:
                found.append(f"{name}: off by {error:.1e}, allowed {tolerance:.1e}")
    return found
