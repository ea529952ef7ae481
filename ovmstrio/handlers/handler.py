"""Loaded handlers: methods as answers to HTTP requests and RPCs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from ovmstrio.core.http_messages import AfterResponse, HttpAnswer, HttpRequest
from ovmstrio.handlers.handler_class import HandlerMethod
from ovmstrio.handlers.http_values import http_arguments, to_response

if TYPE_CHECKING:
    from ovmstrio.handlers.grpc.call import RpcCall
    from ovmstrio.handlers.grpc.proto_compiler import Rpc

from ovmstrio.handlers.handler_calls import HandlerCalls


class LoadedHandler(HandlerCalls):
    """A handler in this process, with its HTTP answers and RPCs."""

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Answer a request; see :class:`HttpHandler`."""
        result = await self.call(name, **await http_arguments(self.methods[name].arguments, request))
        return await to_response(result, self, name)

    async def answer_rpc(self, rpc: Rpc, call: RpcCall) -> None:
        """Answer a call over gRPC; see :class:`RpcHandler`."""
        from ovmstrio.handlers.grpc.call import CallExecution  # noqa: PLC0415 - not imported for HTTP handlers

        await CallExecution(rpc, call, self).run()


class HttpHandler(Protocol):
    """Handler called over HTTP, in this process or in worker processes."""

    @property
    def methods(self) -> Mapping[str, HandlerMethod]:
        """Methods by name."""
        ...

    @property
    def obstacle(self) -> str:
        """Reason why calls fail now; empty if the handler is ready."""
        ...

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Call a method for a request and return the response; the caller closes a streamed body.

        Raises:
            MalformedPayload: the body does not match its content type.
            UserCodeError: the method raised, which has been logged, or its process exited.
            HTTPError: raised by the method, or converted from Starlette's ``HTTPException``.
            ServerError: raised by the method, or the call cannot run now.
        """
        ...

    def run_after(self, callbacks: Iterable[AfterResponse]) -> None:
        """Run the callbacks of a sent response in the background."""
        ...
