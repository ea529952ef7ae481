"""Authorization: a data plane that checks the caller's scopes for each service.

Front ends check a request's scope before its body is read.  The service name is usually in the body, so the data plane
checks again once the name is known, before the look-up: a caller without the scope cannot tell whether a service
exists.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ovmstrio.core.callers import MISSING_SCOPE_REASON, Permission, check_current_caller, current_caller
from ovmstrio.core.errors import MissingScope
from ovmstrio.core.events import CallObserver
from ovmstrio.serving.data_plane import DataPlane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from ovmstrio.core.events import ApiInterface, CallEvent
    from ovmstrio.core.limits import AdmissionTicket
    from ovmstrio.core.request import ArrivalTicket, InferRequest, InferResponse
    from ovmstrio.core.service import SequenceInfo
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import CallSignature, ModelMetadata
    from ovmstrio.serving.open_stream import OpenStream
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.telemetry.call_statistics import VersionStatistics


class CallerRecorder(CallObserver):
    """Call observer that records the caller's name in each event; must be the first observer."""

    def call_started(self, event: CallEvent) -> None:
        """Record the caller."""
        caller = current_caller.get()
        if caller is not None:
            event.caller = caller.name

    def call_finished(self, event: CallEvent) -> None:
        """Record the caller of a query, which has no start event."""
        if not event.caller:
            self.call_started(event)


class AuthorizingDataPlane(DataPlane):
    """Data plane that requires a scope for each named service; raises also ``Unauthenticated`` and ``MissingScope``."""

    def _require(self, need: Permission, service: str) -> None:
        """Check the caller's scope; count refusals."""
        try:
            check_current_caller(need, service)
        except MissingScope:
            self.count_refused_caller(MISSING_SCOPE_REASON)
            raise

    def statuses(self) -> dict[str, list[VersionStatus]]:
        """Return the states of services visible to the caller; all of them for unauthenticated health checks."""
        every, caller = super().statuses(), current_caller.get()
        if caller is None or caller.scopes.read or caller.scopes.admin:
            return every
        return {name: versions for name, versions in every.items() if caller.may_infer(name)}

    def model_ready(self, name: str, version: str, door: ApiInterface) -> bool:
        """Require ``Permission.ABOUT``; otherwise as in the base class."""
        self._require(Permission.ABOUT, name)
        return super().model_ready(name, version, door)

    def model_status(self, name: str, version: int, door: ApiInterface) -> list[VersionStatus]:
        """Require ``Permission.ABOUT``; otherwise as in the base class."""
        self._require(Permission.ABOUT, name)
        return super().model_status(name, version, door)

    def model_metadata(self, name: str, version: str, door: ApiInterface) -> ModelMetadata:
        """Require ``Permission.ABOUT``; otherwise as in the base class."""
        self._require(Permission.ABOUT, name)
        return super().model_metadata(name, version, door)

    def statistics(self, name: str, version: str, door: ApiInterface) -> list[tuple[str, str, VersionStatistics]]:
        """Require ``Permission.ABOUT`` for one service, ``Permission.READ`` for all."""
        self._require(Permission.ABOUT if name else Permission.READ, name)
        return super().statistics(name, version, door)

    def sequences(self, name: str, version: str, door: ApiInterface) -> list[SequenceInfo]:
        """Require ``Permission.ABOUT``; otherwise as in the base class."""
        self._require(Permission.ABOUT, name)
        return super().sequences(name, version, door)

    async def describe(self, name: str, version: str, door: ApiInterface) -> CallSignature:
        """Require ``Permission.ABOUT``; otherwise as in the base class."""
        self._require(Permission.ABOUT, name)
        return await super().describe(name, version, door)

    async def takes_streams(self, name: str) -> bool:
        """Require ``Permission.INFER``; otherwise as in the base class."""
        self._require(Permission.INFER, name)
        return await super().takes_streams(name)

    async def admit(
        self, name: str, version: str, door: ApiInterface, method: str = "", arrival: ArrivalTicket | None = None
    ) -> AdmissionTicket | None:
        """Require ``Permission.INFER``; otherwise as in the base class."""
        self._require(Permission.INFER, name)
        return await super().admit(name, version, door, method, arrival)

    def infer(
        self,
        request: InferRequest,
        door: ApiInterface,
        render: Callable[[InferResponse], tuple[Any, int]] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Require ``Permission.INFER``, checked at the call and not when awaited."""
        caller = current_caller.get()
        if caller is None or not caller.may_infer(request.model_name):
            self._require(Permission.INFER, request.model_name)
        return super().infer(request, door) if render is None else super().infer(request, door, render)

    async def call(
        self,
        name: str,
        door: ApiInterface,
        method: str,
        *,
        request_id: str = "",
        received: int = 0,
        is_stream: bool = False,
        is_free: bool = False,
    ) -> ObservedCall:
        """Require ``Permission.INFER``, except for free calls, which the front end checked."""
        if not is_free:
            self._require(Permission.INFER, name)
        return await super().call(
            name, door, method, request_id=request_id, received=received, is_stream=is_stream, is_free=is_free
        )

    @asynccontextmanager
    async def open_stream(self, first: InferRequest, door: ApiInterface) -> AsyncIterator[OpenStream]:
        """Require ``Permission.INFER``; otherwise as in the base class."""
        self._require(Permission.INFER, first.model_name)
        async with super().open_stream(first, door) as stream:
            yield stream
