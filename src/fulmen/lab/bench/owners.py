"""Whose column is whose: ours, a package's own code, or our rendering of what a package computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """Of a column.

    Attributes:
        package: by whom its algorithm is; "fulmen" for ours, and empty where that was not recorded.
        rendered: whether that algorithm is written again in our own code, and not the package's; with "torch", written
            in plain torch by us.
        version: of the package, where it ran.
    """

    package: str
    rendered: bool = False
    version: str = ""

    @property
    def kind(self) -> str:
        """For programs: "ours", "theirs", "rendered" or "unknown"."""
        if self.package in ("fulmen", ""):
            return "ours" if self.package else "unknown"
        return "rendered" if self.rendered else "theirs"

    @property
    def described(self) -> str:
        """For people."""
        if self.kind in ("ours", "unknown"):
            return self.kind
        if not self.rendered:
            return f"{self.package} {self.version}".strip()
        return "our rendering, in torch" if self.package == "torch" else f"our rendering of {self.package}"


def ours(device: str) -> Owner:
    return Owner("fulmen")


def theirs(package: str) -> Callable[[str], Owner]:
    return lambda device: Owner(package)


def rendered(package: str, on_cpu_only: bool = False) -> Callable[[str], Owner]:
    """Our rendering; ``on_cpu_only``: on CUDA the package's own code runs."""
    return lambda device: Owner(package, rendered=not (on_cpu_only and device == "cuda"))
