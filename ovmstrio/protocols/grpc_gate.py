"""Authentication and authorisation of gRPC methods: the required scope of each method, and handlers that check it.

The gate runs before any message is read; the data plane checks access to the service that a message names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from ovmstrio.auth.credential_headers import without_proof
from ovmstrio.auth.revocable_streams import while_known
from ovmstrio.core.callers import Need, current_caller, leave_caller
from ovmstrio.core.errors import MissingScope, Unauthenticated
from ovmstrio.core.events import current_wire_request
from ovmstrio.telemetry.denied_admin_log import tell_refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ovmstrio.auth.gate import Gate
    from ovmstrio.transport.grpc.connection import Routes
    from ovmstrio.transport.grpc.server import GrpclibService
    from ovmstrio.transport.grpc.stream import Call

__all__ = ["NEEDS", "GuardedRoutes", "GuardedService"]

_KSERVE: Final = "/inference.GRPCInferenceService/"
_PREDICTION: Final = "/tensorflow.serving.PredictionService/"
_MODELS: Final = "/tensorflow.serving.ModelService/"
_HEALTH: Final = "/grpc.health.v1.Health/"

_METHODS: Final[Mapping[str, Mapping[Need, str]]] = {
    _KSERVE: {
        Need.NOTHING: "ServerLive ServerReady",
        Need.CALLER: "ServerMetadata",
        Need.ABOUT: "ModelReady ModelMetadata ModelConfig ModelStatistics",
        Need.READ: "RepositoryIndex SystemSharedMemoryStatus CudaSharedMemoryStatus TraceSetting LogSettings",
        Need.INFER: "ModelInfer ModelStreamInfer",
        Need.ADMIN: "RepositoryModelLoad RepositoryModelUnload SystemSharedMemoryRegister SystemSharedMemoryUnregister "
        "CudaSharedMemoryRegister CudaSharedMemoryUnregister",
    },
    _PREDICTION: {Need.ABOUT: "GetModelMetadata", Need.INFER: "Predict Classify Regress MultiInference"},
    _MODELS: {Need.ABOUT: "GetModelStatus", Need.ADMIN: "HandleReloadConfigRequest"},
    _HEALTH: {Need.NOTHING: "Check Watch List"},
    "/grpc.reflection.v1.ServerReflection/": {Need.READ: "ServerReflectionInfo"},
    "/grpc.reflection.v1alpha.ServerReflection/": {Need.READ: "ServerReflectionInfo"},
}

NEEDS: Final[Mapping[str, Need]] = {
    f"{service}{method}": need
    for service, needs in _METHODS.items()
    for need, methods in needs.items()
    for method in methods.split()
}
"""Required scope by method path; ``LogSettings`` additionally requires ``admin`` to change settings."""


_MAY_CHANGE: Final = frozenset({f"{_KSERVE}LogSettings"})
"""Methods that change the server only if their message requests a change."""


class GuardedService:
    """gRPC service whose methods check the caller; methods without an entry in :data:`NEEDS` require ``admin``."""

    def __init__(self, service: GrpclibService, gate: Gate) -> None:
        self._service = service
        self._gate = gate

    def __mapping__(self) -> Mapping[str, Handler]:
        """Return the guarded handlers by path."""
        handlers = self._service.__mapping__()
        return {path: _guarded(each, self._gate, NEEDS.get(path, Need.ADMIN)) for path, each in handlers.items()}


class GuardedRoutes:
    """Dynamic routes of user services and pipelines that check the caller, even for unknown methods."""

    def __init__(self, routes: Routes, gate: Gate) -> None:
        self._routes = routes
        self._gate = gate
        self._unknown = _guarded(Handler(_refuse, Cardinality.STREAM_STREAM, bytes, bytes), gate, Need.CALLER)

    def get(self, path: str, /) -> Handler | None:
        """Return the current handler of a path."""
        handler = self._routes.get(path)
        if handler is None:
            return self._unknown
        return _guarded(handler._replace(func=partial(_answer_without_proof, handler.func)), self._gate, Need.INFER)


def _guarded(handler: Handler, gate: Gate, need: Need) -> Handler:
    if need is Need.NOTHING:
        return handler
    answer: Callable[[Call], Awaitable[None]] = handler.func
    if handler.cardinality is not Cardinality.UNARY_UNARY:
        answer = partial(_answer_while_known, answer)

    async def run(call: Call) -> None:
        head = call.state.head
        if not gate.let_in_now(need, "", head.headers, head.notes):
            try:
                await gate.let_in(need, "", head.headers, call.peer.certificate)
            except (Unauthenticated, MissingScope) as error:
                if need is Need.ADMIN or call.path in _MAY_CHANGE:
                    tell_refused(call.path.lstrip("/"), error, client=call.client)
                raise
        try:
            await answer(call)
        finally:
            # The request is recorded after the caller has been reset.
            request, caller = current_wire_request(), current_caller.get()
            if request is not None and caller is not None:
                request.caller = caller.name
            leave_caller()

    return handler._replace(func=run)


async def _answer_while_known(answer: Callable[[Call], Awaitable[None]], call: Call) -> None:
    with while_known(call.state.head.headers, call.peer.certificate):
        await answer(call)


async def _answer_without_proof(answer: Callable[[Call], Awaitable[None]], call: Call) -> None:
    """Run user code, which does not see the credential headers."""
    head = call.state.head
    call.state.head = replace(head, headers=without_proof(head.headers))
    await answer(call)


async def _refuse(call: Call) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, f"unknown method {call.path}")
