"""CPU time of the console's stream in the event loop per second, with 50 services that are all called.

The clock jumps from second to second, so that the result contains only the CPU time of the event loop's thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from benchmarks.report import Row
from ovmstrio.config.specs import ModelSpec
from ovmstrio.console.aggregator import ConsoleAggregator
from ovmstrio.console.stream import FrameMaker, StreamFilter, send_events
from ovmstrio.core.events import OK, ApiInterface, CallEvent
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.telemetry.logs import configure_logs
from ovmstrio.telemetry.recent_history import RecentHistory
from tests.support.stub_registry import load_pass_through, registry_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.transport.http.sse import EventSink

__all__ = ["run"]

SERVICES: Final = 50
SECONDS: Final = 200
GOAL_MS: Final = 5.0
_INTERFACE: Final = ApiInterface("KServe", "gRPC", "ModelInfer")


class _Viewer:
    """Receiver of events that counts their bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    async def send(self, data: bytes) -> None:
        """Count the bytes of events."""
        self.bytes += len(data)
        await trio.lowlevel.checkpoint()


async def _may() -> bool:
    return True


def _call_all(plane: DataPlane, names: Sequence[str], second: int) -> None:
    """Record calls of every service with durations that vary by second."""
    for number, name in enumerate(names):
        event = CallEvent(
            name, "1", "model", _INTERFACE, "ModelInfer", seconds=1e-4 * (1 + (number + second) % 9), code=OK
        )
        plane.call_statistics.call_finished(event)


async def _milliseconds(viewers: int) -> tuple[float, float]:
    """Return the milliseconds per second, and the bytes that a viewer receives."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "1").mkdir()
        registry = registry_of(load_pass_through, poll_seconds=0)
        plane, names = DataPlane(registry), [f"service_{number}" for number in range(SERVICES)]
        async with trio.open_nursery() as nursery:
            await nursery.start(registry.run)
            await registry.apply([ModelSpec.model_validate({"name": name, "base_path": folder}) for name in names])
            plane.begin_serving()
            sinks = [_Viewer() for _ in range(viewers)]
            taken = await _watch(plane, names, sinks)
            nursery.cancel_scope.cancel()
    return taken, sinks[0].bytes / SECONDS


async def _watch(plane: DataPlane, names: Sequence[str], sinks: Sequence[_Viewer]) -> float:
    """Run viewers for some seconds and return the median of CPU time per second."""
    gathering = ConsoleAggregator(plane, RecentHistory())
    frames, taken = FrameMaker(plane, gathering), []

    async def view(sink: _Viewer) -> None:
        await send_events(plane, frames, StreamFilter(), cast("EventSink", sink), may_see_bodies=_may)

    async with trio.open_nursery() as nursery:
        for sink in sinks:
            nursery.start_soon(view, sink)
        await wait_all_tasks_blocked()
        for second in range(SECONDS):
            _call_all(plane, names, second)
            before = time.thread_time()
            await trio.sleep_until(trio.current_time() // 1 + 1)
            await wait_all_tasks_blocked()
            taken.append(time.thread_time() - before)
        nursery.cancel_scope.cancel()
    return statistics.median(taken) * 1e3


def run() -> list[Row]:
    """Measure with one viewer, and with twenty."""
    configure_logs(level="ERROR")
    measured = {viewers: trio.run(_milliseconds, viewers, clock=MockClock(autojump_threshold=0)) for viewers in (1, 20)}
    (taken, size), (of_many, _) = measured[1], measured[20]
    return [
        Row(
            f"The console's stream with {SERVICES} services, each called once a second: ms of the loop a second",
            taken,
            f"< {GOAL_MS:g}",
            taken < GOAL_MS,
            f"{size / 1e3:.1f} kB a second for a viewer; {of_many:.2f} ms with 20 viewers",
        )
    ]
