"""Batched calls of ``handle_post`` with lists of arguments and results, and request ids for the log."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from structlog.contextvars import bound_contextvars, get_contextvars

from ovmstrio.handlers.config.project_spec import ProjectBatching, ProjectSpec
from ovmstrio.handlers.error_reporter import ErrorReporter
from ovmstrio.handlers.handler_class import HandlerMethod
from ovmstrio.handlers.http_responses import HTTPError
from ovmstrio.serving.batching import BatchOptions

_KEY: Final = "request_id"
_ID_BYTES: Final = 8
_SAFE_ID: Final = re.compile(r"[!-~]{1,128}")


def request_id_for(sent: str | None) -> str:
    """Return the client's request id if it is safe for logs and headers, else a new id."""
    return sent if sent is not None and _SAFE_ID.fullmatch(sent) else secrets.token_hex(_ID_BYTES)


def log_request_ids(*request_ids: str) -> AbstractContextManager[Any]:
    """Add request ids to all log lines of the block, also in threads called from it."""
    return bound_contextvars(**{_KEY: ", ".join(filter(None, request_ids))})


def current_request_id() -> str:
    """Return the id of the current request; empty outside a request."""
    return str(get_contextvars().get(_KEY, ""))


# max_concurrency limits the waiting requests.
_UNBOUNDED: Final = 2**31 - 1

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class BatchItem:
    """One request of a batch."""

    arguments: Arguments
    request_id: str = ""


class QueueTimeouts(NamedTuple):
    """Timeouts of calls in seconds: for a free thread, and for the start of a batch."""

    thread: float = math.inf
    batch: float = math.inf

    @classmethod
    def of(cls, project: ProjectSpec, seconds: float) -> QueueTimeouts:
        """Return the timeouts of a project: for batches plus the batch interval; 0 seconds means no timeout."""
        if not seconds:
            return cls()
        return cls(seconds, seconds + (0.0 if project.batching is None else project.batching.interval_seconds))


def batch_options(batching: ProjectBatching) -> BatchOptions:
    """Return the batcher's options for a project."""
    seconds = math.inf if batching.max_batch_size == 1 else batching.interval_seconds
    return BatchOptions(batching.max_batch_size, seconds, max_waiting=_UNBOUNDED)


class BatchedMethod:
    """Batched method of a handler, as the function of a batcher."""

    def __init__(
        self,
        method: HandlerMethod,
        invoke: Callable[[HandlerMethod, Arguments], Awaitable[Any]],
        code: ErrorReporter,
    ) -> None:
        self._method = method
        self._invoke = invoke
        self._code = code

    async def run(self, items: Sequence[BatchItem]) -> list[Any]:
        """Call the method for all items; return a result or an error for each.

        Raises UserCodeError, which has been logged, if the method raised or its result is not a list of matching
        length.
        """
        with log_request_ids(*(item.request_id for item in items)):
            return await self._results(items)

    async def _results(self, items: Sequence[BatchItem]) -> list[Any]:
        lists = {name: [item.arguments[name] for item in items] for name in self._method.arguments}
        results = await self._invoke(self._method, lists)
        expected = f"expected a list of {len(items)} results, one for each request"
        if not isinstance(results, list):
            raise self._code.invalid_result(self._method.name, f"{expected}, got {type(results).__name__}")
        if len(results) != len(items):
            raise self._code.invalid_result(self._method.name, f"{expected}, got {len(results)}")
        return [self._outcome(result) for result in results]

    def _outcome(self, result: Any) -> Any:
        """Convert an exception among the results to an error; its text is meant for the client."""
        if not isinstance(result, Exception):
            return result
        failure = self._code.convert_error(result, self._method.name)
        return failure if isinstance(failure, HTTPError) else HTTPError(500, str(result))
