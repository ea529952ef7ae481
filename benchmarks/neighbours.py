"""p99 of a trivial model's calls while another model of the server is under full load."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from benchmarks.matrix.doors import MeasuredModel, asked_over, check_answer
from benchmarks.matrix.load import load
from benchmarks.matrix.networks import input_of, network
from benchmarks.models import F32, write_repository
from benchmarks.processes import ovms
from benchmarks.report import Row

if TYPE_CHECKING:
    from benchmarks.matrix.doors import Asked
    from benchmarks.processes import Server

__all__ = ["run"]

_ROUNDS: Final = 5
_SECONDS: Final = 2.0
_TRIVIAL: Final = "trivial"
_NEIGHBOURS: Final = {"ResNet-50": ("75 ms", 4), "a model of 10 ms": ("10 ms", 8), "a model of 1 ms": ("1 ms", 32)}
_MOST: Final = 5.0


def _asked(model: str, size: str, server: Server, folder: Path) -> Asked:
    name, array = input_of(made := network(size, is_dynamic=True))
    inside = folder / f"{model}.asked"
    inside.mkdir()
    asked = asked_over("gRPC", MeasuredModel(model, name, array, made.outputs[0].any_name), server, inside)
    check_answer(asked)
    return asked


async def _beside(asked: Asked, other: Asked, callers: int, server: Server) -> float:
    """Return p99 in microseconds during the load on the other model."""
    taken: list[float] = []

    def ask() -> None:
        taken.append(load(asked, 1, _SECONDS, server.process).p99_us)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, load, other, callers, 1.5 * _SECONDS, server.process)
        nursery.start_soon(trio.to_thread.run_sync, ask)
    return taken[0]


def _row(what: str, asked: Asked, other: Asked, callers: int, server: Server) -> Row:
    rounds = [
        (load(asked, 1, _SECONDS, server.process).p99_us, trio.run(_beside, asked, other, callers, server))
        for _ in range(_ROUNDS)
    ]
    ratio = statistics.median(beside / alone for alone, beside in rounds)
    alone, beside = (statistics.median(column) / 1e3 for column in zip(*rounds, strict=True))
    return Row(
        f"p99 of a trivial model while {what} is asked by {callers} at once, against alone",
        ratio,
        f"<= {_MOST:g}",
        ratio <= _MOST,
        f"{beside:.2f} ms, alone {alone:.2f} ms",
    )


def run() -> list[Row]:
    """Measure a server with all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {_TRIVIAL: "10 us", **{what: size for what, (size, _) in _NEIGHBOURS.items()}}
        names = {what: what.replace(" ", "-") for what in sizes}
        models = {names[what]: network(size, is_dynamic=True) for what, size in sizes.items()}
        config = write_repository(folder, models, {each: {**F32, "PERFORMANCE_HINT": "LATENCY"} for each in models})
        with ovms(config) as server:
            asked = {what: _asked(names[what], size, server, folder) for what, size in sizes.items()}
            return [
                _row(what, asked[_TRIVIAL], asked[what], callers, server) for what, (_, callers) in _NEIGHBOURS.items()
            ]
