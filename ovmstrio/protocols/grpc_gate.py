"""Authentication and authorisation of gRPC methods: the required scope of each method, and handlers that check it.

The gate runs before any message is read; the data plane checks access to the service that a message names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from ovmstrio.auth.authentication import strip_credentials
from ovmstrio.auth.revocable_streams import cancel_on_revocation
from ovmstrio.core.callers import Permission, current_caller, release_caller
from ovmstrio.core.errors import MissingScope, Unauthenticated
from ovmstrio.core.events import current_wire_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ovmstrio.auth.gate import Gate
    from ovmstrio.transport.grpc.call import Call
    from ovmstrio.transport.grpc.connection import Routes
    from ovmstrio.transport.grpc.server import GrpclibService

_KSERVE: Final = "/inference.GRPCInferenceService/"
_PREDICTION: Final = "/tensorflow.serving.PredictionService/"
_MODELS: Final = "/tensorflow.serving.ModelService/"
_HEALTH: Final = "/grpc.health.v1.Health/"

_METHODS: Final[Mapping[str, Mapping[Permission, str]]] = {
    _KSERVE: {
        Permission.NOTHING: "ServerLive ServerReady",
        Permission.CALLER: "ServerMetadata",
        Permission.ABOUT: "ModelReady ModelMetadata ModelConfig ModelStatistics",
        Permission.READ: "RepositoryIndex SystemSharedMemoryStatus CudaSharedMemoryStatus TraceSetting LogSettings",
        Permission.INFER: "ModelInfer ModelStreamInfer",
        Permission.ADMIN: "RepositoryModelLoad RepositoryModelUnload SystemSharedMemoryRegister "
        "SystemSharedMemoryUnregister "
        "CudaSharedMemoryRegister CudaSharedMemoryUnregister",
    },
    _PREDICTION: {Permission.ABOUT: "GetModelMetadata", Permission.INFER: "Predict"},
    _MODELS: {Permission.ABOUT: "GetModelStatus", Permission.ADMIN: "HandleReloadConfigRequest"},
    _HEALTH: {Permission.NOTHING: "Check Watch"},
    "/grpc.reflection.v1.ServerReflection/": {Permission.READ: "ServerReflectionInfo"},
    "/grpc.reflection.v1alpha.ServerReflection/": {Permission.READ: "ServerReflectionInfo"},
}

REQUIRED_SCOPES: Final[Mapping[str, Permission]] = {
    f"{service}{method}": need
    for service, needs in _METHODS.items()
    for need, methods in needs.items()
    for method in methods.split()
}
"""Required scope by method path; ``LogSettings`` additionally requires ``admin`` to change settings."""


_MAY_CHANGE: Final = frozenset({f"{_KSERVE}LogSettings"})
"""Methods that change the server only if their message requests a change."""


class GuardedService:
    """gRPC service whose methods check the caller; methods missing in :data:`REQUIRED_SCOPES` require ``admin``."""

    def __init__(self, service: GrpclibService, gate: Gate) -> None:
        self._service = service
        self._gate = gate

    def __mapping__(self) -> Mapping[str, Handler]:
        """Return the guarded handlers by path."""
        handlers = self._service.__mapping__()
        return {
            path: _guarded(each, self._gate, REQUIRED_SCOPES.get(path, Permission.ADMIN))
            for path, each in handlers.items()
        }


class GuardedRoutes:
    """Dynamic routes of user services and pipelines that check the caller, even for unknown methods."""

    def __init__(self, routes: Routes, gate: Gate) -> None:
        self._routes = routes
        self._gate = gate
        self._unknown = _guarded(Handler(_refuse, Cardinality.STREAM_STREAM, bytes, bytes), gate, Permission.CALLER)

    def get(self, path: str, /) -> Handler | None:
        """Return the current handler of a path."""
        handler = self._routes.get(path)
        if handler is None:
            return self._unknown
        return _guarded(
            handler._replace(func=partial(_answer_without_proof, handler.func)), self._gate, Permission.INFER
        )


def _guarded(handler: Handler, gate: Gate, need: Permission) -> Handler:
    if need is Permission.NOTHING:
        return handler
    answer: Callable[[Call], Awaitable[None]] = handler.func
    if handler.cardinality is not Cardinality.UNARY_UNARY:
        answer = partial(_answer_while_known, answer)

    async def run(call: Call) -> None:
        head = call.state.head
        if not gate.try_authenticate(need, "", head.headers, head.notes):
            try:
                await gate.let_in(need, "", head.headers, call.peer.certificate)
            except (Unauthenticated, MissingScope) as error:
                if need is Permission.ADMIN or call.path in _MAY_CHANGE:
                    gate.denials.log_denied(call.path.lstrip("/"), error, client=call.client)
                raise
        try:
            await answer(call)
        finally:
            # The request is recorded after the caller has been reset.
            request, caller = current_wire_request(), current_caller.get()
            if request is not None and caller is not None:
                request.caller = caller.name
            release_caller()

    return handler._replace(func=run)


async def _answer_while_known(answer: Callable[[Call], Awaitable[None]], call: Call) -> None:
    with cancel_on_revocation(call.peer, call.state.head.headers):
        await answer(call)


async def _answer_without_proof(answer: Callable[[Call], Awaitable[None]], call: Call) -> None:
    """Run user code, which does not see the credential headers."""
    head = call.state.head
    call.state.head = replace(head, headers=strip_credentials(head.headers))
    await answer(call)


async def _refuse(call: Call) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, f"unknown method {call.path}")
