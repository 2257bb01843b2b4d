"""What machine this is and what fulmen finds on it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import fulmen
from fulmen.lab.bench.peers import versions
from fulmen.runtime.core import core


def environment() -> dict[str, Any]:
    """The facts that belong beside every measurement, ready for JSON."""
    return {
        "fulmen": fulmen.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peers": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "isa": core.isa if core else torch.backends.cpu.get_cpu_capability().lower(),
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "backends": {
            name: {
                "available": backend.available,
                "reason": backend.reason,
                "devices": list(backend.devices),
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in backend.dtypes],
                "auto": backend.auto,
            }
            for name, backend in fulmen.backends().items()
        },
    }


def describe(facts: dict[str, Any]) -> str:
    """The same for people."""
    cpu = facts["cpu"]
    lines = [
        f"fulmen    {facts['fulmen']}",
        f"python    {facts['python']}",
        f"torch     {facts['torch']}",
        f"peers     {', '.join(f'{name} {v}' for name, v in facts['peers'].items() if name != 'torch') or 'none'}",
        f"system    {facts['system']}",
        f"cpu       {cpu['model']}, {cpu['cores']} cores, {cpu['threads']} threads, {cpu['isa']}",
        f"gpus      {', '.join(facts['gpus']) or 'none'}",
        "backends",
    ]
    for name, backend in facts["backends"].items():
        what = backend["auto"] if backend["available"] else f"unavailable: {backend['reason']}"
        lines.append(f"  {name:<10}{what}")
    return "\n".join(lines)


def seconds_since_start() -> float:
    """Of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            return max(0.0, float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
