"""What is told of a server as a whole, where several processes are one server.

::

    question ──> one process: its own figures ─┐
                 ├─ the others: theirs ────────┴─> one answer
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import NotFound, NotReady, NotSupported
from ovmstrio.core.events import Door
from ovmstrio.core.service import SequenceInfo
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.telemetry.call_statistics import VersionStatistics
from ovmstrio.telemetry.summed_metrics import counted_only, restricted, sum_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["answer_sibling", "leave_last_figures", "metrics_of_all", "sequences_of_all", "statistics_of_all"]

_ATTEMPTS: Final = 3
_ANSWER_SECONDS: Final = 5.0
"""How long another process has to tell its metrics; of one that is stuck those count that it told last."""
_TOTALS: Final = ("success", "fail", "queue", "compute", "rest")

Counted = tuple[str, str, VersionStatistics]


async def metrics_of_all(
    plane: DataPlane, families: Sequence[str], limiter: trio.CapacityLimiter, *, is_open: bool = False
) -> bytes | None:
    """Print the metrics of the server, sums over all processes, or of the families named; None when they are off.

    With ``is_open`` they are in OpenMetrics's format.

    Cancellation: at once; a thread goes on.
    """
    own = await trio.to_thread.run_sync(partial(plane.render_metrics, families, is_open=is_open), limiter=limiter)
    if own is None or plane.siblings is None:
        return own
    for _ in range(_ATTEMPTS):
        begun = plane.siblings.past_changes(is_open=is_open)
        questions = {row: ["metrics", list(families), is_open] for row in plane.siblings.others}
        others = await plane.siblings.ask_soon(questions, _ANSWER_SECONDS)
        past = plane.siblings.past_figures(others, is_open=is_open)
        # One that has ended meanwhile would be counted twice, or not at all.
        if begun is not None and plane.siblings.past_changes(is_open=is_open) == begun:
            break
    _leave(plane, own, families, is_open=is_open)
    texts = [own, *filter(None, others.values())]
    return await trio.to_thread.run_sync(_sum, texts, past, families, limiter=limiter)


def _sum(texts: list[bytes], past: list[bytes], families: Sequence[str]) -> bytes:
    counted = map(counted_only, past)
    return sum_metrics([*texts, *((restricted(text, families) for text in counted) if families else counted)])


def _leave(plane: DataPlane, own: bytes, families: Sequence[str], *, is_open: bool) -> None:
    """Leave what has been told where it is found when this process has ended; parts of it say nothing of the rest."""
    if plane.siblings is not None and not families:
        plane.siblings.leave_figures(own, is_open=is_open)


def leave_last_figures(plane: DataPlane) -> None:
    """Leave all that this process has counted, for it ends."""
    for is_open in (False, True):
        own = plane.render_metrics(is_open=is_open)
        if own is not None:
            _leave(plane, own, (), is_open=is_open)


async def statistics_of_all(plane: DataPlane, name: str, version: str, door: Door) -> list[Counted]:
    """Tell what all processes have counted of calls; see :meth:`DataPlane.statistics`.

    Raises:
        ServerError: as there.

    Cancellation: at once.
    """
    own = plane.statistics(name, version, door)
    if plane.siblings is None:
        return own
    found = {(each, number): deepcopy(counted) for each, number, counted in own}
    for rows in await plane.siblings.ask_all("statistics", name, version):
        for each, number, fields in rows:
            if (each, number) in found:
                _add(found[each, number], fields)
    return [(each, number, counted) for (each, number), counted in found.items()]


async def sequences_of_all(plane: DataPlane, name: str, version: str, door: Door) -> list[SequenceInfo]:
    """List the live sequences of all processes, by id, texts behind numbers; see :meth:`DataPlane.sequences`.

    Raises:
        ServerError: as there.

    Cancellation: at once.
    """
    found = plane.sequences(name, version, door)
    if plane.siblings is not None:
        others = await plane.siblings.ask_all("sequences", name, version)
        found = [*found, *(SequenceInfo(**fields) for rows in others for fields in rows)]
        found.sort(key=lambda info: (isinstance(info.id, str), info.id))
    return found


async def answer_sibling(plane: DataPlane, question: str, arguments: Sequence[Any]) -> Any:
    """Answer what another process of the server asks, which has seen to it that its client may.

    Raises:
        NotReady: nothing here answers that question yet.

    Cancellation: at once; a thread goes on.
    """
    if question == "metrics":
        families, is_open = arguments
        told = await trio.to_thread.run_sync(partial(plane.render_metrics, families, is_open=is_open))
        if told is not None:
            _leave(plane, told, families, is_open=is_open)
        return told
    if question not in _ANSWERS:
        raise NotReady(f"nothing answers {question} in this process yet")
    try:
        return _ANSWERS[question](plane, *arguments)
    except (NotFound, NotReady, NotSupported):
        return []  # It is loaded a little later here than there.


def _statistics(plane: DataPlane, name: str, version: str) -> list[list[Any]]:
    counted = DataPlane.statistics(plane, name, version, _NO_DOOR)
    return [[each, number, asdict(counts)] for each, number, counts in counted]


def _sequences(plane: DataPlane, name: str, version: str) -> list[dict[str, Any]]:
    return [asdict(info) for info in DataPlane.sequences(plane, name, version, _NO_DOOR)]


_ANSWERS: Final[dict[str, Callable[..., Any]]] = {"statistics": _statistics, "sequences": _sequences}
_NO_DOOR: Final = Door("", "gRPC")


def _add(into: VersionStatistics, fields: dict[str, Any]) -> None:
    for name in _TOTALS:
        total, more = getattr(into, name), fields[name]
        total.count += more["count"]
        total.seconds += more["seconds"]
    into.last_call = max(into.last_call, fields["last_call"])
