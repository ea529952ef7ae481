"""Log lines of requests, batches and workers."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from ovmstrio.runtimes.ops.observing.hooks import OpHooks, Span
from ovmstrio.runtimes.ops.observing.samples import working_on

__all__ = ["OpLog"]

_log = structlog.get_logger(__name__)


class OpLog(OpHooks):
    """Logs what the executor reports, with the ids of the samples; an observer of one pipeline."""

    def __init__(self) -> None:
        self._log_ids: dict[int, int] = {}

    def request_started(self, data_id: int, log_id: int, *, profile: bool = False) -> None:  # noqa: ARG002
        """Remember the ids that belong together."""
        self._log_ids[data_id] = log_id

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        """Log which samples went together; a single one is not worth a line."""
        if len(data_ids) > 1:
            with working_on(*((data_id, self._log_ids.get(data_id, 0)) for data_id in data_ids)):
                _log.info("batch", op=op, worker=worker, data_ids=list(data_ids))

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        """Log a worker that ended by itself."""
        _log.error("worker ended by itself, another takes its place", op=op, worker=worker, reason=reason)

    def request_finished(self, data_id: int, log_id: int, code: int | None, span: Span, message: str = "") -> None:
        """Log a request's end; one that failed is a warning."""
        self._log_ids.pop(data_id, None)
        milliseconds = round((span[1] - span[0]) * 1e3, 3)
        with working_on((data_id, log_id)):
            if code is None:
                _log.info("client left", ms=milliseconds)
            elif code:
                _log.warning("request failed", err_no=code, err_msg=message, ms=milliseconds)
            else:
                _log.debug("request answered", ms=milliseconds)
