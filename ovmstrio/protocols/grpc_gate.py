"""The gate before every method over gRPC: what each needs, and its handler behind the question who calls.

What a call is about is in its messages, which are not read yet: that it may call the service that they name is asked
by the data plane.
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
    from ovmstrio.core.events import WireRequest
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
"""What the server's own methods need; settings of logs are read with ``read``, and changed with ``admin`` as well."""


_MAY_CHANGE: Final = frozenset({f"{_KSERVE}LogSettings"})
"""What changes something only if its message says so."""


class GuardedService:
    """A service whose methods are behind the gate.

    Args:
        service: the server's own; a method that no table names is for administrators.
        gate: lets callers in.
    """

    def __init__(self, service: GrpclibService, gate: Gate) -> None:
        self._service = service
        self._gate = gate

    def __mapping__(self) -> Mapping[str, Handler]:
        """Give the handlers by path."""
        handlers = self._service.__mapping__()
        return {path: _guarded(each, self._gate, NEEDS.get(path, Need.ADMIN)) for path, each in handlers.items()}


class GuardedRoutes:
    """Routes that come and go, behind the gate: who calls is asked even where there is no such method.

    Args:
        routes: of services that users bring, and of pipelines.
        gate: lets callers in.
    """

    def __init__(self, routes: Routes, gate: Gate) -> None:
        self._routes = routes
        self._gate = gate
        self._unknown = _guarded(Handler(_refuse, Cardinality.STREAM_STREAM, bytes, bytes), gate, Need.CALLER)

    def get(self, path: str, /) -> Handler | None:
        """Give the handler of a path now."""
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
            request = current_wire_request()
            if request is not None:
                _note_caller(request)
            leave_caller()

    return handler._replace(func=run)


async def _answer_while_known(answer: Callable[[Call], Awaitable[None]], call: Call) -> None:
    """Have a stream end when its caller is not known any more."""
    with while_known(call.state.head.headers, call.peer.certificate):
        await answer(call)


def _note_caller(request: WireRequest) -> None:
    """Keep who has made a request, of which it is told after the caller has been left."""
    caller = current_caller.get()
    if caller is not None:
        request.caller = caller.name


async def _answer_without_proof(answer: Callable[[Call], Awaitable[None]], call: Call) -> None:
    """Have code of users answer, which is not shown what the server has taken."""
    head = call.state.head
    call.state.head = replace(head, headers=without_proof(head.headers))
    await answer(call)


async def _refuse(call: Call) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, f"unknown method {call.path}")
