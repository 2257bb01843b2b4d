"""The machine and the options of a run, for people."""

from __future__ import annotations

from typing import Any

from fulmen.lab.bench.results import Results


def machine(results: Results) -> str:
    """In one line."""
    environment, options = results.environment, results.options
    cpu = environment["cpu"]
    parts = [
        ", ".join(environment["gpus"])
        if options.get("device") == "cuda"
        else f"{cpu['model']}, {cpu['threads']} threads",
        f"torch {environment['torch']}",
        f"fulmen {environment['fulmen']}",
        results.started[:10],
    ]
    return " · ".join(part for part in parts if part)


def facts(results: Results) -> list[tuple[str, str]]:
    """Everything known of the machine but its backends, then what was requested."""
    environment = {name: value for name, value in results.environment.items() if name != "backends"}
    known = [*flat(environment), *flat(results.options, "option ")]
    return [*known, ("started", results.started), ("finished", results.finished or "interrupted")]


def backend_lines(results: Results) -> list[tuple[str, bool, str]]:
    """Name, whether it is available, and how it works or why it is not."""
    backends = results.environment.get("backends", {})
    return [
        (name, backend["available"], backend["auto"] if backend["available"] else backend["reason"])
        for name, backend in backends.items()
    ]


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values, those of objects within after the object's name."""
    lines: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += flat(value, f"{prefix}{name} ")
        elif isinstance(value, list | tuple):
            lines.append((f"{prefix}{name}", ", ".join(map(str, value)) or "none"))
        elif value is not None:
            lines.append((f"{prefix}{name}", str(value)))
    return lines
