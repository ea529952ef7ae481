"""Models of handlers: cost of ``get_model``, and effect of loads and evictions on other calls."""

from __future__ import annotations

import hashlib
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import trio

from benchmarks.report import Row
from ovmstrio.handlers.config.project_spec import ModelsSpec
from ovmstrio.handlers.models.library import LibraryOptions, ModelLibrary, open_library
from ovmstrio.handlers.models.model_cache import WatchOptions, lease_models

__all__ = ["run"]

ROUNDS = 5
CALLS = 100_000
TURNS = 15
TIMED = 60
REPEATS = 8
GUESTS = 6
GUESTS_A_SECOND = 10
NUMBERS = 250_000
LOAD_SECONDS = 0.0012
HASHED = bytes(100_000)


def _load(folder: str) -> Any:
    return np.load(Path(folder, "model.npy"))


def _write(root: Path) -> None:
    for name in ["host", *(f"guest{number}" for number in range(GUESTS))]:
        (root / name).mkdir()
        np.save(root / name / "model.npy", np.ones(NUMBERS, np.float32))


def _spec(root: Path, memory: int | None, disk: int | None) -> ModelsSpec:
    return ModelsSpec(section="models", kind="dir", dir=str(root), cache_size=memory, disk_cache_size=disk)


def _microseconds(library: ModelLibrary) -> float:
    get_model = library.client.get_model
    with lease_models():
        get_model("host")
        begin = time.perf_counter()
        for _ in range(CALLS):
            get_model("host")
        return (time.perf_counter() - begin) / CALLS * 1e6


def _call(library: ModelLibrary) -> list[float]:
    """Call a model as a handler does, each time in a separate call, and return the milliseconds of each."""
    taken = []
    for _ in range(TIMED):
        begin = time.perf_counter()
        with lease_models():
            model = library.client.get_model("host")
            for _ in range(REPEATS):
                np.sin(model)
        taken.append(1e3 * (time.perf_counter() - begin))
        # Sleep as long as between two requests, so that other tasks run.
        time.sleep(0.002)
    return taken


def _thrash(library: ModelLibrary, root: Path, over: threading.Event) -> None:
    """Request models in turn, of which only one fits into memory, and sometimes change one."""
    number = 0
    while not over.wait(1 / GUESTS_A_SECOND):
        name = f"guest{number % GUESTS}"
        if number % 3 == 0:
            (root / name / "model.npy").touch()
        with lease_models():
            library.client.get_model(name)
        number += 1


def _hash(_library: ModelLibrary, _root: Path, over: threading.Event) -> None:
    """Use the CPU for as long as a load does, without blocking other tasks."""
    while not over.wait(1 / GUESTS_A_SECOND):
        ends = time.thread_time() + LOAD_SECONDS
        while time.thread_time() < ends:
            hashlib.sha256(HASHED)


PHASES: Mapping[str, Callable[[ModelLibrary, Path, threading.Event], None] | None] = {
    "quiet": None,
    "hashing": _hash,
    "busy": _thrash,
}


async def _turn(library: ModelLibrary, root: Path, phase: str) -> list[float]:
    over, disturbance = threading.Event(), PHASES[phase]
    async with trio.open_nursery() as nursery:
        if disturbance is not None:
            nursery.start_soon(trio.to_thread.run_sync, partial(disturbance, library, root, over))
        taken = await trio.to_thread.run_sync(_call, library)
        over.set()
    return taken


async def _compare(root: Path) -> list[dict[str, float]]:
    """Return the p99 of each phase by round; phases alternate, so that other load affects all of them equally."""
    options = LibraryOptions(WatchOptions(interval_seconds=0.5))
    rounds = []
    order = list(PHASES)
    async with open_library(_spec(root, 2, 3), load_model=_load, options=options) as library:
        for _ in range(ROUNDS):
            taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
            for _ in range(TURNS):
                for phase in order:
                    taken[phase] += await _turn(library, root, phase)
                order.append(order.pop(0))
            rounds.append({phase: _p99(times) for phase, times in taken.items()})
    return rounds


def _p99(taken: list[float]) -> float:
    return statistics.quantiles(taken, n=100)[98]


async def _cost(root: Path, memory: int | None, disk: int | None) -> float:
    async with open_library(_spec(root, memory, disk), load_model=_load) as library:
        found = [await trio.to_thread.run_sync(_microseconds, library) for _ in range(ROUNDS)]
        return statistics.median(found)


def run() -> list[Row]:
    """Measure, in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write(root)
        cached, whole = trio.run(_cost, root, 2, 3), trio.run(_cost, root, None, None)
        rounds = trio.run(_compare, root)
    ratios = [each["busy"] / each["quiet"] for each in rounds]
    hashing = statistics.median(each["hashing"] / each["quiet"] for each in rounds)
    ratio = statistics.median(ratios)
    return [
        Row("get_model of a model in memory, us", cached, "<= 5", cached <= 5, f"without caching {whole:.2f} us"),
        Row(
            f"p99 of calls of a model while {GUESTS_A_SECOND} others a second are loaded and evicted, against none",
            ratio,
            "<= 1.2",
            ratio <= 1.2,
            f"median of {ROUNDS} rounds, which had {min(ratios):.2f} to {max(ratios):.2f}; "
            f"{statistics.median(each['busy'] for each in rounds):.2f} ms against "
            f"{statistics.median(each['quiet'] for each in rounds):.2f} ms; "
            f"hashing concurrently for as long as a load takes has {hashing:.2f}",
        ),
    ]
