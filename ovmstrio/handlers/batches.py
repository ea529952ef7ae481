"""Requests of many callers in one call of ``handle_post``: lists of arguments, and a list of results."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from structlog.contextvars import bound_contextvars, get_contextvars

from ovmstrio.handlers.config.project_spec import ProjectBatching, ProjectSpec
from ovmstrio.handlers.handler_class import HandlerMethod
from ovmstrio.handlers.handler_code import HandlerCode
from ovmstrio.handlers.http_results import HTTPError
from ovmstrio.serving.batching import BatchOptions

__all__ = ["BatchItem", "BatchedMethod", "Patience", "batch_options", "current_request_id", "in_log", "request_id_for"]

_KEY: Final = "request_id"
_BYTES: Final = 8
_ACCEPTABLE: Final = re.compile(r"[!-~]{1,128}")


def request_id_for(sent: str | None) -> str:
    """Give the id of a request: what its client sent, if that can stand in a log and a header, or a new one."""
    return sent if sent is not None and _ACCEPTABLE.fullmatch(sent) else secrets.token_hex(_BYTES)


def in_log(*request_ids: str) -> AbstractContextManager[Any]:
    """Have every line that is logged within the block tell of these requests, in threads that it calls, too."""
    return bound_contextvars(**{_KEY: _joined(request_ids)})


def current_request_id() -> str:
    """Give the id of the request that is answered here, nothing if there is none."""
    return str(get_contextvars().get(_KEY, ""))


def _joined(request_ids: Iterable[str]) -> str:
    return ", ".join(filter(None, request_ids))


# How many requests may wait is for max_concurrency to say.
_UNBOUNDED: Final = 2**31 - 1

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class BatchItem:
    """The part that one request has in a batch."""

    arguments: Arguments
    request_id: str = ""


class Patience(NamedTuple):
    """For how many seconds calls wait for a thread, and for a batch that runs."""

    thread: float = math.inf
    batch: float = math.inf

    @classmethod
    def of(cls, project: ProjectSpec, seconds: float) -> Patience:
        """Give that of a project: batches may take their time to fill, too.  0 seconds is any time."""
        if not seconds:
            return cls()
        return cls(seconds, seconds + (0.0 if project.batching is None else project.batching.interval_seconds))


def batch_options(batching: ProjectBatching) -> BatchOptions:
    """Give the batcher's options of a project."""
    seconds = math.inf if batching.max_batch_size == 1 else batching.interval_seconds
    return BatchOptions(batching.max_batch_size, seconds, max_waiting=_UNBOUNDED)


class BatchedMethod:
    """What a batcher runs.

    Args:
        method: the handler's.
        invoke: calls it.
        code: whose code it is.
    """

    def __init__(
        self,
        method: HandlerMethod,
        invoke: Callable[[HandlerMethod, Arguments], Awaitable[Any]],
        code: HandlerCode,
    ) -> None:
        self._method = method
        self._invoke = invoke
        self._code = code

    async def run(self, items: Sequence[BatchItem]) -> list[Any]:
        """Call the method for all items, and give the results, or errors, by the items' positions.

        Raises:
            UserCodeError: it raised, or gave no list of as many results; this has been logged.
            Exception: it raised an error that passes.

        Cancellation: as :func:`call_handler_code`.
        """
        with in_log(*(item.request_id for item in items)):
            return await self._results(items)

    async def _results(self, items: Sequence[BatchItem]) -> list[Any]:
        lists = {name: [item.arguments[name] for item in items] for name in self._method.wanted}
        results = await self._invoke(self._method, lists)
        expected = f"expected a list of {len(items)} results, one for each request in its order"
        if not isinstance(results, list):
            raise self._code.wrong(self._method.name, f"{expected}, found a {type(results).__name__}")
        if len(results) != len(items):
            raise self._code.wrong(self._method.name, f"{expected}, found {len(results)}")
        return [self._outcome(result) for result in results]

    def _outcome(self, result: Any) -> Any:
        """Give a result, or the error that an exception among the results means for its request.

        Unlike what is raised, it was put there for the client to see, and so its text is sent.
        """
        if not isinstance(result, Exception):
            return result
        failure = self._code.failure(result, self._method.name)
        return failure if isinstance(failure, HTTPError) else HTTPError(500, str(result))
