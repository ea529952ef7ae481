"""p99 of a trivial model's calls while another model of the server is under full load."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from benchmarks.matrix.infer_requests import MeasuredModel, check_answer, infer_call
from benchmarks.matrix.load import load
from benchmarks.matrix.networks import input_of, network
from benchmarks.models import F32, write_repository
from benchmarks.processes import ovms
from benchmarks.report import Row

if TYPE_CHECKING:
    from benchmarks.matrix.infer_requests import InferCall
    from benchmarks.processes import Server

__all__ = ["run"]

_ROUNDS: Final = 5
_SECONDS: Final = 2.0
_TRIVIAL: Final = "trivial"
_NEIGHBOURS: Final = {"ResNet-50": ("75 ms", 4), "a model of 10 ms": ("10 ms", 8), "a model of 1 ms": ("1 ms", 32)}
_MOST: Final = 3.0


def _checked_call(model: str, size: str, server: Server, folder: Path) -> InferCall:
    name, array = input_of(made := network(size, is_dynamic=True))
    inside = folder / f"{model}.requests"
    inside.mkdir()
    calls = infer_call("gRPC", MeasuredModel(model, name, array, made.outputs[0].any_name), server, inside)
    check_answer(calls)
    return calls


async def _p99_under_load(calls: InferCall, other: InferCall, callers: int, server: Server) -> float:
    """Return p99 in microseconds during the load on the other model."""
    taken: list[float] = []

    def ask() -> None:
        taken.append(load(calls, 1, _SECONDS, server.process).p99_us)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, load, other, callers, 1.5 * _SECONDS, server.process)
        nursery.start_soon(trio.to_thread.run_sync, ask)
    return taken[0]


def _row(what: str, calls: InferCall, other: InferCall, callers: int, server: Server) -> Row:
    rounds = [
        (load(calls, 1, _SECONDS, server.process).p99_us, trio.run(_p99_under_load, calls, other, callers, server))
        for _ in range(_ROUNDS)
    ]
    ratio = statistics.median(loaded / alone for alone, loaded in rounds)
    alone, loaded = (statistics.median(column) / 1e3 for column in zip(*rounds, strict=True))
    return Row(
        f"p99 of a trivial model while {what} is called by {callers} at once, against alone",
        ratio,
        f"<= {_MOST:g}",
        ratio <= _MOST,
        f"{loaded:.2f} ms, alone {alone:.2f} ms",
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
            calls = {what: _checked_call(names[what], size, server, folder) for what, size in sizes.items()}
            return [
                _row(what, calls[_TRIVIAL], calls[what], callers, server) for what, (_, callers) in _NEIGHBOURS.items()
            ]
