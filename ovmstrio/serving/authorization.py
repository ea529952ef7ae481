"""The data plane of a server whose callers have to be known: each call is one that its caller may make.

Doors ask for what a request needs before its body is read.  Which service it calls is in the body as a rule, and so
the data plane asks once more, when that is known, and before it looks the service up: what a caller may not call it
cannot tell from what there is not.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ovmstrio.core.callers import NO_SCOPE, Need, current_caller, demand_of_caller
from ovmstrio.core.errors import MissingScope
from ovmstrio.core.events import CallObserver
from ovmstrio.serving.data_plane import DataPlane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from ovmstrio.core.events import CallEvent, Door
    from ovmstrio.core.limits import CallPlace
    from ovmstrio.core.request import Arrival, InferRequest, InferResponse
    from ovmstrio.core.service import SequenceInfo
    from ovmstrio.serving.calls import ObservedCall
    from ovmstrio.serving.data_plane import Description, ModelMetadata
    from ovmstrio.serving.open_stream import OpenStream
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.telemetry.call_statistics import VersionStatistics

__all__ = ["CallerNames", "GuardedPlane"]


class CallerNames(CallObserver):
    """Observes calls first, and notes in each whose it is."""

    def call_started(self, event: CallEvent) -> None:
        """Note the caller."""
        caller = current_caller.get()
        if caller is not None:
            event.caller = caller.name

    def call_finished(self, event: CallEvent) -> None:
        """Note the caller of a question, whose end is all that is told of it."""
        if not event.caller:
            self.call_started(event)


class GuardedPlane(DataPlane):
    """A data plane that asks for a scope wherever a service is named.

    Raises: of every method that names a service also ``Unauthenticated`` and ``MissingScope``.
    """

    def _demand(self, need: Need, service: str) -> None:
        """Let pass what the current caller may do; count what it may not."""
        try:
            demand_of_caller(need, service)
        except MissingScope:
            self.note_refused_caller(NO_SCOPE)
            raise

    def statuses(self) -> dict[str, list[VersionStatus]]:
        """Tell the states of what the caller may ask about; all of them where nobody had to be known, as for health."""
        every, caller = super().statuses(), current_caller.get()
        if caller is None or caller.scopes.read or caller.scopes.admin:
            return every
        return {name: versions for name, versions in every.items() if caller.may_infer(name)}

    def model_ready(self, name: str, version: str, door: Door) -> bool:
        """Tell whether it can be called."""
        self._demand(Need.ABOUT, name)
        return super().model_ready(name, version, door)

    def model_status(self, name: str, version: int, door: Door) -> list[VersionStatus]:
        """Tell its states."""
        self._demand(Need.ABOUT, name)
        return super().model_status(name, version, door)

    def model_metadata(self, name: str, version: str, door: Door) -> ModelMetadata:
        """Tell its inputs and outputs."""
        self._demand(Need.ABOUT, name)
        return super().model_metadata(name, version, door)

    def statistics(self, name: str, version: str, door: Door) -> list[tuple[str, str, VersionStatistics]]:
        """Tell what was counted of its calls, or of all."""
        self._demand(Need.ABOUT if name else Need.READ, name)
        return super().statistics(name, version, door)

    def sequences(self, name: str, version: str, door: Door) -> list[SequenceInfo]:
        """List its sequences."""
        self._demand(Need.ABOUT, name)
        return super().sequences(name, version, door)

    async def describe(self, name: str, version: str, door: Door) -> Description:
        """Tell what it is called with."""
        self._demand(Need.ABOUT, name)
        return await super().describe(name, version, door)

    async def takes_streams(self, name: str) -> bool:
        """Tell whether a stream to it is to be opened."""
        self._demand(Need.INFER, name)
        return await super().takes_streams(name)

    async def admit(
        self, name: str, version: str, door: Door, method: str = "", arrival: Arrival | None = None
    ) -> CallPlace | None:
        """Take a place for a call of it."""
        self._demand(Need.INFER, name)
        return await super().admit(name, version, door, method, arrival)

    def infer(
        self, request: InferRequest, door: Door, render: Callable[[InferResponse], tuple[Any, int]] | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Answer one inference; who may not is refused when it is called, not when it is waited for."""
        caller = current_caller.get()
        if caller is None or not caller.may_infer(request.model_name):
            self._demand(Need.INFER, request.model_name)
        return super().infer(request, door) if render is None else super().infer(request, door, render)

    async def call(
        self,
        name: str,
        door: Door,
        method: str,
        *,
        request_id: str = "",
        received: int = 0,
        is_stream: bool = False,
        is_free: bool = False,
    ) -> ObservedCall:
        """Lease it for a call; for one that is free, as health is, the door has asked for what it needs."""
        if not is_free:
            self._demand(Need.INFER, name)
        return await super().call(
            name, door, method, request_id=request_id, received=received, is_stream=is_stream, is_free=is_free
        )

    @asynccontextmanager
    async def open_stream(self, first: InferRequest, door: Door) -> AsyncIterator[OpenStream]:
        """Open a stream to it."""
        self._demand(Need.INFER, first.model_name)
        async with super().open_stream(first, door) as stream:
            yield stream
