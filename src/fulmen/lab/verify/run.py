"""Running all checks and figures of `fulmen verify`, and telling what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fulmen
from fulmen.lab.environment import describe, environment
from fulmen.lab.files import write_json
from fulmen.lab.progress import Steps
from fulmen.lab.verify.check import Check, Target, all_checks
from fulmen.lab.verify.figures import size_of, times, workspaces
from fulmen.runtime.architectures import interpreted


def target_for(device: str, quick: bool) -> Target:
    """The backend that serves ``device``; under TRITON_INTERPRET=1 the Triton kernels, on the CPU."""
    backend = "triton" if device == "cuda" or interpreted() else "native"
    if refusal := fulmen.backends()[backend].refuses(device, torch.float32):
        raise RuntimeError(f"backend {backend!r} cannot be verified on {device!r}: {refusal}")
    return Target(device, backend, quick)


def run(device: str, quick: bool, into: Path | None) -> None:
    """Print what fails and the figures; also write JSON if asked. Raises if anything fails."""
    target = target_for(device, quick)
    facts = environment()
    print(describe(facts))
    checks = list(all_checks(target))
    with Steps(len(checks) + 2) as progress:
        outcomes = []
        for check in checks:
            progress.begin(f"{check.operator}: {check.what}")
            outcomes.append({"operator": check.operator, "case": check.what, "problems": outcome(check)})
        figures: dict[str, Any] = {}
        failures = [f"{o['operator']} ({o['case']}): {p}" for o in outcomes for p in o["problems"]]
        for name, measure in (
            ("workspace", lambda: [w._asdict() for w in workspaces(target)]),
            ("seconds", lambda: {n: t._asdict() for n, t in times(target, 1.0 if quick else 10.0).items()}),
        ):
            progress.begin(name)
            try:
                figures[name] = measure()
            except Exception as error:  # what was found until then is still worth having
                failures.append(f"{name}: {type(error).__name__}: {error}")
    memory, speed = figures.get("workspace", []), figures.get("seconds", {})
    failures += [
        f"workspace of the {w['mode']}, {w['decays']}: {w['bytes']} bytes, allowed {w['allowed']}"
        for w in memory
        if w["bytes"] > w["allowed"]
    ]
    size = size_of(target)
    report(target, len(checks), memory, speed, failures)
    if into is not None:
        document = {
            "environment": facts, "target": target._asdict(), "size": size._asdict(), "checks": outcomes,
            "workspace": memory, "seconds": speed, "failures": failures,
        }  # fmt: skip
        write_json(into, document)
    if failures:
        raise RuntimeError(f"{len(failures)} of what was verified failed")


def outcome(check: Check) -> list[str]:
    """A check that raises has failed, and the others still run."""
    try:
        return check.run()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def report(
    target: Target, checks: int, memory: list[dict[str, Any]], speed: dict[str, dict[str, float]], failures: list[str]
) -> None:
    size = size_of(target)
    title = f"batch{size.batch}-head{size.heads}-dim{size.dim}-bf16, n = {size.length}"
    print(f"\nbackend {target.backend} on {target.device}: {checks} cases against float64")
    print(f"\nworkspace beyond inputs and results, MiB ({title}):")
    print(f"{'decays':14}{'forward':>10}{'backward':>10}")
    by_decays = {(w["decays"], w["mode"]): w["bytes"] / 2**20 for w in memory}
    for decays in dict.fromkeys(w["decays"] for w in memory):
        print(f"{decays:14}{by_decays[decays, 'forward']:>10.2f}{by_decays[decays, 'backward']:>10.2f}")
    print(f"\nforward, ms, median ({title}):")
    for name, timing in speed.items():
        print(f"{name:12}{timing['median'] * 1e3:>10.3f}")
    print("\nall is right" if not failures else "\nfailed:")
    for failure in failures:
        print(f"  {failure}")
