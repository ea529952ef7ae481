"""In which order services are loaded and retired: what is called comes first, everything else side by side.

::

    Kind.depends_on ─> calls of each record ─┬─> circles, names that nothing has: problems of the record
                                             └─> in_order: a task a record, which waits for those that it calls
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.config.findings import did_you_mean
from ovmstrio.core.errors import Problem
from ovmstrio.registry.circles import callers_first, find_circles

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from ovmstrio.registry.records import ServiceRecord
    from ovmstrio.runtimes.kind import Dependency

__all__ = ["callers_before", "find_calls", "in_order"]

log = structlog.get_logger(__name__)


async def find_calls(services: Mapping[str, ServiceRecord]) -> None:
    """Note of everything that is configured what it calls, and what is wrong with that.

    Cancellation: once the files have been looked at; nothing is held.
    """
    configured = [(record, spec) for record in services.values() if (spec := record.spec) is not None]
    if not configured:
        return
    found = await trio.to_thread.run_sync(lambda: [tuple(each.kind.depends_on(spec)) for each, spec in configured])
    for (record, _), calls in zip(configured, found, strict=True):
        record.calls = calls
    names = {record.name: [call.name for call in record.calls] for record, _ in configured}
    circles = find_circles([spec for _, spec in configured], names)
    for record, _ in configured:
        record.circle = circles.get(record.name)
        unmet = tuple(
            _unmet(call, call.place, names)
            for call in record.calls
            if call.place is not None and call.name not in names
        )
        for problem in unmet if unmet != record.unmet else ():
            log.warning(record.kind.name, name=record.name, problem=str(problem))
        record.unmet = unmet


def _unmet(call: Dependency, place: Problem, configured: Collection[str]) -> Problem:
    return Problem(
        f"{place.message}, and nothing of that name is configured",
        place.file,
        place.line,
        place.path,
        suggestion=did_you_mean(call.name, configured),
        severity="warning",
    )


async def in_order(records: Collection[ServiceRecord], work: Callable[[ServiceRecord], Awaitable[None]]) -> None:
    """Do something with each record once it is done with all that the record calls; a circle waits for nothing.

    Cancellation: as ``work``, of which any number goes on at once.
    """
    done = {record.name: trio.Event() for record in records}

    async def follow(record: ServiceRecord) -> None:
        for call in record.calls if record.circle is None else ():
            if call.name in done:
                await done[call.name].wait()
        await work(record)
        done[record.name].set()

    async with trio.open_nursery() as nursery:
        for record in records:
            nursery.start_soon(follow, record)


def callers_before(records: Collection[ServiceRecord]) -> list[ServiceRecord]:
    """Order records for retirement: each before what it calls."""
    by_name = {record.name: record for record in records}
    calls = {record.name: [call.name for call in record.calls] for record in records}
    return [by_name[name] for name in callers_first(calls)]
