"""The traces of one server: recorded while it runs, exported where the environment says so, and flushed at its end."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.core.extras import Extra, way_to_install
from ovmstrio.core.otel_variables import asks_for_traces
from ovmstrio.core.tracing import spans_of_server
from ovmstrio.core.unrecorded_spans import unrecorded_spans
from ovmstrio.observability.tracing.call_tracing import CallTracing, WatchedCalls
from ovmstrio.observability.tracing.recent import RecentTraces
from ovmstrio.observability.tracing.sampling import ALWAYS
from ovmstrio.observability.tracing.sampling_variables import sampling_of, warn_of_propagators
from ovmstrio.runtimes.table import KINDS
from ovmstrio.work.late_imports import import_aside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ovmstrio.core.events import CallObserver, RequestObserver

__all__ = ["ServerTraces", "open_traces"]

log = structlog.get_logger(__name__)

_OTEL: Final = "ovmstrio.observability.tracing.otel"
_FLUSH_SECONDS: Final = 5.0
_SERVERS_FAULT: Final = 500


@dataclass(frozen=True, slots=True)
class ServerTraces:
    """What a server has of traces.

    Attributes:
        recent: the last ones; None where none are kept.
        calls: is told of calls.
        requests: is told of requests.
    """

    recent: RecentTraces | None = None
    calls: tuple[CallObserver, ...] = ()
    requests: tuple[RequestObserver, ...] = ()


@asynccontextmanager
async def open_traces(*, is_watched: bool = False) -> AsyncIterator[ServerTraces]:
    """Have calls be traced within the block, if the environment asks for it by OpenTelemetry's variables.

    Args:
        is_watched: whether somebody may look at recent traces, so that some calls are recorded meanwhile in any case.

    Ownership: exporters and their threads, until the block is left.
    Cancellation: what has been recorded is exported all the same, with a bound of some seconds.
    """
    otel = await _opentelemetry() if asks_for_traces(os.environ) else None
    recent = RecentTraces()
    if otel is None:
        if not is_watched:
            yield ServerTraces()
            return
        # Nobody is told of requests meanwhile, as that would cost something of each.
        tracing = CallTracing(ALWAYS, [recent], is_failure=_is_failure, is_told_of_requests=False)
        yield ServerTraces(recent, (WatchedCalls(tracing, recent),))
        return
    warn_of_propagators(os.environ)
    export = await trio.to_thread.run_sync(otel.Export, os.environ, recent)
    tracing = CallTracing(
        sampling_of(os.environ),
        [recent, export],
        is_failure=_is_failure,
        of_server=[export],
        user=otel.UserSpans(),
        has_user_code=_has_user_code,
    )
    before, quiet_before = spans_of_server.set(tracing.of_server), unrecorded_spans.set(tracing.unrecorded_span)
    try:
        yield ServerTraces(recent, (tracing,), (tracing,))
    finally:
        unrecorded_spans.reset(quiet_before)
        spans_of_server.reset(before)
        with trio.move_on_after(_FLUSH_SECONDS, shield=True) as scope:
            await trio.to_thread.run_sync(export.close, abandon_on_cancel=True)
        if scope.cancelled_caught:
            log.warning("traces could not be exported in time", seconds=_FLUSH_SECONDS)


async def _opentelemetry() -> Any:
    try:
        return await import_aside(_OTEL)
    except ImportError as error:
        log.warning(
            "OTEL_ variables ask for traces, and OpenTelemetry is not installed: there are none",
            reason=str(error),
            install=way_to_install(Extra.OTEL),
        )
        return None


def _is_failure(error: BaseException) -> bool:
    # What speaks gRPC is imported beside the first loads, and not before them.
    from ovmstrio.wire.statuses import status_of  # noqa: PLC0415 - as said

    return not isinstance(error, ServerError) or status_of(error).http >= _SERVERS_FAULT


def _has_user_code(kind: str) -> bool:
    known = KINDS.get(kind)
    return known is None or known.runs_user_code
