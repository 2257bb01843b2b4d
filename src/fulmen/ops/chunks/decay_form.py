"""The forms of a decay: what its logarithms vary over."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor


class DecayForm(Enum):
    """What the log-decay of one axis varies over. The value is the form's number in the CPU core.

    ==========  =================  ============================
    form        log-decays         of a step
    ==========  =================  ============================
    NONE        None               None
    HEAD        ``[H]``            ``[H]``
    TOKEN       ``[B, N, H]``      ``[B, H]``
    CHANNEL     ``[B, N, H, D]``   ``[B, H, D]``
    ==========  =================  ============================

    HEAD and TOKEN are *scalar*: one number for all channels. Other files ask for what they need to know of a form,
    :attr:`has_tokens`, :attr:`by_head` and :attr:`by_channel`, and name none.
    """

    NONE = 0
    HEAD = 1
    TOKEN = 2
    CHANNEL = 3

    @classmethod
    def of(cls, log_decay: Tensor | None, step: bool = False) -> DecayForm:
        """The form of a log-decay that was checked; ``step`` says that it has no tokens."""
        if log_decay is None:
            return cls.NONE
        if log_decay.ndim == 1:
            return cls.HEAD
        return cls.CHANNEL if log_decay.ndim == (3 if step else 4) else cls.TOKEN

    @property
    def has_tokens(self) -> bool:
        """Whether it differs from token to token."""
        return self in (DecayForm.TOKEN, DecayForm.CHANNEL)

    @property
    def by_head(self) -> bool:
        """Whether it is one number for all tokens of a head."""
        return self is DecayForm.HEAD

    @property
    def by_channel(self) -> bool:
        return self is DecayForm.CHANNEL

    def heads(self, log_decay: Tensor) -> int:
        """H of a log-decay of this form."""
        return log_decay.shape[2 if self.has_tokens else 0]

    def axes(self, size: str = "D", step: bool = False) -> tuple[str, ...]:
        """The letters of its axes; ``size`` is that of its channels."""
        if not self.has_tokens:
            return ("H",) if self is DecayForm.HEAD else ()
        tokens = ("B", "H") if step else ("B", "N", "H")
        return (*tokens, size) if self.by_channel else tokens

    def shape(self, batch: int, length: int, heads: int, size: int) -> tuple[int, ...] | None:
        """None without a decay."""
        extent = {"B": batch, "N": length, "H": heads, "D": size}
        return None if self is DecayForm.NONE else tuple(extent[axis] for axis in self.axes())

    def by_token(self, log_decay: Tensor, like: Tensor) -> Tensor:
        """A log-decay of this form as ``[B, N, H, D]``, or ``[B, N, H, 1]`` of a scalar one, in the dtype of ``like``
        ``[B, N, H, D]``."""
        log_decay = log_decay.to(like.dtype)
        return log_decay if self.by_channel else log_decay.expand(like.shape[:3])[..., None]

    def reduced(self, gradient: Tensor) -> Tensor:
        """The gradient ``[B, N, H, D]`` of every channel's log-decay as that of a log-decay of this form."""
        if self.by_channel:
            return gradient
        return gradient.sum(-1) if self.has_tokens else gradient.sum((0, 1, 3))


KEY_FORMS = (DecayForm.HEAD, DecayForm.TOKEN, DecayForm.CHANNEL)  # what log_decay may have, beside none
VALUE_FORMS = (DecayForm.CHANNEL,)  # and log_decay_v


def tokens_of(log_decay: Tensor | None, tokens: slice | int) -> Tensor | None:
    """Those of some tokens; one per head is the same for all."""
    if log_decay is None or not DecayForm.of(log_decay).has_tokens:
        return log_decay
    return log_decay[:, tokens]


def as_sequence(log_decay: Tensor | None) -> Tensor | None:
    """The log-decay of a step as that of a sequence of one token."""
    if log_decay is None or not DecayForm.of(log_decay, step=True).has_tokens:
        return log_decay
    return log_decay[:, None]


class Decays(NamedTuple):
    """The decay forms of a call's two axes, by name: "none", "head", "token" or "channel" for the axis of keys,
    followed by "+value" where that of values has one too, per channel."""

    key: DecayForm
    value: DecayForm = DecayForm.NONE

    @classmethod
    def named(cls, name: str) -> Decays:
        key, _, value = name.partition("+")
        return cls(DecayForm[key.upper()], DecayForm.CHANNEL if value else DecayForm.NONE)

    def __str__(self) -> str:
        return self.key.name.lower() + ("" if self.value is DecayForm.NONE else "+value")

    @property
    def channel_axes(self) -> int:
        """How many of the axes have a decay per channel."""
        return self.key.by_channel + self.value.by_channel

    def shapes(self, batch: int, length: int, heads: int, key_size: int, value_size: int) -> dict[str, tuple[int, ...]]:
        """Of the arguments ``log_decay`` and ``log_decay_v``; those that are None are left out."""
        shapes = {
            "log_decay": self.key.shape(batch, length, heads, key_size),
            "log_decay_v": self.value.shape(batch, length, heads, value_size),
        }
        return {name: shape for name, shape in shapes.items() if shape is not None}
