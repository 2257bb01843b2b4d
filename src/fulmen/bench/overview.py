"""One honest comparison: linear_attention on every available backend against torch's softmax attention."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fulmen
from fulmen.bench.measure import Timing, interleaved, peak_bytes
from fulmen.bench.progress import Steps
from fulmen.environment import describe, environment

BATCH, HEADS, DIM = 1, 16, 128
TITLE = f"batch{BATCH}-head{HEADS}-dim{DIM}-fp32"
SOFTMAX = "SDPA"
SECONDS_PER_LENGTH = 2.0
SECONDS_PER_CALL = 4.0  # a call expected to take longer is left out, and the table says so


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised q and k, v, and one constant decay per head, from gentle to strong."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, length, HEADS, DIM) for _ in range(3))
    normalize = torch.nn.functional.normalize
    return normalize(q, dim=-1), normalize(k, dim=-1), v, -(2.0 ** -torch.arange(1, HEADS + 1) * 8).float()


def run(lengths: list[int], json_path: Path | None) -> None:
    """Check, time and print; with ``json_path`` also write the figures."""
    names = [name for name, backend in fulmen.backends().items() if not backend.refuses("cpu", torch.float32)]
    facts = environment()
    print(describe(facts))
    errors = {name: error_against_float64(name) for name in names}
    times: dict[int, dict[str, Timing]] = {}
    workspace: dict[int, dict[str, float]] = {}
    with Steps(len(lengths)) as steps, torch.inference_mode():
        for length in lengths:
            steps.begin(f"linear_attention against softmax attention, n = {length}")
            calls = runnable(prepare(names, length), times, length)
            times[length] = interleaved(calls, SECONDS_PER_LENGTH)
            output_bytes = BATCH * length * HEADS * DIM * 4
            workspace[length] = {name: peak_bytes(call) / output_bytes - 1 for name, call in calls.items()}
    import_seconds = import_cost()

    columns = [SOFTMAX, *names]
    milliseconds = {n: {name: f"{t.median * 1e3:.3f}" for name, t in row.items()} for n, row in times.items()}
    speedups = {
        n: {name: f"{row[SOFTMAX].median / t.median:.2f}x" for name, t in row.items() if SOFTMAX in row}
        for n, row in times.items()
    }
    sizes = {n: {name: f"{size:.2f}" for name, size in row.items()} for n, row in workspace.items()}
    print_table(f"linear_attention-speed-fwd-{TITLE} (ms, median; constant decay):", columns, milliseconds)
    print_table("speedup over SDPA:", names, speedups)
    print_table("workspace beyond inputs and output, in sizes of v:", columns, sizes)
    print("\nerror against float64, n = 257 (relative to the largest output):")
    for name, error in errors.items():
        print(f"  {name:<10}{error:.1e}")
    print(f"\nimport fulmen: {import_seconds:.3f} s beyond import torch")
    if json_path is not None:
        figures = {
            "environment": facts,
            "title": TITLE,
            "seconds": {n: {name: t._asdict() for name, t in row.items()} for n, row in times.items()},
            "workspace_over_v": workspace,
            "error": errors,
            "import_seconds": import_seconds,
        }
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


def prepare(names: list[str], length: int) -> dict[str, Callable[[], object]]:
    q, k, v, decay = inputs(length)
    # Softmax attention gets the layout it likes best: [B, H, N, D], contiguous.
    qh, kh, vh = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def softmax() -> object:
        return scaled_dot_product_attention(qh, kh, vh, is_causal=True)

    def linear(backend: str) -> Callable[[], object]:
        return lambda: fulmen.linear_attention(q, k, v, decay=decay, backend=backend)

    return {SOFTMAX: softmax} | {name: linear(name) for name in names}


def runnable(
    calls: dict[str, Callable[[], object]], times: dict[int, dict[str, Timing]], length: int
) -> dict[str, Callable[[], object]]:
    """Without the calls that would take too long, judged by the length before."""
    if not times:
        return calls
    before, row = list(times.items())[-1]
    growth = length / before

    def expected(name: str) -> float:
        power = 2 if name == SOFTMAX else 1
        return row[name].median * growth**power if name in row else float("inf")

    return {name: call for name, call in calls.items() if expected(name) <= SECONDS_PER_CALL}


def error_against_float64(backend: str) -> float:
    q, k, v, decay = inputs(257)
    exact = fulmen.linear_attention(q.double(), k.double(), v.double(), decay=decay.double(), backend="reference")
    output = fulmen.linear_attention(q, k, v, decay=decay, backend=backend)
    error = ((output - exact).abs().max() / exact.abs().max()).item()
    if not error < 1e-5:
        raise RuntimeError(f"backend {backend!r} is off by {error:.1e} from the float64 reference; not timing it")
    return error


def import_cost(repeats: int = 5) -> float:
    """Seconds that ``import fulmen`` adds to ``import torch``: the least of several tries, since noise only adds."""
    code = "import time, torch; start = time.perf_counter(); import fulmen; print(time.perf_counter() - start)"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(repeats))


def print_table(title: str, columns: list[str], rows: dict[int, dict[str, str]]) -> None:
    """One row for each length; a cell that was not run says so."""
    print(f"\n{title}")
    print(f"{'n':>8}" + "".join(f"{name:>12}" for name in columns))
    for length, row in rows.items():
        print(f"{length:>8}" + "".join(f"{row.get(name, 'too slow'):>12}" for name in columns))
