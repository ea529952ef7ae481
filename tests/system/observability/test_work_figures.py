"""Metrics of service processes."""

from __future__ import annotations

import os
import re
import signal

import trio
import trio.testing

from ovmstrio.core.census import current_census, owned_by
from ovmstrio.observability.metrics import Metrics
from ovmstrio.work.loop_load import current_loop_load
from ovmstrio.work.processes import WorkerProcess
from tests.support.obedient_program import PROGRAM


def _watching() -> Metrics:
    metrics, load = Metrics(), current_loop_load()
    metrics.watch(current_census(), lambda: (tuple(load.turns), load.turn_seconds))
    return metrics


def _figures(metrics: Metrics, name: str) -> dict[str, float]:
    text = metrics.render().decode()
    found = re.findall(rf'(?m)^ovmstrio_(\w+){{name="{name}"}} (\S+)$', text)
    return {family: float(value) for family, value in found}


async def test_processes_of_a_service_are_counted_with_their_memory_and_ends() -> None:
    metrics = _watching()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for restarts, ends in enumerate((False, True)):
                with owned_by("mine"):
                    process = WorkerProcess(PROGRAM)
                await process.start(nursery, "work")
                figures = _figures(metrics, "mine")
                assert figures.pop("worker_memory_bytes") > 2**20
                assert figures == {"worker_processes": 1, "worker_restarts_total": 0}
                if ends:
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGKILL)
                    await process.ended.wait()
                else:
                    await process.close(5)
                assert _figures(metrics, "mine") == {"worker_restarts_total": restarts}
