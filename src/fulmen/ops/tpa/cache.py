"""The factors of all past tokens, for a decode loop."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fulmen.ops.tpa.api import tpa_decode
from fulmen.ops.tpa.validation import check_pair, check_seqlens, refuse_gradients
from fulmen.runtime.checks import check_alike, check_count, check_rows
from fulmen.runtime.tensors import autocast, autocast_enabled


class TPACache:
    """The key and value factors of the tokens so far, in memory that grows by doubling::

        cache = fulmen.TPACache()
        cache.append(ak, av, bk, bv)              # the prompt: [B, N, H], [B, N, H], [B, N, D], [B, N, E]
        while generating:
            cache.append(ak, av, bk, bv)          # one token: N = 1
            output = cache.decode(aq, bq)         # [B, 1, H, E]

    The first call of :meth:`append` settles shapes (other than N), dtype and device. Samples may have different
    lengths; nothing here waits for a GPU.

    Args:
        capacity: tokens to have room for from the start.
    """

    def __init__(self, capacity: int = 256) -> None:
        check_count("capacity", capacity)
        self._capacity = int(capacity)
        self._factors: dict[str, Tensor] = {}  # [B, capacity, ...] by name
        self._tokens = 0  # no sample has more
        self._lengths: Tensor | None = None  # [B]; None as long as all have _tokens

    @property
    def capacity(self) -> int:
        """Tokens of each sample that fit without allocating."""
        return self._capacity

    @property
    def lengths(self) -> Tensor:
        """``[B]``, int64: how many tokens each sample has."""
        if self._lengths is not None:
            return self._lengths.clone()
        if not self._factors:
            raise RuntimeError("an empty TPACache has no lengths: call append first")
        return self._uniform_lengths(self._factors["ak"])

    @property
    def rows(self) -> int | None:
        """How many samples there are. None: it is empty."""
        return self._factors["ak"].shape[0] if self._factors else None

    @property
    def nbytes(self) -> int:
        """Of all that it has room for."""
        return sum(x.nbytes for x in self._factors.values())

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ak, av, bk, bv ``[B, M, ...]``, M tokens for the longest sample: views, in which what is after a sample's
        length is of whatever value."""
        if not self._factors:
            raise RuntimeError("an empty TPACache has no factors: call append first")
        ak, av, bk, bv = (self._factors[name][:, : self._tokens] for name in ("ak", "av", "bk", "bv"))
        return ak, av, bk, bv

    def append(self, ak: Tensor, av: Tensor, bk: Tensor, bv: Tensor, *, lengths: Tensor | None = None) -> None:
        """Add N tokens to each sample.

        Args:
            ak: ``[B, N, H]`` or ``[B, N, H, Rk]``. av: ``[B, N, H]`` or ``[B, N, H, Rv]``.
            bk: ``[B, N, D]`` or ``[B, N, Rk, D]``. bv: ``[B, N, E]`` or ``[B, N, Rv, E]``.
            lengths: ``[B]``, int32 or int64: of the N tokens, how many each sample has (0 to N); the others are
                padding, of whatever value. None: all N.
        """
        ak, av, bk, bv = self._as_autocast_wants(ak, av, bk, bv)
        new = {"ak": ak, "av": av, "bk": bk, "bv": bv}
        self._check(new, lengths)
        count = ak.shape[1]
        self._reserve(new, self._tokens + count)
        if self._lengths is None:
            for name, x in new.items():
                self._factors[name][:, self._tokens : self._tokens + count] = x
        else:
            rows = torch.arange(ak.shape[0], device=ak.device)[:, None]
            places = self._lengths[:, None] + torch.arange(count, device=ak.device)
            for name, x in new.items():
                self._factors[name][rows, places] = x
        if self._lengths is not None or lengths is not None:
            before = self._uniform_lengths(ak) if self._lengths is None else self._lengths
            self._lengths = before + (count if lengths is None else lengths.to(torch.int64))
        self._settle(self._tokens + count, self._lengths)

    def decode(
        self, aq: Tensor, bq: Tensor, *, scale: float | None = None, split: str = "auto", backend: str = "auto"
    ) -> Tensor:
        """Attention of one token, ``aq [B, 1, H, R]`` and ``bq [B, 1, R, D]``, over all tokens of the cache.

        Returns:
            ``[B, 1, H, E]``; see :func:`fulmen.tpa_decode` for this and the options.
        """
        ak, av, bk, bv = self.factors
        aq, bq = self._as_autocast_wants(aq, bq)
        # Autocast would cast the whole cache again for every token.
        with torch.autocast(ak.device.type, enabled=False) if autocast_enabled(ak) else nullcontext():
            return tpa_decode(aq, ak, av, bq, bk, bv, scale=scale, seqlens=self._lengths, split=split, backend=backend)

    def select(self, rows: Tensor | list[int] | slice) -> TPACache:
        """A cache of the samples at these rows, in this order."""
        check_rows(rows, self.rows)
        chosen = TPACache(self._capacity)
        chosen._factors = {name: x[rows].clone() for name, x in self._factors.items()}
        chosen._settle(self._tokens, None if self._lengths is None else self._lengths[rows].clone())
        return chosen

    def join(self, other: TPACache) -> TPACache:
        """A cache of these samples, then those of ``other``."""
        self._check_type(other)
        if self.rows is None or other.rows is None:
            return (other if self.rows is None else self).select(slice(None))
        self._check_other(other)
        joined = self.select(slice(None))
        joined._reserve(joined._factors, other._tokens)
        for name, x in joined._factors.items():
            added = x.new_empty(other.rows, *x.shape[1:])
            added[:, : other._tokens] = other._factors[name][:, : other._tokens]
            joined._factors[name] = torch.cat((x, added))
        joined._tokens = max(self._tokens, other._tokens)
        if self._tokens != other._tokens or self._lengths is not None or other._lengths is not None:
            joined._lengths = torch.cat((self.lengths, other.lengths))
        return joined

    def place(self, rows: Tensor | list[int], other: TPACache) -> None:
        """Put the samples of ``other`` into these rows, in place of those that are there.

        Args:
            rows: ``[other.rows]``, indices.
        """
        self._check_other(other)
        check_rows(rows, self.rows)
        if len(rows) != other.rows:
            raise ValueError(f"rows must be as many as other has, {other.rows}; got {len(rows)}")
        lengths = self.lengths
        lengths[rows] = other.lengths
        self._reserve(self._factors, other._tokens)
        for name, x in self._factors.items():
            x[rows, : other._tokens] = other._factors[name][:, : other._tokens]
        self._settle(max(self._tokens, other._tokens), lengths)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {list(x.shape)} {str(x.dtype)[6:]}" for name, x in self._factors.items())
        return (
            f"TPACache: {self._tokens} tokens of {self.rows or 0} rows, room for {self._capacity}; {sizes or 'empty'}"
        )

    def _as_autocast_wants(self, *factors: Tensor) -> tuple[Tensor, ...]:
        """In its dtype, but the cache keeps the one it has."""
        if self._factors and isinstance(factors[0], Tensor) and autocast_enabled(factors[0]):
            return tuple(x.to(self._factors["ak"].dtype) if isinstance(x, Tensor) else x for x in factors)
        return autocast(*factors)

    def _settle(self, tokens: int, lengths: Tensor | None) -> None:
        """There are at most ``tokens``; of given lengths the longest, where no GPU has to be waited for."""
        if lengths is not None and lengths.device.type == "cpu":
            tokens = max(lengths.tolist(), default=0)
        self._tokens, self._lengths = tokens, lengths

    def _uniform_lengths(self, like: Tensor) -> Tensor:
        return torch.full(like.shape[:1], self._tokens, dtype=torch.int64, device=like.device)

    def _check(self, new: dict[str, Tensor], lengths: Tensor | None) -> None:
        if self._factors:
            self._check_like_before(new)
        else:
            check_alike("", new)
            check_pair("k", new["ak"], new["bk"])
            check_pair("v", new["av"], new["bv"])
        refuse_gradients(new)
        batch, count, heads = new["ak"].shape[:3]
        for name, x in new.items():
            if x.shape[:2] != (batch, count):
                raise ValueError(f"{name} must have the B and N of ak, {[batch, count]}; got shape {list(x.shape)}")
        if new["av"].shape[2] != heads:
            raise ValueError(f"av must have the H of ak, {heads}; got shape {list(new['av'].shape)}")
        if lengths is not None:
            check_seqlens(lengths, new["ak"], "lengths")
            if lengths.device.type == "cpu" and not bool(((lengths >= 0) & (lengths <= count)).all()):
                raise ValueError(f"lengths must be 0 to N = {count}; got {lengths.tolist()}")

    def _check_type(self, other: object) -> None:
        if not isinstance(other, TPACache):
            raise TypeError(f"other must be a TPACache; got {type(other).__name__}")

    def _check_other(self, other: TPACache) -> None:
        def alike(cache: TPACache) -> dict[str, object]:
            return {name: (x.shape[2:], x.dtype, x.device) for name, x in cache._factors.items()}

        self._check_type(other)
        if alike(other) != alike(self):
            raise ValueError(f"other must have the factors' shapes, dtype and device of {self}; got {other}")

    def _check_like_before(self, new: dict[str, Tensor]) -> None:
        for name, x in new.items():
            kept = self._factors[name]
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
            wanted = [kept.shape[0], *x.shape[1:2], *kept.shape[2:]]
            if list(x.shape) != wanted:
                raise ValueError(f"{name} must have shape {wanted}, as the tokens before; got {list(x.shape)}")
            if x.dtype != kept.dtype or x.device != kept.device:
                raise TypeError(f"{name} must be {kept.dtype} on {kept.device}; got {x.dtype} on {x.device}")

    def _reserve(self, like: dict[str, Tensor], tokens: int) -> None:
        """Room for ``tokens``."""
        if tokens > self._capacity or not self._factors:
            capacity = self._capacity
            while capacity < tokens:
                capacity *= 2
            with torch.inference_mode(False):  # memory that can be written to in any mode
                grown = {
                    name: torch.empty(x.shape[0], capacity, *x.shape[2:], dtype=x.dtype, device=x.device)
                    for name, x in like.items()
                }
            for name, x in self._factors.items():
                grown[name][:, : self._tokens] = x[:, : self._tokens]
            self._factors, self._capacity = grown, capacity
