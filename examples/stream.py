"""A stream of tokens through one layer, a part at a time: a million of them in the memory of one part."""

from __future__ import annotations

import argparse
import resource
import sys
import time

import torch

from fulmen.lab.progress import Line
from fulmen.nn import GatedLinearAttention, StateCache


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--part", type=int, default=4096, help="tokens at a time")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    layer = GatedLinearAttention(options.hidden, 4, conv_size=4).to(dtype)
    cache = StateCache(1)
    part = torch.randn(1, options.part, options.hidden, dtype=dtype)  # in place of what a stream would bring

    used: list[float] = []  # MiB, the most so far after each part
    line, begin = Line(options.tokens), time.perf_counter()
    with torch.no_grad():
        for first in range(0, options.tokens, options.part):
            layer(part[:, : options.tokens - first], cache=cache[0])
            used.append(peak())
            line.done = min(first + options.part, options.tokens)
            line.show(f"{line.done / (time.perf_counter() - begin):,.0f} tokens/s, {used[-1]:.0f} MiB")
    line.clear()
    seconds = time.perf_counter() - begin

    print(f"{options.tokens:,} tokens in {seconds:.1f} s: {options.tokens / seconds:,.0f} tokens/s")
    print(f"memory at most: {used[min(1, len(used) - 1)]:.0f} MiB after two parts, {used[-1]:.0f} MiB at the end")
    print(cache)
    return used


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10


if __name__ == "__main__":
    main()
