"""gRPC server reflection, v1 and v1alpha, which differ only in their package name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import betterproto2
from grpclib.const import Cardinality, Handler, Status

from ovmstrio.encoding.generated.grpc.reflection import v1, v1alpha
from ovmstrio.encoding.messages import FILES, POOL, Descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ovmstrio.protocols.health.dynamic_services import DynamicServices
    from ovmstrio.protocols.health.grpc_health import OpenEndedCalls
    from ovmstrio.transport.grpc.call import Call
    from ovmstrio.transport.grpc.server import GrpclibService

_VERSIONS: Final = {"v1": v1, "v1alpha": v1alpha}
_SERVER_DESCRIPTORS: Final = Descriptors(FILES, POOL)


class ReflectionService:
    """Reflection of fixed and dynamic services; the server's own files take precedence.  A drain ends open streams."""

    def __init__(self, services: Sequence[GrpclibService], others: DynamicServices, streams: OpenEndedCalls) -> None:
        self._services = {path.split("/")[1] for service in services for path in service.__mapping__()}
        self._others = others
        self._streams = streams

    def names(self) -> list[str]:
        """Return the full names of all services."""
        return sorted({*self._services, *self._others.names()})

    def described(self) -> list[Descriptors]:
        """Return the descriptors of all services."""
        return [_SERVER_DESCRIPTORS, *self._others.descriptors()]

    def hold(self, call: Call) -> AbstractContextManager[None]:
        """Register a stream while the block runs; raise ``GRPCError`` UNAVAILABLE during shutdown."""
        return self._streams.hold(call)

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers of both versions by path."""
        return {
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Handler(
                _ReflectionStreams(messages, self).run,
                Cardinality.STREAM_STREAM,
                messages.ServerReflectionRequest,
                messages.ServerReflectionResponse,
            )
            for version, messages in _VERSIONS.items()
        }


class _ReflectionStreams:
    """Reflection streams in the messages of one version."""

    def __init__(self, messages: Any, service: ReflectionService) -> None:
        self._pb = messages
        self._service = service

    async def run(self, call: Call) -> None:
        """Answer requests until the client half-closes or the server drains."""
        with self._service.hold(call):
            async for question in call:
                answer = self._answer(question)
                answer.valid_host = question.host
                answer.original_request = question
                await call.send_message(answer)

    def _answer(self, question: Any) -> Any:
        field, value = _choice(question)
        match field:
            case "list_services":
                services = [self._pb.ServiceResponse(name) for name in self._service.names()]
                return self._respond(list_services_response=self._pb.ListServiceResponse(services))
            case "file_by_filename":
                return self._describe_file(lambda each: value if value in each.files else None, f'no file "{value}"')
            case "file_containing_symbol":
                return self._describe_file(lambda each: each.file_of(value), f'no symbol "{value}"')
            case "all_extension_numbers_of_type":
                return self._list_extensions(value)
            case "file_containing_extension":
                return self._refuse(Status.NOT_FOUND, "the services of this server use no extensions")
            case _:
                return self._refuse(Status.INVALID_ARGUMENT, "expected one message_request, got none")

    def _describe_file(self, find: Callable[[Descriptors], str | None], problem: str) -> Any:
        for each in self._service.described():
            name = find(each)
            if name is not None:
                files = [file.SerializeToString() for file in each.with_imports(name)]
                return self._respond(file_descriptor_response=self._pb.FileDescriptorResponse(files))
        return self._refuse(Status.NOT_FOUND, f"{problem} among the services of this server")

    def _list_extensions(self, name: str) -> Any:
        if not any(each.has_message(name) for each in self._service.described()):
            return self._refuse(Status.NOT_FOUND, f'no message "{name}" among the services of this server')
        return self._respond(all_extension_numbers_response=self._pb.ExtensionNumberResponse(base_type_name=name))

    def _refuse(self, status: Status, text: str) -> Any:
        return self._respond(error_response=self._pb.ErrorResponse(status.value, text))

    def _respond(self, **answer: Any) -> Any:
        return self._pb.ServerReflectionResponse(**answer)


def _choice(question: Any) -> tuple[str, Any]:
    return betterproto2.which_one_of(question, "message_request")
