"""Rates of calls relative to OpenVINO alone and to servers with a canned answer, measured at the same time."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.matrix.cells import ModelCase
from benchmarks.matrix.infer_requests import MeasuredModel, check_answer, infer_call
from benchmarks.matrix.load import load
from benchmarks.matrix.measurement import SETTLING_SECONDS
from benchmarks.matrix.networks import input_of, network
from benchmarks.matrix.openvino_baseline import openvino_alone
from benchmarks.models import write_repository
from benchmarks.peers.environments import python_of
from benchmarks.processes import ovms, script
from benchmarks.report import Row
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from benchmarks.matrix.cells import Interface
    from benchmarks.matrix.infer_requests import InferCall
    from benchmarks.matrix.load import LoadFigures
    from benchmarks.processes import Server

__all__ = ["run"]

_ROUNDS: Final = 5
_SECONDS: Final = 1.5
_CYCLES: Final = 2.5
_CALLERS: Final = 32
_LEAST: Final = {"1 ms": (32, 0.85), "10 ms": (8, 0.97), "75 ms": (4, 0.99)}
_MOST_OF_GRPC: Final = 0.45
_MOST_OF_REST: Final = 1.5
_MOST_OF_OPEN: Final = 1.1
_CANNED: Final = Path(__file__).parent / "peers" / "programs" / "starlette_canned.py"


@dataclass(frozen=True, slots=True)
class _Served:
    """A model in a separate server."""

    target: MeasuredModel
    server: Server
    folder: Path

    def checked_call(self, interface: Interface) -> InferCall:
        """Prepare the request and send it once."""
        checked_call = infer_call(interface, self.target, self.server, self.folder)
        check_answer(checked_call)
        return checked_call


def _serve(case: ModelCase, stack: ExitStack) -> _Served:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model = network(case.size, is_dynamic=case.is_dynamic)
    name, array = input_of(model)
    config = write_repository(folder, {"measured": model}, {"measured": case.settings})
    target = MeasuredModel("measured", name, array, model.outputs[0].any_name)
    return _Served(target, stack.enter_context(ovms(config)), folder)


def _with_openvino(size: str, *, is_dynamic: bool) -> Row:
    case = ModelCase(size, is_dynamic, "default", 0)
    callers, goal = _LEAST[size]
    seconds = max(_SECONDS, _CYCLES * callers * case.seconds)
    with ExitStack() as stack:
        served = _serve(case, stack)
        alone = stack.enter_context(openvino_alone(served.folder / "measured" / "1" / "model.xml", case.settings))
        checked_call = served.checked_call("gRPC")
        load(checked_call, callers, SETTLING_SECONDS, served.server.process)
        rounds = [
            (alone.rate(seconds / 2), load(checked_call, callers, seconds, served.server.process))
            for _ in range(_ROUNDS + 1)
        ][1:]
    ratio = statistics.median(figures.rate / bare for bare, figures in rounds)
    rate, bare = statistics.median(f.rate for _, f in rounds), statistics.median(b for b, _ in rounds)
    shape = "an open batch" if is_dynamic else "a fixed shape"
    return Row(
        f"{size} with {shape} over gRPC, concurrency {callers}, against the best of OpenVINO alone",
        ratio,
        f">= {goal}",
        ratio >= goal,
        f"{rate:.0f}/s, {bare:.0f}/s by OpenVINO; CPU {statistics.median(f.cpu_us for _, f in rounds):.0f} us",
    )


def _cpu_row(what: str, most: float, ours: list[LoadFigures], theirs: list[LoadFigures]) -> Row:
    ratio = statistics.median(a.cpu_us / b.cpu_us for a, b in zip(ours, theirs, strict=True))
    a, b = (statistics.median(each.cpu_us for each in side) for side in (ours, theirs))
    return Row(
        f"CPU a call, trivial model, {what}", ratio, f"<= {most}", ratio <= most, f"{a:.0f} us against {b:.0f} us"
    )


def _trivial() -> list[Row]:
    with ExitStack() as stack:
        fixed, open_ = (_serve(ModelCase("10 us", is_open, "default", 0), stack) for is_open in (False, True))
        (grpc, http) = free_ports(2)
        canned = stack.enter_context(script(["benchmarks/grpc_unary.py", str(grpc)], grpc))
        starlette = stack.enter_context(script([str(_CANNED), str(http)], http, python=str(python_of("litserve"))))
        checked_call = {
            "fixed": (fixed.checked_call("gRPC"), fixed.server),
            "open": (open_.checked_call("gRPC"), open_.server),
            "REST": (fixed.checked_call("REST JSON"), fixed.server),
        }
        to = (fixed.server.grpc, fixed.server.rest)
        checked_call["grpc.aio"] = (
            replace(checked_call["fixed"][0], url=_moved(checked_call["fixed"][0].url, to[0], grpc)),
            canned,
        )
        checked_call["Starlette"] = (
            replace(checked_call["REST"][0], url=_moved(checked_call["REST"][0].url, to[1], http)),
            starlette,
        )
        taken: dict[str, list[LoadFigures]] = {name: [] for name in checked_call}
        for number in range(_ROUNDS + 1):
            for name, (each, server) in checked_call.items():
                figures = load(each, _CALLERS, _SECONDS, server.process)
                taken[name] += [figures] if number else []
    return [
        _cpu_row("gRPC, against grpc.aio with a canned answer", _MOST_OF_GRPC, taken["fixed"], taken["grpc.aio"]),
        _cpu_row("gRPC, an open batch against a fixed one", _MOST_OF_OPEN, taken["open"], taken["fixed"]),
        _cpu_row(
            "JSON, against uvicorn and Starlette with a canned answer", _MOST_OF_REST, taken["REST"], taken["Starlette"]
        ),
    ]


def _moved(url: str, port: int, other: int) -> str:
    return url.replace(f":{port}/", f":{other}/")


def run() -> list[Row]:
    """Measure in turn, and compare medians."""
    return [
        *_trivial(),
        *(_with_openvino(size, is_dynamic=is_dynamic) for size in _LEAST for is_dynamic in (False, True)),
    ]
