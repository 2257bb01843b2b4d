"""Whose column is whose: ours, a package's own code, or our rendering of a package's algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Owner(NamedTuple):
    """Of a column.

    Attributes:
        package: by whom its algorithm is; "fulmen" for ours.
        rendered: whether that algorithm is written again in our own code, and not the package's.
    """

    package: str
    rendered: bool = False

    @property
    def kind(self) -> str:
        """For programs: "ours", "theirs" or "rendered"."""
        return "ours" if self.package == "fulmen" else "rendered" if self.rendered else "theirs"

    def described(self, version: str = "") -> str:
        """For people; ``version`` is the package's."""
        if self.kind == "ours":
            return "ours"
        return f"our rendering of {self.package}" if self.rendered else f"{self.package} {version}".strip()


def ours(device: str) -> Owner:
    return Owner("fulmen")


def theirs(package: str) -> Callable[[str], Owner]:
    return lambda device: Owner(package)


def rendered(package: str, on_cpu_only: bool = False) -> Callable[[str], Owner]:
    """Our rendering; ``on_cpu_only``: on CUDA the package's own code runs."""
    return lambda device: Owner(package, rendered=not (on_cpu_only and device == "cuda"))
