"""The public function: signature, documentation, checks, and one call."""

from __future__ import annotations

from torch import Tensor

from fulmen.ops.tpa import custom_op
from fulmen.ops.tpa.validation import check_decode
from fulmen.runtime.backends import choose
from fulmen.runtime.replay import replayed
from fulmen.runtime.tensors import autocast


@replayed
def tpa_decode(
    aq: Tensor,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    *,
    scale: float | None = None,
    seqlens: Tensor | None = None,
    split: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of one token over M keys and values that are given as factors::

        q   = Σ_r aq_r ⊗ bq_r / R              H×D
        k_m = Σ_r ak_mr ⊗ bk_mr / Rk           H×D, never formed
        v_m = Σ_r av_mr ⊗ bv_mr / Rv           H×E, never formed
        o_h = Σ_m softmax_m(scale · q_h · k_mh) v_mh

    Forward only. Scores and sums are float32 (float64 for float64 inputs), and scores may be of any size. The weights
    of bfloat16 values may be rounded to bfloat16 (``docs/precision.md``).

    Args:
        aq: ``[B, 1, H, R]``; float32, bfloat16, float16 or float64. R, D, E, Rk and Rv may be 1 to 512.
        ak: ``[B, M, H]`` (rank one) or ``[B, M, H, Rk]``, dtype of aq.
        av: ``[B, M, H]`` (rank one) or ``[B, M, H, Rv]``, dtype of aq.
        bq: ``[B, 1, R, D]``, dtype of aq.
        bk: ``[B, M, D]`` with ak of rank one, else ``[B, M, Rk, D]``, dtype of aq.
        bv: ``[B, M, E]`` with av of rank one, else ``[B, M, Rv, E]``, dtype of aq.
        scale: factor of the scores. None: ``D ** -0.5``.
        seqlens: ``[B]``, int32 or int64: how many tokens of each sample there are. What stands after them is never
            used, even if it is NaN. A sample without tokens gives zeros. None: all M.
        split: how the work is partitioned: "batch" (one task for each sample), "head" (for each sample and group of
            heads), "sequence" (for each sample and slice of M, then a merge), or "auto". Every backend accepts all
            four; see ``docs/tpa.md``.
        backend: a name from :func:`fulmen.backends`, or "auto".

    Returns:
        ``[B, 1, H, E]`` in the dtype of aq.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it was and what it must be. Also if grad is
            enabled and an input requires it.
    """
    aq, ak, av, bq, bk, bv = autocast(aq, ak, av, bq, bk, bv)
    check_decode(aq, ak, av, bq, bk, bv, scale, seqlens, split)
    backend = choose(backend, aq.device, aq.dtype)
    scale = None if scale is None else float(scale)
    return custom_op.tpa_decode(aq, ak, av, bq, bk, bv, scale, seqlens, split, backend)
