"""What recorded launches cost (:mod:`fulmen.lab.cost`): compiled and simulated where that is not kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import prod
from multiprocessing import get_context
from tempfile import TemporaryDirectory

from fulmen.lab.cost.estimate import FEW_TRIPS, Cost, Kernel, NotModelledError, Phases, Simulated, estimate, phases
from fulmen.lab.cost.estimate import simulated as simulate
from fulmen.lab.cost.machines import MACHINES
from fulmen.lab.cost.sass import parse
from fulmen.lab.cost.work import work_of
from fulmen.lab.inspect import kept
from fulmen.lab.inspect.compilation import Listing, Resources, compile_and_list, key_of
from fulmen.lab.inspect.dry_run import Launch
from fulmen.runtime.architectures import ARCHITECTURES


def compiled_resources(key: str, arch: str, launch: Launch) -> Resources:
    """What the code of a launch takes, by :func:`~fulmen.lab.inspect.compilation.key_of`."""
    found = kept.resources(key)
    if found is None or (arch in MACHINES and kept.listing(key) is None):
        try:
            found, listing = compile_and_list(launch, ARCHITECTURES[arch])
        except Exception as error:
            raise RuntimeError(f"{launch.kernel} does not compile for {arch}: {error}") from error
        if listing is not None:
            kept.keep_listing(key, listing)
        kept.keep_resources(key, found)
    return found


def cost_of(key: str, arch: str, launch: Launch) -> Cost | str:
    """Of one launch, or why it is not modelled."""
    if arch not in MACHINES:
        return f"{arch} is not modelled"
    found = kept.cost(key, launch)
    if found is None:
        taken, listing = compiled_resources(key, arch, launch), kept.listing(key)
        assert listing is not None
        try:
            found = _modelled(key, arch, launch, taken, listing)
        except NotModelledError as reason:
            found = str(reason)
        kept.keep_cost(key, launch, found)
    return found


def _modelled(key: str, arch: str, launch: Launch, taken: Resources, listing: Listing) -> Cost:
    programs = prod(launch.grid)
    kernel = Kernel(parse(listing.sass), MACHINES[arch], launch.options["num_warps"], taken.shared, taken.registers)
    if kernel.resident == 0:
        raise NotModelledError("it does not fit the card")
    work = work_of(launch, listing.ttir)
    parts = phases(kernel.code, work.loops)
    return estimate(kernel, work, parts, _simulated(key, kernel, parts, programs), programs)


_runs: dict[tuple[str, int, int], Simulated] = {}  # launches of the same code mostly differ in how long they are


def _simulated(key: str, kernel: Kernel, parts: Phases, programs: int) -> Simulated:
    case = key, kernel.at_once(programs), min(parts.trips, FEW_TRIPS + 1)
    if case not in _runs:
        _runs[case] = simulate(kernel, parts, programs)
    return _runs[case]


def codes(launches: Iterable[tuple[str, Launch]]) -> int:
    """How many different ones launches for architectures lead to."""
    return len({key_of(launch, ARCHITECTURES[arch]) for arch, launch in launches})


def examine(launches: Iterable[tuple[str, Launch]], processes: int) -> Iterator[str]:
    """Compile and model what is not kept of launches for architectures, on several cores. Yields the key of each
    distinct code once it is kept, and first those that were."""
    found: dict[tuple[str, str], dict[str, Launch]] = {}
    for arch, launch in launches:
        code = key_of(launch, ARCHITECTURES[arch]), arch
        found.setdefault(code, {})[repr((launch.grid, launch.arguments))] = launch
    missing = []
    for (key, arch), those in found.items():
        modelled = arch not in MACHINES or all(kept.cost(key, launch) is not None for launch in those.values())
        if modelled and kept.resources(key) is not None:
            yield key
        else:
            missing.append((key, arch, list(those.values())))
    if not missing:
        return
    with TemporaryDirectory() as folder:
        processes = min(processes, len(missing))
        context = get_context("spawn")
        with ProcessPoolExecutor(processes, context, _let_triton_write_to, (folder,)) as pool:
            running = {pool.submit(_examine, *job): job[0] for job in missing}
            for done in as_completed(running):
                done.result()
                yield running[done]


def _examine(key: str, arch: str, launches: list[Launch]) -> None:
    compiled_resources(key, arch, launches[0])
    for launch in launches:
        cost_of(key, arch, launch)


def _let_triton_write_to(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
