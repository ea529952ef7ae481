"""Load order: dependencies between services, circular dependencies, and change detection.

::

    Kind.depends_on ─> calls of each record ─┬─> circular and missing dependencies: problems of the record
                                             └─> in_order: one task per record, which waits for its callees
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.config.documents import did_you_mean
from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import Problem
from ovmstrio.serving.records import DEFAULT_VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from ovmstrio.serving.kind import Dependency
    from ovmstrio.serving.model_versions import Listing
    from ovmstrio.serving.records import ServiceRecord


class ChangeDetector:
    """Fingerprints files and the loads of callees."""

    def __init__(self, services: Mapping[str, ServiceRecord]) -> None:
        self.services = services

    async def list(self, record: ServiceRecord, spec: ServableSpec) -> Listing:
        """List the versions of a service; raises as ``Kind.list_versions``."""
        listing = await trio.to_thread.run_sync(record.kind.list_versions, spec)
        return replace(listing, mark=listing.mark + self._callee_loads(record))

    async def of(self, record: ServiceRecord, spec: ServableSpec, directory: Path) -> str:
        """Return the fingerprint that a version would have if it were loaded now."""
        called = self._callee_loads(record)
        return await trio.to_thread.run_sync(record.kind.files_mark, spec, directory) + called

    def _callee_loads(self, record: ServiceRecord) -> str:
        return "".join(f"\n{call.name}:{call.version}:{self._load_id(call)}" for call in record.calls if call.reloads)

    def _load_id(self, call: Dependency) -> str:
        service = self.services.get(call.name)
        return "" if service is None else service.loaded(int(call.version or DEFAULT_VERSION))


def find_cycles(specs: Iterable[ServableSpec], calls: Mapping[str, Sequence[str]]) -> dict[str, Problem]:
    """Return a problem for each service that calls itself through others, by name.

    Loading cannot detect this: during a configuration change, each service still finds the old ones.
    """
    found = {}
    for spec in specs:
        path = _path_to_itself(spec.name, calls)
        if path:
            code = f"{spec.kind.replace(' ', '_').upper()}_CALLS_ITSELF"
            message = f"{code}: it calls itself through others: {' -> '.join(path)}"
            found[spec.name] = spec.placed(Problem(message, suggestion="have one of them call a model instead"))
    return found


def callers_before_callees(calls: Mapping[str, Sequence[str]]) -> list[str]:
    """Return names ordered so that callers come before callees, except within circles."""
    acyclic = {
        name: () if _path_to_itself(name, calls) else [each for each in called if each in calls]
        for name, called in calls.items()
    }
    return list(reversed(tuple(TopologicalSorter(acyclic).static_order())))


def _path_to_itself(start: str, calls: Mapping[str, Iterable[str]]) -> Sequence[str]:
    """Return the shortest path from a service to itself; empty if there is none."""
    paths: deque[tuple[str, ...]] = deque([(start,)])
    seen = {start}
    while paths:
        path = paths.popleft()
        for callee in calls.get(path[-1], ()):
            if callee == start:
                return (*path, start)
            if callee not in seen:
                seen.add(callee)
                paths.append((*path, callee))
    return ()


log = structlog.get_logger(__name__)


async def update_dependencies(services: Mapping[str, ServiceRecord]) -> None:
    """Update the dependencies, circular dependencies and missing callees of all configured services."""
    configured = [(record, spec) for record in services.values() if (spec := record.spec) is not None]
    if not configured:
        return
    found = await trio.to_thread.run_sync(lambda: [tuple(each.kind.depends_on(spec)) for each, spec in configured])
    for (record, _), calls in zip(configured, found, strict=True):
        record.calls = calls
    names = {record.name: [call.name for call in record.calls] for record, _ in configured}
    circles = find_cycles([spec for _, spec in configured], names)
    for record, _ in configured:
        record.circle = circles.get(record.name)
        unmet = tuple(
            _unmet(call, call.place, names)
            for call in record.calls
            if call.place is not None and call.name not in names
        )
        for problem in unmet if unmet != record.unmet else ():
            log.warning("dependency missing", kind=record.kind.name, name=record.name, problem=str(problem))
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


async def run_in_load_order(
    records: Collection[ServiceRecord], work: Callable[[ServiceRecord], Awaitable[None]]
) -> None:
    """Run ``work`` on each record after its callees, otherwise concurrently; circular dependencies are ignored."""
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


def retirement_order(records: Collection[ServiceRecord]) -> list[ServiceRecord]:
    """Return records in retirement order: callers before callees."""
    by_name = {record.name: record for record in records}
    calls = {record.name: [call.name for call in record.calls] for record in records}
    return [by_name[name] for name in callers_before_callees(calls)]
