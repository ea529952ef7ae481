"""Concurrent load on the models of one server, with cores shared among the models or assigned to each separately.

python -m benchmarks.core_sharing [SECONDS]    seconds of load per round
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.matrix.infer_requests import MeasuredModel, check_answer, infer_call
from benchmarks.matrix.load import load
from benchmarks.matrix.networks import input_of, network
from benchmarks.models import F32, write_repository
from benchmarks.processes import cpu_of_tree, ovms

if TYPE_CHECKING:
    import openvino as ov

    from benchmarks.matrix.infer_requests import InferCall
    from benchmarks.processes import Server

__all__: list[str] = []

ROUNDS: Final = 7
CALLERS: Final = 4
"""Of each model."""
MODES: Final = {"auto": (), "off": ("--cpu_pinning", "off")}


class _Together(NamedTuple):
    """Calls per second of all models, the server's CPU per call in microseconds, and the worst model's p99 in ms."""

    rate: float
    cpu_us: float
    p99_ms: float


def _ask(server: Server, calls: list[InferCall], seconds: float) -> _Together:
    before = cpu_of_tree(server.process)
    with ThreadPoolExecutor(len(calls)) as pool:
        figures = list(pool.map(lambda each: load(each, CALLERS, seconds, server.process), calls))
    rate = sum(each.rate for each in figures)
    used = cpu_of_tree(server.process) - before
    return _Together(rate, used / (rate * seconds) * 1e6, max(each.p99_us for each in figures) / 1e3)


def _measure(size: str, count: int, called: int, seconds: float) -> dict[str, _Together]:
    """Run servers with a number of models in turn, call some of the models, and return medians."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        models = {f"model{number}": network(size, is_dynamic=False) for number in range(count)}
        config = write_repository(folder, models, dict.fromkeys(models, F32))
        servers = {mode: stack.enter_context(ovms(config, *options)) for mode, options in MODES.items()}
        calls = {mode: _infer_calls(server, models, folder / mode)[:called] for mode, server in servers.items()}
        orders = (tuple(MODES), tuple(reversed(MODES)))
        rounds = [
            {mode: _ask(servers[mode], calls[mode], seconds) for mode in orders[turn % 2]} for turn in range(ROUNDS)
        ]
        return {
            mode: _Together(*map(statistics.median, zip(*(each[mode] for each in rounds), strict=True)))
            for mode in MODES
        }


def _infer_calls(server: Server, models: dict[str, ov.Model], folder: Path) -> list[InferCall]:
    found = []
    for name, model in models.items():
        (folder / name).mkdir(parents=True)
        given, array = input_of(model)
        found.append(infer_call("gRPC", MeasuredModel(name, given, array, "y"), server, folder / name))
        check_answer(found[-1])
    return found


def _main(seconds: float) -> None:
    print("| models, each with 4 callers | cores | calls/s | CPU a call, us | p99, ms |\n|---|---|---|---|---|")
    for size in ("1 ms", "10 ms"):
        for count, called in ((1, 1), (2, 2), (4, 4), (4, 1)):
            for mode, got in _measure(size, count, called, seconds).items():
                what = f"{called} of {count}, {size}"
                print(f"| {what} | {mode} | {got.rate:.0f} | {got.cpu_us:.0f} | {got.p99_ms:.1f} |", flush=True)


if __name__ == "__main__":
    _main(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0)
