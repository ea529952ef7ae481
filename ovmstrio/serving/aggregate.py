"""Metrics, statistics and sequences of all worker processes together."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import NotFound, NotReady, NotSupported
from ovmstrio.core.events import ApiInterface
from ovmstrio.core.service import SequenceInfo
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.telemetry.aggregate_metrics import select_families, sum_metrics, without_gauges
from ovmstrio.telemetry.call_statistics import VersionStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

_ATTEMPTS: Final = 3
_METRICS_TIMEOUT_SECONDS: Final = 5.0
"""Time limit for a worker's metrics; a stuck worker counts with its last saved ones."""
_QUERY_TIMEOUT_SECONDS: Final = 5.0
"""Time limit for statistics and sequences, whose sums without a stuck worker would be wrong."""
_TOTAL_FIELDS: Final = ("success", "fail", "queue", "compute", "rest")

VersionCounts = tuple[str, str, VersionStatistics]


async def aggregate_metrics(
    plane: DataPlane, families: Sequence[str], limiter: trio.CapacityLimiter, *, is_open: bool = False
) -> bytes | None:
    """Return the metrics text summed over all workers, optionally of some families only; None when metrics are off.

    ``is_open`` selects the OpenMetrics format.
    """
    own = await trio.to_thread.run_sync(partial(plane.render_metrics, families, is_open=is_open), limiter=limiter)
    if own is None or plane.peers is None:
        return own
    for _ in range(_ATTEMPTS):
        begun = plane.peers.metrics_generation(is_open=is_open)
        calls = {row: ["metrics", list(families), is_open] for row in plane.peers.others}
        others = await plane.peers.call_within(calls, _METRICS_TIMEOUT_SECONDS)
        past = plane.peers.retained_metrics(others, is_open=is_open)
        # A worker that exited meanwhile would be counted twice, or not at all.
        if begun is not None and plane.peers.metrics_generation(is_open=is_open) == begun:
            break
    _save_metrics(plane, own, families, is_open=is_open)
    texts = [own, *filter(None, others.values())]
    return await trio.to_thread.run_sync(_sum, texts, past, families, limiter=limiter)


def _sum(texts: list[bytes], history: list[bytes], families: Sequence[str]) -> bytes:
    counted = map(without_gauges, history)
    return sum_metrics([*texts, *((select_families(text, families) for text in counted) if families else counted)])


def _save_metrics(plane: DataPlane, own: bytes, families: Sequence[str], *, is_open: bool) -> None:
    """Save a worker's metrics for the time after its exit; a partial text is not saved."""
    if plane.peers is not None and not families:
        plane.peers.save_metrics(own, is_open=is_open)


def save_final_metrics(plane: DataPlane) -> None:
    """Save all metrics of this worker because it exits."""
    for is_open in (False, True):
        own = plane.render_metrics(is_open=is_open)
        if own is not None:
            _save_metrics(plane, own, (), is_open=is_open)


async def aggregate_statistics(
    plane: DataPlane, name: str, version: str, api_interface: ApiInterface
) -> list[VersionCounts]:
    """Return call statistics summed over all workers; see :meth:`DataPlane.statistics`.

    Raises:
        NotReady: a worker does not answer in time.
    """
    own = plane.statistics(name, version, api_interface)
    if plane.peers is None:
        return own
    found = {(each, number): deepcopy(counted) for each, number, counted in own}
    for rows in await plane.peers.call_all("statistics", name, version, limit_seconds=_QUERY_TIMEOUT_SECONDS):
        for each, number, fields in rows:
            if (each, number) in found:
                _add(found[each, number], fields)
    return [(each, number, counted) for (each, number), counted in found.items()]


async def aggregate_sequences(
    plane: DataPlane, name: str, version: str, api_interface: ApiInterface
) -> list[SequenceInfo]:
    """Return the live sequences of all workers by id, numbers before texts; see :meth:`DataPlane.sequences`."""
    found = plane.sequences(name, version, api_interface)
    if plane.peers is not None:
        others = await plane.peers.call_all("sequences", name, version, limit_seconds=_QUERY_TIMEOUT_SECONDS)
        found = [*found, *(SequenceInfo(**fields) for rows in others for fields in rows)]
        found.sort(key=lambda info: (isinstance(info.id, str), info.id))
    return found


async def answer_peer(plane: DataPlane, method: str, arguments: Sequence[Any]) -> Any:
    """Answer a question of another worker, which has checked its client's permission.

    Raises:
        NotReady: the question is unknown.
    """
    if method == "metrics":
        families, is_open = arguments
        own = await trio.to_thread.run_sync(partial(plane.render_metrics, families, is_open=is_open))
        if own is not None:
            _save_metrics(plane, own, families, is_open=is_open)
        return own
    if method not in _HANDLERS:
        raise NotReady(f'worker request "{method}" is not supported')
    try:
        return _HANDLERS[method](plane, *arguments)
    except (NotFound, NotReady, NotSupported):
        return []  # This worker may load the model slightly later than the asking one.


def _statistics(plane: DataPlane, name: str, version: str) -> list[list[Any]]:
    counted = DataPlane.statistics(plane, name, version, _NO_INTERFACE)
    return [[each, number, asdict(counts)] for each, number, counts in counted]


def _sequences(plane: DataPlane, name: str, version: str) -> list[dict[str, Any]]:
    return [asdict(info) for info in DataPlane.sequences(plane, name, version, _NO_INTERFACE)]


_HANDLERS: Final[dict[str, Callable[..., Any]]] = {"statistics": _statistics, "sequences": _sequences}
_NO_INTERFACE: Final = ApiInterface("", "gRPC")


def _add(into: VersionStatistics, fields: dict[str, Any]) -> None:
    for name in _TOTAL_FIELDS:
        total, more = getattr(into, name), fields[name]
        total.count += more["count"]
        total.seconds += more["seconds"]
    into.last_call = max(into.last_call, fields["last_call"])
