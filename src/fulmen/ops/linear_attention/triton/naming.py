"""The decay form in the names of compiled kernels."""

from __future__ import annotations


def decays(head: bool, token: bool, channel: bool, value: bool) -> str:
    """Whether the keys' axis has a decay of one of the first three forms, and the values' axis any."""
    given = {"head": head, "token": token, "channel": channel, "value": value}
    return "_".join([name for name, there in given.items() if there] or ["no"]) + "_decay"
