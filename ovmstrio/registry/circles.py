"""Services that call each other, of which none may come to call itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter

from ovmstrio.config.specs import ServableSpec
from ovmstrio.core.errors import Problem

__all__ = ["callers_first", "find_circles"]


def find_circles(specs: Iterable[ServableSpec], calls: Mapping[str, Sequence[str]]) -> dict[str, Problem]:
    """Give a problem for each service that calls itself through others, by its name.

    This cannot be left to their loading: while another configuration is taken over, each finds the others as they were.
    """
    found = {}
    for spec in specs:
        way = _way_back(spec.name, calls)
        if way:
            code = f"{spec.kind.replace(' ', '_').upper()}_CALLS_ITSELF"
            message = f"{code}: it calls itself through others: {' -> '.join(way)}"
            found[spec.name] = spec.placed(Problem(message, suggestion="have one of them call a model instead"))
    return found


def callers_first(calls: Mapping[str, Sequence[str]]) -> list[str]:
    """Order names so that each comes before what it calls, except within circles."""
    acyclic = {
        name: () if _way_back(name, calls) else [each for each in called if each in calls]
        for name, called in calls.items()
    }
    return list(reversed(tuple(TopologicalSorter(acyclic).static_order())))


def _way_back(start: str, calls: Mapping[str, Iterable[str]]) -> Sequence[str]:
    """Give the shortest way from a service to itself; empty if there is none."""
    ways: deque[tuple[str, ...]] = deque([(start,)])
    seen = {start}
    while ways:
        way = ways.popleft()
        for callee in calls.get(way[-1], ()):
            if callee == start:
                return (*way, start)
            if callee not in seen:
                seen.add(callee)
                ways.append((*way, callee))
    return ()
