"""gRPC server reflection, versions v1 and v1alpha, which differ in nothing but the name of their package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import betterproto2
from grpclib.const import Cardinality, Handler, Status

from ovmstrio.protocol.descriptors import FILES, POOL
from ovmstrio.protocol.generated.grpc.reflection import v1, v1alpha

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.frontends.grpc.endless_calls import EndlessCalls
    from ovmstrio.frontends.grpc.transport.stream import Call

__all__ = ["ReflectionService"]

_VERSIONS: Final = {"v1": v1, "v1alpha": v1alpha}


class ReflectionService:
    """Describes the services of a server and their messages.

    Args:
        services: the full names to list.
        streams: where open streams are held, so that a drain can end them.
    """

    def __init__(self, services: Collection[str], streams: EndlessCalls) -> None:
        self._services = sorted(services)
        self._streams = streams

    def __mapping__(self) -> dict[str, Handler]:
        """Give the handlers of both versions by path."""
        return {
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Handler(
                _Conversation(messages, self._services, self._streams).run,
                Cardinality.STREAM_STREAM,
                messages.ServerReflectionRequest,
                messages.ServerReflectionResponse,
            )
            for version, messages in _VERSIONS.items()
        }


class _Conversation:
    """Answers streams of questions in the messages of one version."""

    def __init__(self, messages: Any, services: Collection[str], streams: EndlessCalls) -> None:
        self._pb = messages
        self._services = services
        self._streams = streams

    async def run(self, call: Call) -> None:
        """Answer question after question until the client has no more or the server drains.

        Cancellation: at any checkpoint; nothing is held.
        """
        with self._streams.hold(call):
            async for question in call:
                answer = self._answer(question)
                answer.valid_host = question.host
                answer.original_request = question
                await call.send_message(answer)

    def _answer(self, question: Any) -> Any:
        field, value = _choice(question)
        match field:
            case "list_services":
                services = [self._pb.ServiceResponse(name) for name in self._services]
                return self._respond(list_services_response=self._pb.ListServiceResponse(services))
            case "file_by_filename":
                return self._describe_file(value if value in FILES else None, f'no file "{value}"')
            case "file_containing_symbol":
                return self._describe_file(_file_of(value), f'no symbol "{value}"')
            case "all_extension_numbers_of_type":
                return self._list_extensions(value)
            case "file_containing_extension":
                return self._refuse(Status.NOT_FOUND, "the services of this server use no extensions")
            case _:
                return self._refuse(Status.INVALID_ARGUMENT, "expected one message_request, got none")

    def _describe_file(self, name: str | None, problem: str) -> Any:
        if name is None:
            return self._refuse(Status.NOT_FOUND, f"{problem} among the services of this server")
        files = [FILES[each].SerializeToString() for each in _with_imports(name)]
        return self._respond(file_descriptor_response=self._pb.FileDescriptorResponse(files))

    def _list_extensions(self, name: str) -> Any:
        try:
            POOL.FindMessageTypeByName(name)
        except KeyError:
            return self._refuse(Status.NOT_FOUND, f'no message "{name}" among the services of this server')
        return self._respond(all_extension_numbers_response=self._pb.ExtensionNumberResponse(base_type_name=name))

    def _refuse(self, status: Status, text: str) -> Any:
        return self._respond(error_response=self._pb.ErrorResponse(status.value, text))

    def _respond(self, **answer: Any) -> Any:
        return self._pb.ServerReflectionResponse(**answer)


def _choice(question: Any) -> tuple[str, Any]:
    return betterproto2.which_one_of(question, "message_request")


def _file_of(symbol: str) -> str | None:
    """Find the file that declares a symbol; methods are declared by their service."""
    service, _, method = symbol.rpartition(".")
    try:
        name: str = POOL.FindFileContainingSymbol(symbol).name
    except KeyError:
        try:
            name = POOL.FindServiceByName(service).methods_by_name[method].containing_service.file.name
        except KeyError:
            return None
    return name


def _with_imports(name: str) -> list[str]:
    """List a file and all that it imports, each once, itself first."""
    names = [name]
    for each in names:
        names += [dependency for dependency in FILES[each].dependency if dependency not in names]
    return names
