"""What the console tells of one service: what it takes and gives, how it is wired, and what its parts count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from ovmstrio.api.console.service_rows import service_row
from ovmstrio.core.census import current_census
from ovmstrio.core.errors import ServerError
from ovmstrio.core.servable import SequenceServable
from ovmstrio.core.time_bands import time_quantile
from ovmstrio.runtimes.kind import Takes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.drawing import Drawing
    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.inspection import Inside, NodeTally
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["MOST_SEQUENCES", "node_figures", "service_document", "tally_times"]

MOST_SEQUENCES: Final = 200
_MILLISECONDS: Final = 1e3


def service_document(plane: DataPlane, name: str) -> dict[str, Any]:
    """Describe one service.

    Raises:
        NotFound: nothing has that name, or had it.
    """
    document = service_row(plane, name, plane.registry.version_statuses(name))
    try:
        service = plane.registry.peek(name)
        inside = plane.registry.look_inside(name)
    except ServerError as error:
        return {**document, "problem": error.message}
    metadata = service.metadata
    return {
        **document,
        "platform": metadata.platform,
        "inputs": [_tensor(each) for each in metadata.inputs],
        "outputs": [_tensor(each) for each in metadata.outputs],
        "tasks": _tasks(plane, name, service),
        "drawing": None if inside.drawing is None else _drawing(inside.drawing),
        "labels": list(metadata.labels[:1000]),
        **_figures(name, inside),
        **_sequences(service),
    }


def node_figures(plane: DataPlane, name: str) -> dict[str, Any]:
    """Tell what the nodes and streams of a service have counted, its facts, and its sequences.

    Raises:
        NotFound: nothing has that name, or it is not served now.
        VersionLoading: it is not loaded yet.
    """
    service = plane.registry.peek(name)
    return {**_figures(name, plane.registry.look_inside(name)), **_sequences(service)}


def _workers(name: str) -> dict[str, Any]:
    """Tell of the threads and processes that belong to a service."""
    census = current_census()
    pools = [pool for owner, pool in census.pools() if owner == name]
    pids = [process.pid for owner, process in census.processes() if owner == name and process.pid is not None]
    facts: dict[str, Any] = {}
    if pools:
        facts["threads of its own"] = sum(pool.threads for pool in pools)
        facts["calls that wait for a thread"] = sum(pool.waiting for pool in pools)
        facts["stuck threads"] = sum(pool.stuck for pool in pools)
    batches = [each for owner, each in census.batches() if owner == name]
    if batches:
        facts["requests that wait for their batch"] = sum(each.waiting for each in batches)
    if pids or name in census.ended:
        facts["processes"] = pids
        facts["processes that ended by themselves"] = census.ended[name]
    return facts


def _figures(name: str, inside: Inside) -> dict[str, Any]:
    return {
        "facts": {**inside.facts, **_workers(name)},
        "nodes": {key: _tally(tally) for key, tally in inside.nodes.items()},
        "streams": {str(number): tally.passed for number, tally in inside.streams.items()},
        "waiting": dict(inside.waiting),
    }


def _tally(tally: NodeTally) -> dict[str, Any]:
    return {
        "runs": tally.runs,
        "failures": tally.failures,
        "active": tally.active,
        "seconds": round(tally.seconds, 6),
        **tally_times(tally.times),
    }


def tally_times(times: Sequence[int]) -> dict[str, Any]:
    """Tell the percentiles of times that are counted in bands, and how many there are in each band."""
    median, late = (time_quantile(times, part) for part in (0.5, 0.99))
    return {
        "p50": None if median is None else round(median * _MILLISECONDS, 3),
        "p99": None if late is None else round(late * _MILLISECONDS, 3),
        "times": {str(band): count for band, count in enumerate(times) if count},
    }


def _tasks(plane: DataPlane, name: str, service: object) -> list[str]:
    """Tell what a service makes of texts, if it does."""
    if Takes.GENERATION not in plane.registry.takes_of(name):
        return []
    return sorted(task.value for task in cast("GenerativeService", service).tasks)


def _sequences(service: object) -> dict[str, Any]:
    if not isinstance(service, SequenceServable):
        return {}
    live = service.sequences()
    rows = [
        {
            "id": str(each.id),
            "age_seconds": round(each.age_seconds, 1),
            "idle_seconds": round(each.idle_seconds, 1),
            "requests": each.requests,
        }
        for each in live[:MOST_SEQUENCES]
    ]
    return {"sequences": rows, "sequence_count": len(live)}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype.name, "shape": [str(dim) for dim in spec.shape]}


def _drawing(drawing: Drawing) -> dict[str, Any]:
    return {
        "layers": [
            [
                {"key": box.key, "kind": box.kind, "title": box.title, "subtitle": box.subtitle, "notes": box.notes}
                for box in layer
            ]
            for layer in drawing.layers
        ],
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "stream": edge.stream,
                "label": edge.label,
                "is_back": edge.is_back,
                "is_side": edge.is_side,
            }
            for edge in drawing.edges
        ],
    }
