"""gRPC server reflection, versions v1 and v1alpha, which differ in nothing but the name of their package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import betterproto2
from grpclib.const import Cardinality, Handler, Status

from ovmstrio.protocol.descriptors import FILES, POOL, Descriptors
from ovmstrio.protocol.generated.grpc.reflection import v1, v1alpha

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ovmstrio.api.grpc_standard.endless_calls import EndlessCalls
    from ovmstrio.wire.grpc.server import Service
    from ovmstrio.wire.grpc.stream import Call

__all__ = ["ReflectionService", "service_names"]

_VERSIONS: Final = {"v1": v1, "v1alpha": v1alpha}
_OWN: Final = Descriptors(FILES, POOL)


def service_names(services: Sequence[Service]) -> set[str]:
    """Give the full names of services."""
    return {path.split("/")[1] for service in services for path in service.__mapping__()}


class ReflectionService:
    """Describes the services of a server and their messages.

    Args:
        services: the full names to list.
        streams: where open streams are held, so that a drain can end them.
        others: what is described besides the server's own files, which come first where names meet.
    """

    def __init__(self, services: Collection[str], streams: EndlessCalls, others: Sequence[Descriptors] = ()) -> None:
        self._services = sorted(services)
        self._streams = streams
        self._described = (_OWN, *others)

    def __mapping__(self) -> dict[str, Handler]:
        """Give the handlers of both versions by path."""
        return {
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": Handler(
                _Conversation(messages, self._services, self._streams, self._described).run,
                Cardinality.STREAM_STREAM,
                messages.ServerReflectionRequest,
                messages.ServerReflectionResponse,
            )
            for version, messages in _VERSIONS.items()
        }


class _Conversation:
    """Answers streams of questions in the messages of one version."""

    def __init__(
        self, messages: Any, services: Collection[str], streams: EndlessCalls, described: Sequence[Descriptors]
    ) -> None:
        self._pb = messages
        self._services = services
        self._streams = streams
        self._described = described

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
        for each in self._described:
            name = find(each)
            if name is not None:
                files = [file.SerializeToString() for file in each.with_imports(name)]
                return self._respond(file_descriptor_response=self._pb.FileDescriptorResponse(files))
        return self._refuse(Status.NOT_FOUND, f"{problem} among the services of this server")

    def _list_extensions(self, name: str) -> Any:
        if not any(each.has_message(name) for each in self._described):
            return self._refuse(Status.NOT_FOUND, f'no message "{name}" among the services of this server')
        return self._respond(all_extension_numbers_response=self._pb.ExtensionNumberResponse(base_type_name=name))

    def _refuse(self, status: Status, text: str) -> Any:
        return self._respond(error_response=self._pb.ErrorResponse(status.value, text))

    def _respond(self, **answer: Any) -> Any:
        return self._pb.ServerReflectionResponse(**answer)


def _choice(question: Any) -> tuple[str, Any]:
    return betterproto2.which_one_of(question, "message_request")
