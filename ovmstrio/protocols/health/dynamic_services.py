"""Dynamic gRPC services: the services that loaded handlers provide, and the Paddle Serving pipeline service.

::

    registry ── changes ──> DynamicServices ── path -> entry <── lookup by the transport, after its fixed services
                                │ names, descriptors            │
                            health, reflection           call ──┴─> DataPlane.call ─> handlers of the loaded instance
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import trio
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.core.events import CANCELLED
from ovmstrio.encoding.messages import Descriptors
from ovmstrio.serving.interfaces import HANDLERS_GRPC
from ovmstrio.serving.kind import CallType
from ovmstrio.serving.loading import grpc_declaration
from ovmstrio.serving.records import OK, VersionState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ovmstrio.core.events import CallEvent
    from ovmstrio.core.service import GrpcDeclaration, Service
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.transport.grpc.call import Call


class DynamicServices:
    """gRPC services of user code and pipelines, updated on loads; ``root`` serves pipeline calls without a name."""

    def __init__(self, plane: DataPlane, root: str = "") -> None:
        self._plane = plane
        self._registry = plane.registry
        self._root = root
        # Which services they provide is unknown until they are loaded.
        self._grpc_kinds = {name for name, kind in plane.registry.kinds.items() if CallType.GRPC in kind.call_types}
        self._entries: dict[str, _GrpcEntry] = {}
        self._owners: dict[str, str] = {}
        self._loading: set[str] = set()
        self._pipelines: Mapping[str, Handler] = {}
        # The real cardinality is known once the call has found its service.
        self._handler = Handler(self._run, Cardinality.STREAM_STREAM, bytes, bytes)
        self._has_loaded = plane.registry.has_loaded
        for statuses in self._registry.statuses().values():
            for status in statuses:
                self._follow(status)
        self._registry.subscribe(self._follow)
        self._registry.subscribe_readiness(lambda _: self._mark_loaded())

    # Lookup

    def get(self, path: str, /) -> Handler | None:
        """Return the handler of a path; while services load, every path has a handler."""
        handler = self._pipelines.get(path)
        if handler is not None:
            return handler
        return self._handler if path in self._owners or self._is_loading() else None

    def names(self) -> set[str]:
        """Return the full names of the services."""
        return {path.split("/")[1] for path in (*self._owners, *self._pipelines)}

    def entry_of(self, service: str) -> str:
        """Return the entry that provides a service; empty if none does."""
        return next((name for name, entry in self._entries.items() if service in entry.declaration.names), "")

    def descriptors(self) -> Iterator[Descriptors]:
        """Return the descriptors of the provided services."""
        return (entry.descriptors for entry in self._entries.values())

    # Registry changes

    def _mark_loaded(self) -> None:
        self._has_loaded = True

    def _follow(self, status: VersionStatus) -> None:
        self._mark_loaded()
        if self._pipelines or status.kind == OpPipelineSpec.kind:
            self._follow_pipelines()
        if status.kind in self._grpc_kinds and status.state <= VersionState.LOADING and status.error_code == OK:
            self._loading.add(status.name)
        else:
            self._loading.discard(status.name)
        found = self._find(status.name)
        if found is not None or status.name in self._entries:
            self._entries.pop(status.name, None)
            if found is not None:
                self._entries[status.name] = found
            self._owners = {path: name for name, entry in self._entries.items() for path in entry.handlers}

    def _find(self, name: str) -> _GrpcEntry | None:
        try:
            service = self._registry.peek(name)
        except ServerError:
            return None
        declaration = grpc_declaration(self._registry.kinds[self._registry.kind_of(name)], service)
        if declaration is None:
            return None
        known = self._entries.get(name)
        return known if known is not None and known.service is service else _GrpcEntry(service, declaration)

    def _follow_pipelines(self) -> None:
        if not self._registry.names_of(OpPipelineSpec.kind):
            self._pipelines = {}
        elif not self._pipelines:
            from ovmstrio.ops.grpc_service import PipelineService  # noqa: PLC0415 - only servers with pipelines need it

            self._pipelines = PipelineService(self._plane, self._root).__mapping__()

    # Calls

    def _is_loading(self) -> bool:
        return bool(self._loading) or not self._has_loaded

    async def _run(self, call: Call) -> None:
        """Answer a call with the instance that is loaded now; the call holds a lease on the instance."""
        path = call.path
        name = self._owners.get(path) or await self._wait_for_owner(path)
        refusal: GRPCError | StreamTerminatedError | None = None
        is_stream, method = self._is_stream(name, path), path.rpartition("/")[2]
        with await self._plane.call(name, HANDLERS_GRPC, method, is_stream=is_stream) as observed:
            entry = self._entries.get(name)
            handler = None if entry is None else entry.handlers.get(path)
            if handler is None:
                raise _unknown(path)
            call.handler = handler
            try:
                await handler.func(call)
            except (GRPCError, StreamTerminatedError) as error:
                refusal = error
                _record_status(observed.event, error)
            finally:
                observed.event.received, observed.event.sent = call.received, call.sent
        if refusal is not None:
            raise refusal

    def _is_stream(self, name: str, path: str) -> bool:
        entry = self._entries.get(name)
        handler = None if entry is None else entry.handlers.get(path)
        return handler is not None and bool(handler.cardinality.server_streaming)

    async def _wait_for_owner(self, path: str) -> str:
        """Wait, as leases do, until a loading service provides the path or all have loaded."""
        with trio.move_on_after(self._registry.load_wait_seconds):
            while path not in self._owners and self._is_loading():
                await self._registry.wait_change()
        owner = self._owners.get(path)
        if owner is not None:
            return owner
        for name in self._loading:
            self._registry.peek(name)
        if self._is_loading():
            raise NotReady("services are still loading")
        raise _unknown(path)


class _GrpcEntry:
    def __init__(self, service: Service, declaration: GrpcDeclaration) -> None:
        from ovmstrio.handlers.handler_service import grpc_handlers  # noqa: PLC0415 - only servers with user services need it

        self.service = service
        self.declaration = declaration
        self.handlers = grpc_handlers(service)

    @cached_property
    def descriptors(self) -> Descriptors:
        return Descriptors.of(self.declaration.files)


def _unknown(path: str) -> GRPCError:
    return GRPCError(Status.UNIMPLEMENTED, f"unknown method {path}")


def _record_status(event: CallEvent, error: GRPCError | StreamTerminatedError) -> None:
    """Record the service's error, or the gRPC status without one."""
    if isinstance(error, StreamTerminatedError):
        event.code = CANCELLED
        return
    cause = error.__cause__
    event.code = error.status.name if cause is None else type(cause).__name__
    event.error = cause if isinstance(cause, ServerError) else None
